"""A plan's requests are the simulator's bytes, and the allocator's figures lie where they must."""

from dataclasses import replace

import numpy as np
import pytest

from ctdr_lightning.memory import plan, simulate
from ctdr_lightning.memory.allocator.blocks import lifetimes
from ctdr_lightning.memory.allocator.caching_allocator import SMALLEST
from ctdr_lightning.memory.allocator.reserved import reserved_by, runs_within
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from tests.memory.policies.nets import bench_of

NETS = ("residual", "T", "no chain")
EXACT = [CodecCost(n, True, CODECS[n].needs, CODECS[n].payload_bits) for n in CODECS if CODECS[n].exact]


def at_share(trace, share):
    peak = simulate(trace).peak_bytes
    return trace.resident_bytes + int(share * (peak - trace.resident_bytes))


def most_live(requests):
    steps = np.zeros(max(r.last for r in requests) + 2)
    for r in requests:
        steps[r.first] += r.n_bytes
        steps[r.last + 1] -= r.n_bytes
    return int(np.cumsum(steps).max())


@pytest.mark.parametrize("policy", ["keep", "sqrt", "auto", "dtr"])
@pytest.mark.parametrize("net", NETS)
def test_the_requests_of_a_plan_are_its_simulated_peak(net, policy):
    trace = bench_of(net).record()
    made = plan(trace, None if policy in ("keep", "sqrt") else at_share(trace, 0.7), policy)
    live = most_live(lifetimes(trace, made.actions))
    assert made.peak_bytes <= live + SMALLEST
    assert live <= 1.05 * made.peak_bytes  # what a replay leaves behind is held from its beginning on


def test_what_is_put_away_is_asked_for_as_the_simulator_counts_it():
    trace = bench_of("residual").record().with_machine([Link("host", 1e9, 1e9, device_bytes=4096)], EXACT)
    made = plan(trace, None, "vdnn_all")
    assert made.away
    live = most_live(lifetimes(trace, made.actions))
    assert live == pytest.approx(made.peak_bytes, rel=0.02)


@pytest.mark.parametrize("net", NETS)
def test_reserved_is_no_less_than_allocated_and_packing_no_less_than_what_is_live(net):
    trace = bench_of(net).record()
    found = reserved_by(trace)
    live = most_live(lifetimes(trace))
    assert live <= found.packed_bytes <= found.allocated_bytes * 1.1
    assert live <= found.allocated_bytes <= found.reserved_bytes
    assert found.fragmentation >= 0
    assert "static addresses" in str(found)


def test_a_limit_is_kept_or_missed():
    trace = bench_of("residual").record().with_static(64 << 20)
    found = reserved_by(trace)
    assert runs_within(trace, None, found.reserved_bytes)
    assert not runs_within(trace, None, found.allocated_bytes - (1 << 20))


@pytest.mark.parametrize("expandable", [False, True])
def test_a_budget_of_a_gpu_is_kept_by_its_allocator(expandable, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    trace = replace(bench_of("residual").record(), device="cuda")
    sizes = [replace(s, n_bytes=(s.n_bytes * 1500)) for s in trace.storages]  # segments of 20 MiB must not set the peak
    trace = replace(trace, storages=tuple(sizes), resident_bytes=trace.resident_bytes * 1500)
    budget = at_share(trace, 0.6)
    on_gpu, by_tensors = plan(trace, budget, "capuchin"), plan(replace(trace, device="cpu"), budget, "capuchin")
    assert runs_within(trace, on_gpu.actions, budget, expandable=expandable)
    assert by_tensors.peak_bytes > 0.9 * budget
    assert on_gpu.budget_bytes == budget
    assert on_gpu.seconds >= by_tensors.seconds


def test_a_plan_that_no_allocator_can_serve_stays_as_it_is():
    trace = replace(bench_of("residual").record(), device="cuda")
    budget = at_share(trace, 0.6)  # less than one segment
    on_gpu = plan(trace, budget, "capuchin")
    assert not runs_within(trace, on_gpu.actions, budget)
    assert on_gpu.actions == plan(replace(trace, device="cpu"), budget, "capuchin").actions
