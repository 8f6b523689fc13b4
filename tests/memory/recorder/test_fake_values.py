"""Steps that read values of tensors, recorded on fake tensors: their operators and peak are those of a real step."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from ctdr_lightning import record
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.simulator.simulator import Simulator

READ, ITEM = {}, "aten._local_scalar_dense.default"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
        self.accuracy, self.auroc, self.mean = MulticlassAccuracy(10), MulticlassAUROC(10), MeanMetric()
        self.total = 0.0

    def forward(self, x):
        return self.layers(x)


def reads(function):
    """Register a step; what it reads follows from the batch, or is the same for any activations."""
    READ[function.__name__] = function
    return function


def plain(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


@reads
def adds_its_loss(net, batch):
    loss = plain(net, batch)
    net.total += loss.item()
    return loss


@reads
def prints_its_loss(net, batch):
    loss = plain(net, batch)
    net.total = f"{loss:.3f}"
    return loss


@reads
def keeps_its_loss_in_numpy(net, batch):
    loss = plain(net, batch)
    net.total = np.asarray([loss.detach().numpy()])
    return loss


@reads
def counts_hits(net, batch):
    out = net(batch[0])
    net.total = (out.argmax(1) == batch[1]).float().mean().item()
    return F.cross_entropy(out, batch[1])


@reads
def refuses_what_is_not_finite(net, batch):
    out = net(batch[0])
    loss = F.cross_entropy(out, batch[1])
    if torch.isnan(out).any() or not torch.isfinite(loss):
        raise ValueError("not finite")
    return loss


@reads
def measures(net, batch):
    out = net(batch[0])
    net.accuracy(out, batch[1])
    net.auroc.update(out, batch[1])
    loss = F.cross_entropy(out, batch[1])
    net.mean(loss)
    return loss


@reads
def takes_a_distribution(net, batch):
    chances = torch.distributions.Categorical(logits=net(batch[0]))
    return -chances.log_prob(chances.sample()).mean()


@reads
def mixes(net, batch):
    share = torch.distributions.Beta(1.0, 1.0).sample().item()
    return F.cross_entropy(net(share * batch[0] + (1 - share) * batch[0].flip(0)), batch[1])


@reads
def cuts_by_the_longest(net, batch):
    return net(batch[0][: int((batch[1] % 7 + 2).max())]).square().mean()


@reads
def goes_by_class(net, batch):
    out = net(batch[0])
    return sum(out[:, int(c)].mean() for c in batch[1].unique() if (batch[1] == c).any())


@reads
def writes_into_labels(net, batch):
    classes = batch[1]
    classes[classes == 3] = 0
    classes.clamp_(max=int(classes.max()))
    return plain(net, batch)


@reads
def decides_by_a_flag(net, batch):
    seen = torch.zeros(32, dtype=torch.bool)
    rows = seen[:4]
    seen.scatter_(0, batch[1], True)
    return net(batch[0][: 8 if seen.any() else 1]).mean() * (2 if len(rows) > 1 else 1)


def batch_of():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


@pytest.mark.parametrize("name", READ)
def test_a_step_that_reads_values_is_recorded_as_the_real_one(name):
    net, batch, state = Net(), batch_of(), torch.get_rng_state()
    fake = record_fake(net, batch, READ[name], reads_values=True)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(batch[1], batch_of()[1])
    standing = (*net.parameters(), *net.buffers())
    real = record(lambda: READ[name](net, batch), root=net, standing=standing)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert Simulator(fake).peak_bytes == Simulator(real).peak_bytes


@pytest.mark.parametrize("name", READ)
def test_the_same_step_for_a_gpu_needs_as_much(name):
    here, there = (record_fake(Net(), batch_of(), READ[name], device=d, reads_values=True) for d in (None, "a100"))
    assert Simulator(there).peak_bytes == pytest.approx(Simulator(here).peak_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "assumed"),
    [("adds_its_loss", ITEM), ("counts_hits", ITEM), ("cuts_by_the_longest", ""), ("goes_by_class", "")],
)
def test_the_trace_names_what_was_assumed(name, assumed):
    fake = record_fake(Net(), batch_of(), READ[name], reads_values=True)
    assert fake.meta.get("assumed", "") == assumed


@pytest.mark.parametrize("name", ["adds_its_loss", "cuts_by_the_longest", "goes_by_class"])
def test_a_step_that_may_not_read_values_is_refused(name):
    with pytest.raises(ConfigError, match="needs the values of tensors"):
        record_fake(Net(), batch_of(), READ[name])


def hugging_face(attention_mask, use_cache=True):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, use_cache=use_cache))
    tokens = torch.randint(1, 64, (2, 16))
    return net, {"input_ids": tokens, "labels": tokens, "attention_mask": attention_mask}


PADDED = torch.ones(2, 16, dtype=torch.int64).tril(12)


@pytest.mark.parametrize(
    ("mask", "use_cache", "kernel"),
    [
        (None, True, "flash"),
        (None, False, "flash"),
        (torch.ones_like(PADDED), True, "flash"),
        (PADDED, True, "efficient"),
    ],
)
def test_models_of_transformers_omit_the_masks_that_they_omit_in_a_run(mask, use_cache, kernel):
    net, batch = hugging_face(mask, use_cache)

    def step(net, batch):
        return net(**batch).loss

    step(net, batch).backward()  # buffers are made by the first forward
    net.zero_grad()
    real = record(lambda: step(net, batch), root=net, standing=(*net.parameters(), *net.buffers()))
    fake = record_fake(net, batch, step, reads_values=True)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert Simulator(fake).peak_bytes == Simulator(real).peak_bytes
    card = record_fake(net, batch, step, device="a100", precision="bf16-true", reads_values=True)
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in [op.name for op in card.ops]


def test_a_mask_that_is_not_known_is_built():
    """The larger step, as a batch may be padded."""
    net, batch = hugging_face(torch.ones_like(PADDED))
    empty = {name: tensor.to("meta") for name, tensor in batch.items()}
    asked = {"device": "a100", "precision": "bf16-true", "reads_values": True}
    card = record_fake(net, empty, lambda net, b: net(**b).loss, **asked)
    assert "aten._scaled_dot_product_efficient_attention.default" in [op.name for op in card.ops]


def test_an_operator_without_a_fake_kernel_is_recorded_for_a_card():
    def step(net, batch):
        chances = net(batch[0]).view(8, 4, 10).log_softmax(2)
        return F.ctc_loss(chances, batch[1][:8].view(4, 2) + 1, torch.full((4,), 8), torch.full((4,), 2))

    small = (batch_of()[0], batch_of()[1] % 9)
    assert "aten._ctc_loss.Tensor" in [op.name for op in record_fake(Net(), small, step, reads_values=True).ops]
    card = record_fake(Net(), small, step, device="a100", reads_values=True)
    assert any("ctc_loss" in op.name for op in card.ops)


def test_draws_differ_and_leave_the_generators_alone():
    mine, seen = torch.Generator().manual_seed(0), []

    def step(net, batch):
        while torch.rand(()) < 0.9:
            pass
        seen.append(torch.randint(0, 1000, (8,)).tolist())
        seen.append(torch.rand(2, generator=mine).tolist())
        return plain(net, batch)

    before = mine.get_state()
    record_fake(Net(), batch_of(), step, reads_values=True)
    draws, own = seen
    assert len(set(draws)) > 1
    assert own == [2.0, 2.0]  # assumed, since to draw would change the user's generator
    assert torch.equal(mine.get_state(), before)


def test_only_operators_of_torch_run_beside_the_recording():
    ran = []

    @torch.library.custom_op("ctdr_tests::told", mutates_args=())
    def told(flags: torch.Tensor) -> torch.Tensor:
        ran.append(flags)
        return flags.clone()

    told.register_fake(torch.empty_like)
    fake = record_fake(Net(), batch_of(), lambda net, batch: plain(net, (batch[0], told(batch[1]))), reads_values=True)
    assert "ctdr_tests.told.default" in [op.name for op in fake.ops]
    assert not ran


def test_inputs_without_contents_are_assumed():
    empty = (torch.empty(32, 64, device="meta"), torch.empty(32, dtype=torch.int64, device="meta"))
    fake = record_fake(Net(), empty, cuts_by_the_longest, reads_values=True)
    assert fake.meta["assumed"] == ITEM


def test_a_large_flag_is_read_without_a_tensor_of_its_size():
    """2^26 flags of one value each."""

    def step(net, x):
        wide = net(x)[:, :, None].expand(2**12, 64, 256)
        if torch.isnan(wide).any() or not torch.isfinite(wide).all():
            raise ValueError("not finite")
        return net(x).mean()

    x = torch.empty(2**12, 64, device="meta")
    assert record_fake(nn.Linear(64, 64), x, step, reads_values=True).meta["assumed"] == ITEM


class Packs(nn.Module):
    """Sequences of other lengths, packed, through a recurrent layer, and padded again."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = getattr(nn, kind)(16, 24, 2, batch_first=True, bidirectional=True), nn.Linear(48, 3)

    def forward(self, rows, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths.cpu(), batch_first=True, enforce_sorted=False)
        padded, again = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(padded).sum() * int((again == lengths).all())


SEQUENCES = torch.randn(5, 9, 16), torch.tensor([9, 3, 3, 7, 1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_are_recorded_by_their_lengths(kind):
    net = Packs(kind)
    real = record(lambda: net(*SEQUENCES), root=net)
    fake = record_fake(net, SEQUENCES, lambda module, inputs: module(*inputs), reads_values=True)
    # behind a write autograd takes views of a fake tensor anew, by their own operators in the place of strides
    views = ("aten.slice.Tensor", "aten.as_strided.default")
    names = ([op.name for op in trace.ops if op.name not in views] for trace in (real, fake))
    assert next(names) == next(names)
    assert fake.meta.get("assumed") is None
    at_most = 2 * 8 * sum(SEQUENCES[0].shape[:2])  # lengths and batch sizes, true and fake
    assert 0 <= Simulator(fake).peak_bytes - Simulator(real).peak_bytes <= at_most


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_are_cudnn_s_on_a_card(kind):
    fake = record_fake(Packs(kind), SEQUENCES, lambda module, inputs: module(*inputs), device="a100", reads_values=True)
    names = [op.name for op in fake.ops]
    assert names.count("aten._cudnn_rnn.default") == names.count("aten._cudnn_rnn_backward.default") == 1
    assert len(names) < 150  # 600 by single operators
