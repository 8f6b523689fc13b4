"""Workspaces of CPU ops: simulated peaks are the allocator's, for real and for fake traces."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import profiler_events, start_watching, tree_leaves
from ctdr_lightning.memory import record, record_fake, simulate
from ctdr_lightning.memory.recorder import workspace
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.memory.recorder.workspace import WorkspaceProbe
from ctdr_lightning.memory.values.op_traits import traits
from tests import forks


def net(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3)
    )


def measured_peak(run):
    with memory_profiler() as profiler:
        run()
    events = [e for e in profiler_events(profiler) if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("width", [8, 48])
@pytest.mark.parametrize("batch", [2, 12])
def test_peaks_with_workspaces_are_the_allocators(width, batch):
    module, x = net(width), torch.randn(batch, 3, 24, 24)

    def step():
        return module(x).square().mean()

    step().backward()
    module.zero_grad(set_to_none=True)
    trace = record(step)
    module.zero_grad(set_to_none=True)
    plain = simulate(trace).peak_bytes - trace.resident_bytes
    assert any(op.temp_bytes for op in trace.ops)
    assert plain == pytest.approx(measured_peak(lambda: step().backward()), rel=0.01)
    fake = record_fake(module, x, lambda m, y: m(y).square().mean())
    assert simulate(fake).peak_bytes - fake.resident_bytes == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.BatchNorm2d(16), "aten.native_batch_norm.default"),
        (nn.GroupNorm(4, 16), "aten.native_group_norm.default"),
        (nn.GroupNorm(4, 16), "aten.native_group_norm_backward.default"),
        (nn.LayerNorm(16), "aten.native_layer_norm.default"),
        (
            nn.Sequential(nn.Conv2d(16, 16, 1), nn.UpsamplingBilinear2d(scale_factor=2)),
            "aten.upsample_bilinear2d_backward.default",
        ),
    ],
    ids=str,
)
def test_as_many_samples_as_channels_are_told_apart_where_fewer_samples_are_run(norm, name, monkeypatch):
    """A kernel that took statistics of 4 for 16 channels would write past their end."""
    called = []
    monkeypatch.setattr(workspace, "_AFFORDABLE_BYTES", 2**12)
    monkeypatch.setattr(workspace, "_workspace", lambda call: called.append(call) or 0)
    monkeypatch.setattr(workspace, "_MEASURED", {})
    record_fake(nn.Sequential(norm), torch.randn(16, 16, 16, 16), lambda m, y: m(y).square().mean())
    seen = [args for func, args, _ in called if traits(func).name == name]
    assert seen
    for args in seen:
        image, *others = [leaf for leaf in args if isinstance(leaf, workspace._Dummy)]
        assert image.shape[0] in (4, 2, 16)
        assert all(other.shape[0] == 16 for other in others if len(other.shape) == 1)
        assert all(other.shape[0] == image.shape[0] for other in others if len(other.shape) > 1)
        numbers = [leaf for leaf in tree_leaves(args) if type(leaf) is int and leaf in (2, 4, 16)]
        assert image.shape[0] == 16 or image.shape[0] in numbers or "group" not in name


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(16, 32, 2, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Wide(nn.Module):
    """A reduction whose buffer is larger than all that it reads."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 400)

    def forward(self, x):
        return self.mix(x).logsumexp(-1)


NETS = {
    "LSTM": (lambda: Recurrent(nn.LSTM), (8, 40, 16)),
    "GRU": (lambda: Recurrent(nn.GRU), (8, 20, 16)),
    "3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 2, 3)), (2, 2, 8, 12, 12)),
    "logsumexp": (Wide, (256, 16)),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).bfloat16(), (128, 64)),
}


@pytest.mark.parametrize("name", NETS)
def test_every_op_s_workspace_is_in_the_trace(name):
    make, shape = NETS[name]
    module = make()
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)

    def step():
        return module(x).square().mean()

    step().backward()
    module.zero_grad(set_to_none=True)
    trace = record(step)
    module.zero_grad(set_to_none=True)
    bare = replace(trace, ops=tuple(replace(op, temp_bytes=0) for op in trace.ops))
    true = measured_peak(lambda: step().backward())
    assert simulate(trace).peak_bytes - trace.resident_bytes == pytest.approx(true, rel=0.002)
    assert name != "LSTM" or simulate(bare).peak_bytes < 0.95 * simulate(trace).peak_bytes


def test_calls_are_measured_once_for_all_recordings_and_batch_sizes(monkeypatch):
    """Candidates of a choice share most of their calls; of large batches all run the same few samples."""
    called, truly = [], workspace._workspace
    monkeypatch.setattr(workspace, "_AFFORDABLE_BYTES", 2**16)
    monkeypatch.setattr(workspace, "_workspace", lambda call: called.append(call) or truly(call))
    monkeypatch.setattr(workspace, "_MEASURED", {})
    conv = nn.Conv2d(3, 8, 3, padding=1)
    temps = []
    for batch in (64, 64, 128):
        found = record_fake(conv, torch.randn(batch, 3, 16, 16), lambda m, x: m(x).square().mean())
        temps.append(sum(op.temp_bytes for op in found.ops))
        assert len(called) == len({str(call) for call in called})
    n_new, first = len(called), [traits(func).name for func, *_ in called]
    assert temps[0] == temps[1] < temps[2]
    record_fake(nn.Conv2d(3, 8, 5, padding=2), torch.randn(64, 3, 16, 16), lambda m, x: m(x).square().mean())
    assert {traits(func).name for func, *_ in called[n_new:]} <= set(first)
    assert len(called) > n_new


def test_garbage_that_is_collected_meanwhile_is_no_release_of_a_call(monkeypatch):
    """Cycles of the program's own, with large tensors, may be due whenever a call allocates an object."""

    class Cycle:
        def __init__(self):
            self.me, self.tensor = self, torch.zeros(2**20)

    def start():
        begin()
        Cycle()  # releases count of what was allocated under some watch
        workspace.stop_watching()
        begin()
        gc.set_threshold(1)

    def temps():
        monkeypatch.setattr(workspace, "_MEASURED", {})
        found = record_fake(nn.Conv2d(3, 8, 3, 2, 1), torch.randn(4, 3, 40, 40), lambda m, x: m(x).square().mean())
        return [op.temp_bytes for op in found.ops]

    expected, begin, thresholds = temps(), workspace.start_watching, gc.get_threshold()
    monkeypatch.setattr(workspace, "start_watching", start)
    try:
        assert temps() == expected
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


def test_a_call_that_did_not_run_is_measured_again(monkeypatch):
    """There may have been no memory for it."""
    answers = iter([None, 4096])
    monkeypatch.setattr(workspace, "_MEASURED", {})
    monkeypatch.setattr(workspace, "_workspace", lambda call: next(answers))
    for expected in (None, 4096, 4096):
        assert workspace._workspaces([(torch.ops.aten.sort.default, (), {})]) == [expected]


def test_watching_leaves_the_generator_and_the_gradients_alone():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1)), torch.randn(4, 8)
    left = []
    for run in (lambda: module(x).sum().backward(), lambda: record(lambda: module(x).sum())):
        torch.manual_seed(3)
        module.zero_grad(set_to_none=True)
        run()
        left.append([torch.get_rng_state(), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *left))


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: net(8), (2, 3, 12, 12)), (lambda: Recurrent(nn.LSTM), (4, 10, 16))]
)
def test_a_profiler_in_this_thread_leaves_dummies_to_be_measured(make, shape):
    module, x = make(), torch.randn(shape)
    with profile(activities=[ProfilerActivity.CPU]):
        found = record(lambda: module(x).sum())
    module.zero_grad()
    want = record(lambda: module(x).sum())
    assert "workspaces" not in found.meta
    for ours, watched in zip(found.ops, want.ops, strict=True):
        assert ours.name == watched.name
        assert ours.temp_bytes == pytest.approx(watched.temp_bytes, abs=8192)


def test_dummies_draw_nothing_from_the_step_s_generator():
    probe = WorkspaceProbe()
    probe.note(0, torch.ops.aten.native_dropout.default, (torch.randn(64, 64), 0.5, True))
    before = torch.get_rng_state()
    assert list(probe.measure()) == [0]
    assert torch.equal(before, torch.get_rng_state())


def test_an_operand_that_blas_cannot_read_is_copied():
    probe = WorkspaceProbe()
    wide = torch.ones(1).expand(16, 32)
    probe.note(0, torch.ops.aten.mm.default, (wide, torch.randn(32, 4)))
    probe.note(1, torch.ops.aten.mm.default, (torch.randn(16, 32), torch.randn(4, 32).t()))
    assert probe.measure() == {0: wide.nbytes}


def test_a_profiler_that_cannot_run_does_not_stop_the_step(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Resource temporarily unavailable")

    for name in ("start_watching", "_workspaces"):
        monkeypatch.setattr(f"ctdr_lightning.memory.recorder.workspace.{name}", refuse)
    module = net(4)
    trace = record(lambda: module(torch.randn(2, 3, 8, 8)).sum())
    assert trace.meta["workspaces"] == "not measured: Resource temporarily unavailable"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "words"), [(2048, 8000), (16384, 8000), (8192, 32000)])
def test_a_chunked_loss_has_chunks_of_logits(rows, words):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(words, 64))

    net, batch = Head(), (torch.randn(rows, 64), torch.randint(words, (rows,)))

    def step(net, batch):
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(net.hidden(batch[0]), net.weight, batch[1], options=options)

    true = peak_of(record(lambda: step(net, batch)))
    assert peak_of(record_fake(net, batch, step)) == true
    assert true <= peak_of(record_fake(net, batch, step, device="a100")) <= 1.001 * true


def peak_of(trace):
    return simulate(trace).peak_bytes


def test_another_devices_step_runs_no_kernel_of_this_one_and_says_what_is_not_known(monkeypatch):
    def refuse(*_):
        raise AssertionError("a kernel is measured")

    monkeypatch.setattr("ctdr_lightning.memory.recorder.workspace.start_watching", refuse)
    trace = record_fake(net(8), torch.empty(64, 3, 24, 24), lambda m, x: m(x).square().mean(), device="a100")
    assert not any(op.temp_bytes for op in trace.ops)
    assert trace.meta["workspaces"].startswith("modelled: ")


def test_a_device_that_is_no_gpu_of_the_table_has_workspaces_that_are_not_known():
    toy = DeviceModel("toy", flops32_per_s=1e12, flops16_per_s=1e12, bytes_per_s=1e12)
    trace = record_fake(net(8), torch.empty(64, 3, 24, 24), lambda m, x: m(x).square().mean(), device=toy)
    assert trace.meta["workspaces"] == "counted as 0: those of toy's kernels are not known"


def test_another_device_copies_the_operands_that_its_blas_cannot_read():
    probe = WorkspaceProbe(fake=True, other="a100")
    wide = torch.ones(1).expand(16, 32)
    probe.note(0, torch.ops.aten.mm.default, (wide, torch.randn(32, 4)))
    assert probe.measure() == {0: wide.nbytes}


@pytest.mark.parametrize(("op", "watched"), [(torch.ops._c10d_functional.wait_tensor, 0), (torch.ops.aten.sort, 1)])
def test_calls_in_which_other_threads_work_are_not_watched(op, watched, monkeypatch):
    clock, starts = workspace.WatchingClock(), []
    monkeypatch.setattr(workspace, "start_watching", lambda: starts.append(1) or start_watching())
    clock.run(op.default, (torch.ones(8),), {})
    assert len(starts) == watched


PHASES = schedule(wait=1, warmup=1, active=2, repeat=1)


@pytest.mark.parametrize("batch", range(5))
def test_a_profiler_of_the_user_s_goes_on_in_every_phase(batch):
    """A process of its own: torch's profiler, ended or started again while it warms up, kills the process."""
    assert forks.run(profiled, batch) == [0]


def profiled(recorded_batch):
    module, x, seen = net(8), torch.randn(2, 3, 12, 12), []
    want = record(lambda: module(x).sum())

    def ready(profiler):
        seen.append({event.name for event in profiler.events()})

    with profile(activities=[ProfilerActivity.CPU], schedule=PHASES, on_trace_ready=ready) as profiler:
        for batch in range(5):
            if batch == recorded_batch:
                found = record(lambda: module(x).sum())
            module(x).sum().backward()
            profiler.step()
    assert "workspaces" not in found.meta
    assert [op.temp_bytes for op in found.ops] == [op.temp_bytes for op in want.ops]
    assert any(op.temp_bytes for op in found.ops)
    assert len(seen) == 1
    assert "aten::convolution" in seen[0]
