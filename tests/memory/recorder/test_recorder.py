from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import FakeTensorMode
from ctdr_lightning.memory import Recorder, record, record_fake, simulate
from ctdr_lightning.memory.recorder.cuda_clock import CudaClock
from ctdr_lightning.memory.recorder.recorder import _typical_logging_s
from tests.memory.harness import Bench


def named(trace, name):
    return [op for op in trace.ops if op.name.startswith(f"aten.{name}.")]


def value_of(trace, name):
    """The value that the first op of this name made."""
    return trace.values[named(trace, name)[0].outputs[0]]


def test_ops_values_and_saves():
    w = torch.randn(8, 8, requires_grad=True)
    trace = record(lambda: (w @ w).exp().sum())
    assert [op.name for op in trace.ops][:3] == ["aten.mm.default", "aten.exp.default", "aten.sum.default"]
    assert [op.tick for op in trace.ops] == sorted({op.tick for op in trace.ops})
    assert trace.n_ticks == len(trace.ops) + sum(len(s.unpacked) for v in trace.values for s in v.saves)
    exp = value_of(trace, "exp")
    assert exp.shape == (8, 8)
    assert exp.dtype == "float32"
    (save,) = exp.saves
    assert exp.op == 1
    assert save.packed == trace.ops[1].tick
    assert save.packed < save.unpacked[0] <= save.released
    assert not value_of(trace, "mm").saves
    leaf = trace.values[trace.ops[0].inputs[0]]
    assert leaf.op == -1
    assert len(leaf.saves) == 2
    assert trace.resident_bytes == w.nbytes
    assert w.grad is not None


def test_views_share_a_value():
    x = torch.randn(4, 6, requires_grad=True)
    trace = record(lambda: x.exp().view(24).t().sum())
    exp, view = named(trace, "exp")[0], named(trace, "view")[0]
    assert view.outputs == exp.outputs == view.inputs


def test_writes_in_place_make_new_values():
    x = torch.randn(4, requires_grad=True)
    trace = record(lambda: (x * 2).relu_().exp().sum())
    before, after = value_of(trace, "mul"), value_of(trace, "relu_")
    assert before.storage == after.storage
    assert before.overwritten_at == named(trace, "relu_")[0].tick
    assert after.overwritten_at == trace.n_ticks
    assert named(trace, "mul")[0].outputs[0] in trace.unholdable


def test_lifetimes():
    x = torch.randn(256, requires_grad=True)

    def step():
        y = x.exp()
        z = y.sin()
        w = z.cos()
        del y, z
        u = w * 2
        return u.sum()

    trace = record(step)
    storages = {n: trace.storages[value_of(trace, n).storage] for n in ("exp", "sin", "cos", "mul")}
    assert storages["sin"].end == named(trace, "cos")[0].tick, "the program let go of it there"
    assert storages["cos"].end == storages["mul"].end == named(trace, "sum")[0].tick, "at the return"
    assert all(s.n_bytes == x.nbytes for s in storages.values())


def test_module_paths():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    trace = record(lambda: net(torch.ones(2, 4)).sum())
    assert [op.module for op in named(trace, "addmm")] == ["0", "1.0"]
    assert named(trace, "tanh")[0].module == "1.1"
    assert named(trace, "sum")[0].module == ""
    assert all(op.backward for op in named(trace, "tanh_backward"))


@pytest.mark.parametrize(
    ("step", "op", "reason"),
    [
        (lambda w: F.dropout(w.exp(), 0.5).sum(), "bernoulli_", "random"),
        (lambda w: (torch.randn(4) * w).sum(), "randn", "random"),
        (lambda w: (w.exp() * w.exp().numpy(force=True).sum()).sum(), "exp", ""),
        (lambda w: _partly_written(w).sum(), "mul_", "through a view"),
        (lambda w: _buffer_written(w).sum(), "add_", "from before the step"),
        (lambda w: _written_behind(w).sum(), "exp", "while autograd awaits it"),
        (lambda w: _source_written(w).sum(), "add", "overwritten before the backward"),
    ],
)
def test_pins_and_their_reasons(step, op, reason):
    w = torch.randn(4, requires_grad=True)
    found = value_of(record(lambda: step(w)), op).pin
    assert reason in found
    assert bool(found) == bool(reason)


def _partly_written(w):
    y = w.sin()
    y[:2].mul_(2)
    return y.cos()


BUFFER, OTHER = torch.zeros(4), torch.zeros(4)


def _buffer_written(w):
    return (BUFFER.add_(1) * w).exp()


def _written_behind(w):
    y = w.exp()
    y.data.mul_(2)
    return y.cos()


def _source_written(w):
    y = OTHER + w
    z = y.exp()
    OTHER.add_(1)
    return z


def test_random_attention_is_pinned_only_with_dropout():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    calm = record(lambda: F.scaled_dot_product_attention(q, q, q).sum())
    assert all(not op.pin for op in calm.ops if not op.backward)
    wild = record(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum())
    assert any("random" in op.pin for op in wild.ops)


def test_costs_are_measured():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    start = perf_counter()
    trace = record(lambda: net(torch.randn(8, 3, 32, 32)).sum())
    assert all(op.seconds > 0 for op in trace.ops)
    assert trace.seconds < perf_counter() - start


def test_the_step_runs_once_as_ever():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
    bench = Bench(net, lambda net: net(torch.ones(4, 8).cumsum(0)).square().sum())
    want = bench.run()
    assert not bench.run(Recorder(), around=True).differs_from(want)
    assert net[1].num_batches_tracked == 1


def test_the_simulated_plain_step_is_the_measured_one():
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
    x = torch.randn(64, 32)
    bench = Bench(net, lambda net: net(x).square().mean())
    trace = bench.record()
    assert simulate(trace).peak_bytes - trace.resident_bytes == bench.peak_bytes()


def test_fake_tensors_need_neither_time_nor_memory():
    with FakeTensorMode():
        net = nn.Sequential(*[nn.Linear(2**14, 2**14) for _ in range(8)])
        trace = record(lambda: net(torch.randn(2**12, 2**14)).sum(), device="h100")
    assert trace.resident_bytes > 8 * 2**30
    flops = 3 * 8 * 2 * 2**12 * 2**28
    assert trace.seconds == pytest.approx(flops / DEVICES["h100"].flops32_per_s, rel=0.2)


def test_what_is_no_step_is_refused():
    for step in (lambda: None, lambda: torch.ones(3, requires_grad=True), lambda: torch.ones(())):
        with pytest.raises(ConfigError, match="scalar loss that requires grad"):
            record(step)
    with pytest.raises(ConfigError, match="not in the table"):
        record(lambda: torch.ones((), requires_grad=True), device="abacus")


def test_pythons_time_is_measured_where_kernels_wait_for_it():
    net, x = torch.nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    assert 1e-6 < record(lambda: net(x).sum()).python_s_per_replay < 1e-1
    assert record_fake(net, x, lambda net, x: net(x).sum()).python_s_per_replay == 0.0


def test_pythons_time_is_that_of_ops_that_make_bytes():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Flatten(), nn.Tanh(), nn.Flatten()), torch.randn(32, 8, 8)
    trace = record(lambda: net(x.reshape(32, 64)).sum())
    large = [op for op in trace.forward_ops if trace.ops[op].name in {"aten.addmm.default", "aten.tanh.default"}]
    logging_s = dict.fromkeys(trace.forward_ops, 1e-6) | dict.fromkeys(large, 9e-6)
    assert len(large) < len(logging_s) / 2
    assert _typical_logging_s(trace, logging_s) == 9e-6
    assert _typical_logging_s(trace, {}) == 0.0


def test_the_modules_that_train_are_counted_up_to_the_last_op():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Identity()), torch.randn(2, 4)
    net[2].eval()
    assert record(lambda: net(x).sum()).n_training == 4
    assert record(lambda: net[2](net[0](x)).sum()).n_training == 1
    assert record(lambda: x.requires_grad_().sum()).n_training == 0


@pytest.mark.parametrize(("weights", "device"), [("cuda", "cuda"), ("cpu", "cpu"), ("meta", "cpu")])
def test_a_step_is_on_the_device_of_its_weights_whatever_it_begins_with(weights, device):
    weight = SimpleNamespace(device=torch.device(weights), is_cuda=weights == "cuda")
    recorder = Recorder(standing=[weight])
    clock = recorder._choose_clock((torch.arange(3),))
    assert recorder._device == device
    assert isinstance(clock, CudaClock) is (device == "cuda")
