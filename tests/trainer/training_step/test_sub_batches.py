"""Sub-batches: gradients, loss and logs of the whole batch, a budget that holds, and what cannot be cut is refused."""

import random
import re
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.units import parse_bytes
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning.trainer.training_step.sub_batches.parts import n_samples, parts_of
from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks
from tests import forks, parts
from tests.trainer.training_step.test_whole_batch import TruePeak

WIDTH = 64
# Of the largest entry: double precision leaves 1e-15 a sum, single 1e-7.
DOUBLE, SINGLE = 1e-12, 1e-5


class Deep(LightningModule):
    """Activations outweigh weights where batches are large."""

    def __init__(self, make=torch.optim.Adam, layer=nn.GELU):
        super().__init__()
        torch.manual_seed(0)
        layers = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), layer())]
        self.net, self.make, self.calls = nn.Sequential(*layers, nn.Linear(WIDTH, 4)), make, 0

    def training_step(self, batch, index):
        self.calls += 1
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=0.01)


class Seen(Callback):
    """Gradients after each backward, and the outputs of each step."""

    def __init__(self):
        self.gradients, self.outputs = [], []

    def on_after_backward(self, trainer, module):
        self.gradients.append([p.grad.detach().clone() for p in module.parameters() if p.requires_grad])

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.outputs.append(outputs)


def samples(n):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(n, WIDTH), torch.arange(n) % 4)


def data(n=27, batch_size=10, **options):
    return DataLoader(samples(n), batch_size, **options), None


def fit(module, *callbacks, loader=None, **options):
    own = {name: options.pop(name) for name in list(options) if name in CallbackOptions.__dataclass_fields__}
    ours = [CTDRCallback(**grouped({"rank": None, "verbose": False, **own}))] if own else []
    seen = Seen()
    torch.manual_seed(2)
    trainer = parts.fit(module, *ours, *callbacks, seen, data=loader or data(), **options)
    seen.trainer, seen.callback, seen.module = trainer, ours[0] if ours else None, module
    return seen


def equal(first, second, tolerance):
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a - b).abs().max() <= tolerance * a.abs().max()


def losses(seen):
    return [[output["loss"]] for output in seen.outputs]


class Dicts(Deep):
    def training_step(self, batch, index):
        assert len(batch["names"]) == len(batch["more"][0])
        assert batch["scale"].ndim == 0
        return {"loss": super().training_step((batch["x"], batch["more"][0]), index), "rows": batch["more"][0]}


def as_dict(rows):
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "more": (torch.stack(y),), "names": ["a"] * len(y), "scale": torch.tensor(2.0)}


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("number", [2, 3, 10])
def test_gradients_and_losses_are_the_whole_batch_s(number, budget):
    """Batches of 10, 10 and 7: uneven parts, batches of two sizes, and one of fewer samples than parts."""
    plain = fit(Deep(torch.optim.SGD), precision="64-true")
    cut = fit(Deep(torch.optim.SGD), precision="64-true", sub_batches=number, memory_budget=budget)
    equal(plain.gradients, cut.gradients, DOUBLE)
    equal(losses(plain), losses(cut), DOUBLE)
    assert cut.module.calls == 2 * (2 * number + min(number, 7))
    assert "training_step" not in vars(cut.module)
    assert "log" not in vars(cut.module)


def test_nests_clipping_and_outputs():
    loader = DataLoader(samples(27), 10, collate_fn=as_dict), None
    options = {"precision": "64-true", "loader": loader, "gradient_clip_val": 0.01}
    plain, cut = fit(Dicts(), **options), fit(Dicts(), sub_batches=3, **options)
    equal(plain.gradients, cut.gradients, DOUBLE)
    assert all(torch.equal(a["rows"], b["rows"]) for a, b in zip(plain.outputs, cut.outputs, strict=True))
    equal([list(plain.module.parameters())], [list(cut.module.parameters())], 1e-9)


def test_single_and_mixed_precision():
    for precision, tolerance in (("32-true", SINGLE), ("bf16-mixed", 0.05)):
        options = {"precision": precision, "max_epochs": 1}
        plain, cut = fit(Deep(torch.optim.SGD), **options), fit(Deep(torch.optim.SGD), sub_batches=3, **options)
        equal(plain.gradients, cut.gradients, tolerance)
        equal(losses(plain), losses(cut), tolerance)


def test_a_scaled_loss():
    def plugin():
        return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))

    plain = fit(Deep(torch.optim.SGD), plugins=[plugin()], max_epochs=1)
    cut = fit(Deep(torch.optim.SGD), plugins=[plugin()], max_epochs=1, sub_batches=3)
    equal(plain.gradients, cut.gradients, 0.02)
    assert plain.gradients[0][0].abs().max() > 0


@pytest.mark.slow
def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    whole = fit(Deep(), sub_batches=3, memory_budget="64MiB")
    saves = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    fit(Deep(), saves, sub_batches=3, memory_budget="64MiB", max_epochs=1, enable_checkpointing=True)
    resumed = fit(Deep(), sub_batches=3, memory_budget="64MiB", ckpt_path=tmp_path / "last.ckpt")
    assert parts.same(whole.module.state_dict(), resumed.module.state_dict())


class Logs(Deep):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        x = batch[0]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", x.mean(), on_epoch=True, batch_size=len(x))
        for name in ("sum", "max", "min"):
            self.log(name, getattr(x, name)(), on_epoch=True, on_step=False, reduce_fx=name)
        self.log_dict({"rows": float(len(x)), "n": len(x)}, on_epoch=True, on_step=False, reduce_fx=torch.sum)
        self.mean(x.mean(1))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss


def test_what_is_logged_is_the_whole_batch_s():
    plain, cut = fit(Logs(), max_epochs=1), fit(Logs(), max_epochs=1, sub_batches=4, memory_budget="64MiB")
    logged = {name: value for name, value in cut.trainer.callback_metrics.items() if "ctdr/" not in name}
    assert logged.keys() == plain.trainer.callback_metrics.keys() >= {"loss_step", "loss_epoch", "mean", "n", "metric"}
    for name, value in plain.trainer.callback_metrics.items():
        assert logged[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


ROWS = 4096


def large():
    return data(5 * ROWS, ROWS)


@pytest.mark.slow
def test_the_error_names_it_and_the_budget_holds_with_it():
    budget = "4MiB"
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(Deep(), memory_budget=budget, loader=large(), max_epochs=1)
    named = re.search(
        r"memory=Memory\(\.\.\., sub_batches='auto'\), with which it takes ([\d.]+ MiB) in (\d+)", str(caught.value)
    )
    assert named, caught.value
    peak = TruePeak()
    cut = fit(Deep(), peak, memory_budget=budget, loader=large(), max_epochs=1, sub_batches="auto")
    number = int(named[2])
    assert number > 1
    assert words_of(cut.callback.run.memory.session.events[0]).startswith(
        f"Batches of {ROWS} samples run as {number} sub-batches"
    )
    measured, predicted = (
        cut.trainer.callback_metrics[f"ctdr/{name}_gib"].item() * 2**30 for name in ("peak_memory", "predicted_peak")
    )
    assert peak.use.peak_bytes <= measured <= 1.001 * predicted <= 1.001 * parse_bytes(budget)
    assert parse_bytes(named[1]) <= parse_bytes(budget)
    if number > 2:
        with pytest.raises(InfeasibleBudgetError):  # it is the smallest number
            fit(Deep(), memory_budget=budget, loader=large(), max_epochs=1, sub_batches=number - 1)
    plain = fit(Deep(), loader=large(), max_epochs=1)
    equal(plain.gradients[:1], cut.gradients[:1], SINGLE)


@pytest.mark.slow
def test_each_size_of_batch_has_its_own_number():
    rows = ROWS + 64
    loader = DataLoader(samples(rows), ROWS), None
    cut = fit(Deep(torch.optim.SGD), memory_budget="4MiB", loader=loader, max_epochs=1, sub_batches="auto")
    plain = fit(Deep(torch.optim.SGD), loader=loader, max_epochs=1)
    equal(plain.gradients, cut.gradients, SINGLE)
    assert len([event for event in cut.callback.run.memory.session.events if "sub-batches" in words_of(event)]) == 1
    assert cut.module.calls > 2


def test_nothing_is_cut_where_the_batch_fits():
    plain = fit(Deep(), memory_budget="64MiB")
    cut = fit(Deep(), memory_budget="64MiB", sub_batches="auto")
    assert parts.same(plain.module.state_dict(), cut.module.state_dict())
    assert plain.module.calls == cut.module.calls


class ReadsValues(Deep):
    def training_step(self, batch, index):
        return super().training_step(batch, index) * (1 if batch[0].sum().item() else 2)


@pytest.mark.slow
def test_a_step_that_reads_values_is_looked_ahead():
    cut = fit(ReadsValues(torch.optim.SGD), memory_budget="4MiB", loader=large(), max_epochs=1, sub_batches="auto")
    plain = fit(ReadsValues(torch.optim.SGD), loader=large(), max_epochs=1)
    equal(plain.gradients, cut.gradients, SINGLE)
    assert cut.module.calls > plain.module.calls


class ReadsByPointer(Deep):
    """Its step reads memory by DLPack, which no fake tensor has."""

    def training_step(self, batch, index):
        return super().training_step(batch, index) * (1 if torch.from_dlpack(batch[0].__dlpack__()).any() else 2)


@pytest.mark.slow
def test_what_cannot_be_looked_ahead_is_said():
    with pytest.raises(ConfigError, match=r"cannot be predicted.*\nHINT: Give a number"):
        fit(ReadsByPointer(), memory_budget="4MiB", loader=large(), sub_batches="auto")
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(ReadsByPointer(), memory_budget="4MiB", loader=large())
    assert "sub_batches" not in str(caught.value)


def batch_norm():
    return nn.BatchNorm1d(WIDTH)


class Frozen(Deep):
    def train(self, mode=True):
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.training = False
        return self


@pytest.mark.slow
def test_batch_norm_is_refused_unless_it_is_frozen():
    with pytest.raises(ConfigError, match=r"net.1 \(BatchNorm1d\) normalises each sample by its whole batch"):
        fit(Deep(layer=batch_norm), sub_batches=2)
    frozen = [fit(Frozen(layer=batch_norm).train(), **options) for options in ({}, {"sub_batches": 2})]
    equal(*[seen.gradients for seen in frozen], 1e-4)
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(Deep(layer=batch_norm), memory_budget="4MiB", loader=large(), batch_norm_in_parts=False)
    assert "sub_batches" not in str(caught.value)


@pytest.mark.slow
def test_parts_that_batch_norm_normalises_by_themselves_are_advised():
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(Deep(layer=batch_norm), memory_budget="4MiB", loader=large())
    named = r"sub_batches='auto'\), with which it takes .* sub-batches, and batch_norm_in_parts=True, so that net.1 "
    assert re.search(named, str(caught.value))
    fit(Deep(layer=batch_norm), memory_budget="4MiB", loader=large(), sub_batches="auto", batch_norm_in_parts=True)


class Manual(Deep):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Backward(Deep):
    def backward(self, loss):
        loss.backward()


class Reads(Deep):
    def training_step(self, batch, index):
        self.log("norm", 0.0 if self.net[0].weight.grad is None else self.net[0].weight.grad.norm())
        return super().training_step(batch, index)


class Clamps(Deep):
    def __init__(self, *args):
        super().__init__(*args)
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


class Updates(Deep):
    """An optimizer of the user's own, in the backward."""

    def __init__(self, *args):
        super().__init__(*args)
        self.net[0].weight.register_post_accumulate_grad_hook(lambda weight: weight.data.sub_(0.1 * weight.grad))


class Sums(Deep):
    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class Weighted(Deep):
    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))


class Contrasts(Deep):
    def training_step(self, batch, index):
        rows = F.normalize(self.net(batch[0]))
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class Padded(Deep):
    """Class 3 is padding."""

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=3)


def padded_at_the_end(n=40):
    classes = torch.arange(n) % 3
    classes[-3::2] = 3
    return DataLoader(TensorDataset(samples(n).tensors[0], classes), n), None


class Normalises(Deep):
    def training_step(self, batch, index):
        return F.cross_entropy(F.batch_norm(self.net(batch[0]), None, None, training=True), batch[1])


@pytest.mark.parametrize(
    ("make", "callbacks", "options", "words"),
    [
        (Manual, [], {}, "manual optimization"),
        (Backward, [], {}, "Backward.backward is the module's own"),
        (Reads, [], {}, "Reads.training_step reads the last step's gradients"),
        (Clamps, [], {}, "a hook on the gradient of 'net.0.weight' would run once a part"),
        (Updates, [], {}, "a hook on the gradient of 'net.0.weight' would run once a part"),
        (Deep, [], {"loader": data(4, 1)}, "the batch has 1 sample"),
        (Sums, [], {}, "The loss is not a mean over samples"),
        (Weighted, [], {}, "The loss is not a mean over samples"),
        (Contrasts, [], {}, "The loss is not a mean over samples"),
        (Normalises, [], {}, "The loss is not a mean over samples"),
        (Padded, [], {"loader": padded_at_the_end()}, "The loss is not a mean over samples"),
    ],
)
def test_what_forbids_it_is_said(make, callbacks, options, words):
    refused(make, callbacks, options, words)


def refused(make, callbacks, options, words):
    with pytest.raises(ConfigError, match=words):
        fit(make(), *callbacks, sub_batches=2, **options)


def test_processes_that_exchange_gradients_forbid_it():
    assert forks.run(refused, Deep, [], {"strategy": "ddp"}, "under DDPStrategy gradients are exchanged") == [0]


def test_a_compiled_step_forbids_it():
    module = Deep()
    vars(module)["training_step"] = compiled = partial(module.training_step)
    compiled._torchdynamo_orig_callable = module.training_step
    with pytest.raises(ConfigError, match="the module is compiled"):
        fit(module, sub_batches=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sub_batches": 0}, "sub_batches=0 is not a number"),
        ({"sub_batches": True}, "sub_batches=True is not a number"),
        ({"sub_batches": "few"}, "sub_batches='few' is not a number"),
        ({"sub_batches": "auto"}, "needs a budget"),
        ({"sub_batches": 2, "optimizer_step": "in_backward"}, "updates each parameter after its first gradient"),
        ({"sub_batches": 2, "keep_gradients": True}, "keep_gradients=True asks for gradients"),
        ({"sub_batches": 2, "rank": "auto", "memory_budget": "8GiB"}, "chooses ranks with which the whole batch fits"),
        (
            {"sub_batches": "auto", "memory_budget": "8GiB", "rank": 0.5, "recovery": {"distill": {}}},
            "runs a teacher beside the step",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        CTDRCallback(**grouped({"rank": None, **options}))


class Holder:
    def __init__(self):
        self.rows = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (["a", "b"], "holds no tensor with a row for each sample"),
        ((torch.zeros(4, 2), torch.zeros(3)), r"first sizes of its tensors differ \(3, 4\)"),
        ({"rows": Holder()}, "holds tensors in a Holder"),
        (iter([torch.zeros(4)]), "holds no tensor"),
    ],
)
def test_batches_that_cannot_be_cut(batch, words):
    with pytest.raises(ConfigError, match=words):
        n_samples(batch)


def test_parts_are_the_batch():
    batch = (torch.arange(7), {"names": list("abcdefg"), "pair": ["x", "y"], "one": torch.tensor(1), "n": 3})
    found = parts_of(batch, 3)
    assert [len(part.batch[0]) for part in found] == [3, 2, 2]
    assert torch.equal(torch.cat([part.batch[0] for part in found]), batch[0])
    assert ["".join(part.batch[1]["names"]) for part in found] == ["abc", "de", "fg"]
    assert all(part.batch[1]["pair"] == ["x", "y"] and part.batch[1]["n"] == 3 for part in found)
    assert sum(part.share for part in found) == pytest.approx(1)
    assert found[1].batch[0].data_ptr() == batch[0][3:].data_ptr(), "a view, not a copy"


@dataclass
class Rows:
    x: torch.Tensor
    names: list


@pytest.mark.parametrize("made", [Rows, lambda x, names: UserDict(x=x, names=names)])
def test_parts_of_other_mappings_and_dataclasses(made):
    first, second = parts_of(made(torch.arange(5), list("abcde")), 2)
    assert type(second.batch) is type(made(1, 2))
    entries = second.batch if isinstance(second.batch, UserDict) else vars(second.batch)
    assert (entries["x"].tolist(), entries["names"], first.share) == ([3, 4], ["d", "e"], 0.6)


class Draws(Deep):
    """Layers that draw, state of every kind that a step moves."""

    def __init__(self, noise=0.0):
        super().__init__(layer=partial(nn.Dropout, 0.5))
        self.noise, self.seen, self.drawn = noise, [], []
        self.register_buffer("steps", torch.zeros(()))
        self.total = MeanMetric()

    def training_step(self, batch, index):
        self.steps += 1
        self.seen.append(len(batch[0]))
        self.drawn.append(random.random())
        self.total(batch[0])
        return super().training_step(batch, index) * (1 + self.noise * random.SystemRandom().random())


def test_the_check_of_the_loss_leaves_nothing_behind(recwarn):
    random.seed(3)
    found = fit(Draws(), sub_batches=2, max_epochs=1).module
    random.seed(3)
    assert found.drawn == [random.random() for _ in range(6)]
    assert (found.steps, found.seen, found.calls) == (3, [5, 5, 5, 5, 4, 3], 6)  # a buffer changes as by whole batches
    assert not [w for w in recwarn if "could not be checked" in str(w.message)]


class Augments(Deep):
    """Noise and times for each sample, as in a diffusion; an order of samples; flips and shifts of the batch."""

    def training_step(self, batch, index):
        x, y = batch
        x = x + torch.randn_like(x) * torch.randint(1, 9, (len(x), 1)) + torch.empty_like(x).uniform_()
        x = x.flip(1) if random.random() < 0.5 else x
        x = x + 0.1 * x[torch.randperm(len(x))] + np.random.rand()
        x = x * torch.rand(2).prod() * torch.rand(3).sum()  # of the batch: as many as a part of the check has samples
        return super().training_step((x, y), index)


def test_a_loss_of_augmented_samples_is_checked(recwarn):
    random.seed(3)
    found = fit(Augments(), sub_batches=2, max_epochs=1).module
    assert found.calls == 6
    assert not [w for w in recwarn if "could not be checked" in str(w.message)]
    drawn = random.random()
    random.seed(3)
    assert drawn == [random.random() for _ in range(7)][-1]  # the check took none


class Contrasts(Augments):
    def training_step(self, batch, index):
        return super().training_step(batch, index) + torch.cdist(batch[0], batch[0]).mean()


class Masks(Deep):
    """A mean over the features that are drawn: of other numbers of them in each part."""

    def training_step(self, batch, index):
        error = (self.net(batch[0]) - 1).square().sum(1, keepdim=True) * batch[0].square()
        return error[torch.rand_like(error) < 0.1].mean()


class OneByOne(Deep):
    """The host draws for each sample."""

    def training_step(self, batch, index):
        scales = torch.tensor([self.draw() for _ in batch[0]])
        return super().training_step((batch[0] * scales[:, None], batch[1]), index) * scales.mean()

    def draw(self):
        return random.random()


class ByNumpy(OneByOne):
    def draw(self):
        return float(np.random.rand())


class Unfixed(OneByOne):
    """By an operator whose draws are not fixed."""

    def draw(self):
        return float(torch.multinomial(torch.ones(9), 1)) + 1


@pytest.mark.parametrize("kind", [Contrasts, Masks, OneByOne, ByNumpy, Unfixed])
def test_a_loss_between_samples_is_not_taken_for_a_mean_where_it_draws(kind):
    with pytest.warns(UserWarning, match="could not be checked: it differs in parts, which may be for what it draws"):
        fit(kind(), sub_batches=2, max_epochs=1)


class Penalty(Deep):
    """Asks for a gradient, which the check of the loss has no graph for at first, and empties its batch."""

    def training_step(self, batch, index):
        rows = batch.pop(0).requires_grad_()
        score = self.net(rows)
        (slopes,) = torch.autograd.grad(score.sum(), rows, create_graph=True)
        return F.cross_entropy(score, batch.pop(0)) + slopes.square().sum(1).mean()


def test_a_loss_with_a_gradient_in_it_is_checked(recwarn):
    plain, cut = fit(Penalty(), max_epochs=1), fit(Penalty(), sub_batches=3, max_epochs=1)
    equal(plain.gradients, cut.gradients, SINGLE)
    assert not any("could not be checked" in str(warning.message) for warning in recwarn)


def test_a_loss_that_cannot_be_checked_is_said():
    with pytest.warns(UserWarning, match="could not be checked: it differs from call to call"):
        fit(Draws(noise=1.0), sub_batches=2, max_epochs=1)


class Outside(Deep):
    """A large tensor that is no buffer is not put back; a step that would have moved it twice."""

    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(300, 300)

    def training_step(self, batch, index):
        self.queue += 1
        return super().training_step(batch, index)


def test_a_check_that_could_not_be_undone_is_not_made():
    with pytest.warns(UserWarning, match=r"could not be checked: the step changes a tensor of shape \(300, 300\)"):
        found = fit(Outside(), sub_batches=2, max_epochs=1).module
    assert torch.equal(found.queue, torch.full((300, 300), 6.0))


class Skips(Deep):
    """No loss for the second half of the second batch, as a guard against NaN gives none."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index == 1 and self.calls % 2 == 0 else loss


def test_a_batch_with_a_part_that_has_no_loss_is_skipped():
    module = Skips()
    before = {}

    class Before(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 1:
                before.update({name: p.detach().clone() for name, p in module.named_parameters()})

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 1:
                assert all(torch.equal(before[name], p) for name, p in module.named_parameters())

    seen = fit(module, Before(), sub_batches=2, memory_budget="64MiB", max_epochs=1)
    assert len(seen.gradients) == 2
    assert before


class RunsOut(Deep):
    """Memory seems to run out in the forward of one sub-batch of the third batch."""

    failed = 0

    def __init__(self, at):
        super().__init__()
        self.at = at
        RunsOut.failed = 0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=False, on_epoch=True)
        if self.calls == self.at and loss.requires_grad and not RunsOut.failed:  # not in the check of the loss
            RunsOut.failed = 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def three_parts(module):
    """Three batches, of which activations are most, so that plans are soon found for a fifth less."""
    return fit(module, sub_batches=3, memory_budget="64MiB", loader=data(9000, 3000), max_epochs=1)


@pytest.mark.parametrize("at", [7, 9])
def test_a_sub_batch_that_runs_out_of_memory_runs_again(at):
    plain, cut = three_parts(RunsOut(0)), three_parts(RunsOut(at))
    assert RunsOut.failed == 1
    assert parts.same(plain.module.state_dict(), cut.module.state_dict())
    assert plain.trainer.callback_metrics["loss"] == cut.trainer.callback_metrics["loss"]


def test_a_teacher_beside_sub_batches():
    found = fit(Deep(), sub_batches=2, rank=0.5, data=None, recovery={"distill": {"module": "net"}}, max_epochs=1)
    assert len(found.gradients) == 3


class RunsOutInBackward(Deep):
    """Memory seems to run out in the backward of one sub-batch of the third batch."""

    failed = 0

    def __init__(self, at):
        super().__init__()
        self.at = at
        RunsOutInBackward.failed = 0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.calls == self.at and loss.requires_grad:
            loss.register_hook(self.fail)
        return loss

    def fail(self, gradient):
        if not RunsOutInBackward.failed:
            RunsOutInBackward.failed = 1
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.slow
def test_a_backward_that_runs_out_of_memory_runs_again_where_it_adds_to_no_gradients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the account of the failed run is written
    plain, cut = three_parts(RunsOutInBackward(0)), three_parts(RunsOutInBackward(7))
    assert RunsOutInBackward.failed == 1
    assert parts.same(plain.module.state_dict(), cut.module.state_dict())
    with pytest.raises(torch.OutOfMemoryError, match="cannot be retried"):
        three_parts(RunsOutInBackward(9))


def test_where_one_sample_is_too_much_no_other_number_is_recorded(monkeypatch):
    asked = []

    def account(self, number):
        asked.append(number)
        return SimpleNamespace(floor_bytes=2048)

    monkeypatch.setattr(SubBatchPeaks, "account", account)
    whole = ((torch.zeros(64, 3),), {})
    peaks = SubBatchPeaks(lambda inputs: None, [], whole, 1024, "auto")
    assert peaks.fewest(whole=False) == 0
    assert asked == [64]
