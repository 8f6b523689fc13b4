"""Workspaces of CPU ops: simulated peaks are the allocator's, for real and for fake traces."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory import record, record_fake, simulate
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.memory.recorder.workspace import WorkspaceProbe


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
    def refuse():
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr("ctdr_lightning.memory.recorder.workspace.memory_profiler", refuse)
    module = net(4)
    trace = record(lambda: module(torch.randn(2, 3, 8, 8)).sum())
    assert trace.meta["workspaces"] == "not measured: Resource temporarily unavailable"


def test_another_devices_step_runs_no_kernel_of_this_one_and_says_what_is_not_known(monkeypatch):
    def refuse():
        raise AssertionError("a kernel is measured")

    monkeypatch.setattr("ctdr_lightning.memory.recorder.workspace.memory_profiler", refuse)
    trace = record_fake(net(8), torch.empty(64, 3, 24, 24), lambda m, x: m(x).square().mean(), device="a100")
    assert not any(op.temp_bytes for op in trace.ops)
    assert trace.meta["workspaces"] == "counted as 0: those of a100's kernels are not known"


def test_another_device_copies_the_operands_that_its_blas_cannot_read():
    probe = WorkspaceProbe(fake=True, other="a100")
    wide = torch.ones(1).expand(16, 32)
    probe.note(0, torch.ops.aten.mm.default, (wide, torch.randn(32, 4)))
    assert probe.measure() == {0: wide.nbytes}
