"""Workspaces of CPU ops: simulated peaks are the allocator's, for real and for fake traces."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory import record, record_fake, simulate
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.memory.recorder.workspace import WorkspaceProbe
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


def test_an_operand_that_blas_cannot_read_is_copied():
    probe = WorkspaceProbe()
    wide = torch.ones(1).expand(16, 32)
    probe.note(0, torch.ops.aten.mm.default, (wide, torch.randn(32, 4)))
    probe.note(1, torch.ops.aten.mm.default, (torch.randn(16, 32), torch.randn(4, 32).t()))
    assert probe.measure() == {0: wide.nbytes}


def test_a_profiler_that_cannot_run_does_not_stop_the_step(monkeypatch):
    def refuse(run):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr("ctdr_lightning.memory.recorder.workspace.allocations_of", refuse)
    module = net(4)
    trace = record(lambda: module(torch.randn(2, 3, 8, 8)).sum())
    assert trace.meta["workspaces"] == "not measured: Resource temporarily unavailable"


def test_another_devices_step_runs_no_kernel_of_this_one_and_says_what_is_not_known(monkeypatch):
    def refuse(run):
        raise AssertionError("a kernel is measured")

    monkeypatch.setattr("ctdr_lightning.memory.recorder.workspace.allocations_of", refuse)
    trace = record_fake(net(8), torch.empty(64, 3, 24, 24), lambda m, x: m(x).square().mean(), device="a100")
    assert not any(op.temp_bytes for op in trace.ops)
    assert trace.meta["workspaces"] == "counted as 0: those of a100's kernels are not known"


def test_another_device_copies_the_operands_that_its_blas_cannot_read():
    probe = WorkspaceProbe(fake=True, other="a100")
    wide = torch.ones(1).expand(16, 32)
    probe.note(0, torch.ops.aten.mm.default, (wide, torch.randn(32, 4)))
    assert probe.measure() == {0: wide.nbytes}


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
