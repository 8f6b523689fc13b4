"""The loop over chunks of a loss: one operator that costs what its calls cost."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.memory import record, record_fake, simulate
from ctdr_lightning.memory.lazy import chunked_loss
from ctdr_lightning.memory.lazy.chunked_loss import LossTerms, chunked_cross_entropy
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.values import chunk_loop
from ctdr_lightning.memory.values.live_bytes import PeakMeter

WIDTH, CLASSES, ROWS = 256, 8000, 4100
TERMS = {"mean": {}, "smoothed": {"label_smoothing": 0.1}, "each": {"reduction": "none"}}


class Net(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def in_single_calls(*args):
    loop = chunk_loop._Loop(*args)
    return loop.fill(loop.results())


def step_of(terms):
    def step(net, batch):
        with LazyHeads(net):
            return F.cross_entropy(net(batch[0]), batch[1], **TERMS[terms]).mean()

    return step


def seconds(trace):
    return sum(op.seconds for op in trace.ops)


@pytest.mark.parametrize(
    ("terms", "bias", "device", "precision"),
    [
        ("mean", True, None, None),
        ("smoothed", False, None, None),
        ("each", False, None, None),
        ("mean", True, None, "bf16-mixed"),
        ("mean", True, "rtx3070", "bf16-mixed"),
        ("smoothed", True, "a100", "bf16-true"),
        ("each", False, "a100", "32-true"),
    ],
)
def test_it_costs_what_its_calls_cost(terms, bias, device, precision, monkeypatch):
    def recorded():
        batch = torch.empty(ROWS, WIDTH, device="meta"), torch.empty(ROWS, dtype=torch.long, device="meta")
        return record_fake(net, batch, step_of(terms), device=device, precision=precision)

    with torch.device("meta"):
        net = Net(bias)
    one = recorded()
    monkeypatch.setattr(chunked_loss, "cross_entropy_chunks", in_single_calls)
    many = recorded()
    assert len(one.ops) < 75 < 200 < len(many.ops)
    assert simulate(one).peak_bytes == simulate(many).peak_bytes
    assert seconds(one) == pytest.approx(seconds(many), rel=0.05)


@pytest.mark.parametrize("terms", TERMS)
def test_a_step_on_fake_tensors_has_the_bytes_of_a_real_one(terms):
    net, batch, step = Net(True), (torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))), step_of(terms)
    real, fake = record(lambda: step(net, batch)), record_fake(net, batch, step)
    assert [op.name for op in real.ops] == [op.name for op in fake.ops]
    assert simulate(real).peak_bytes == simulate(fake).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERMS)
def test_its_memory_counts_where_a_step_is_measured(terms):
    net, batch, step = Net(True), (torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))), step_of(terms)
    trace = record(lambda: step(net, batch))
    net.zero_grad()
    with PeakMeter() as meter:
        step(net, batch).backward()
    assert meter.live.peak == simulate(trace).peak_bytes - trace.resident_bytes


def test_steps_of_two_batches_have_the_same_ops():
    with torch.device("meta"):
        net = Net(False)
    names = []
    for rows in (ROWS, 4 * ROWS):
        batch = torch.empty(rows, WIDTH, device="meta"), torch.empty(rows, dtype=torch.long, device="meta")
        names.append([op.name for op in record_fake(net, batch, step_of("mean")).ops])
    assert names[0] == names[1]


@pytest.mark.parametrize(("soft", "wanted"), list(product([False, True], [(True, True, True), (False, True, False)])))
def test_torch_finds_the_operator_well_formed(soft, wanted, monkeypatch):
    calls = []
    monkeypatch.setattr(
        chunked_loss, "cross_entropy_chunks", lambda *args: calls.append(args) or in_single_calls(*args)
    )
    hidden, weight = torch.randn(300, 16), torch.randn(9, 16)
    target = torch.rand(300, 9) if soft else torch.randint(9, (300,))
    given = (t.requires_grad_(w) for t, w in zip((hidden, weight, torch.randn(9)), wanted, strict=True))
    chunked_cross_entropy(*given, target, LossTerms(smoothing=0.1), torch.float32)
    (args,) = calls
    args = torch.utils._pytree.tree_map_only(torch.Tensor, torch.detach, args)
    torch.library.opcheck(chunk_loop.cross_entropy_chunks, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_a_recording_under_a_budget_makes_room_for_a_chunk_and_knows_gradients_of_the_forward():
    net, step = Net(False), step_of("mean")
    net.body = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    batch = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    plain = record(lambda: step(net, batch))
    (loss,) = (op for op in plain.ops if op.name.startswith("ctdr_lightning."))
    budget_bytes = loss.temp_bytes + sum(p.nbytes for p in net.parameters()) + 4 * batch[0].nbytes
    assert simulate(plain).peak_bytes - plain.resident_bytes > 1.1 * budget_bytes
    net.zero_grad()
    with PeakMeter() as meter:
        found = record(lambda: step(net, batch), budget_bytes=budget_bytes)
    assert meter.live.peak <= budget_bytes
    assert simulate(found).peak_bytes == simulate(plain).peak_bytes
