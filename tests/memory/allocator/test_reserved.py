"""A plan's requests are the simulator's bytes, and the allocator's figures lie where they must."""

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from ctdr_lightning.memory import plan, simulate
from ctdr_lightning.memory.allocator.blocks import lifetimes, requests_of
from ctdr_lightning.memory.allocator.reserved import (
    expandable_segments,
    flushes_within,
    reserved_by,
    runs_within,
    served_in_words,
)
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from tests.memory.harness import Bench, random_actions
from tests.memory.holders.test_tape_away import away_actions
from tests.memory.policies.nets import CONFORMANCE, bench_of
from tests.memory.zoo import build

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


def live_at_ticks(trace, actions):
    """The most that is live within each tick, request by request; shape ``(n_ticks,)``."""
    requests = requests_of(trace, actions)
    events = [(first, 0, n_bytes) for n_bytes, first, _ in requests]
    events += [(last, 1, -n_bytes) for n_bytes, _, last in requests]
    most, live = [0] * (trace.n_ticks + 1), 0
    by_tick = defaultdict(list)
    for moment, _, n_bytes in sorted(events):
        by_tick[moment[0]].append(n_bytes)
    for tick in range(-1, trace.n_ticks):
        levels = list(accumulate(by_tick[tick], initial=live))
        live, most[tick] = levels[-1], max(levels)
    return np.array(most[: trace.n_ticks])


@pytest.mark.parametrize("policy", ["keep", "sqrt", "auto", "dtr"])
@pytest.mark.parametrize("net", NETS)
def test_the_requests_of_a_plan_are_its_simulated_bytes(net, policy):
    trace = bench_of(net).record()
    made = plan(trace, None if policy in ("keep", "sqrt") else at_share(trace, 0.7), policy)
    assert (live_at_ticks(trace, made.actions) == made.timeline.bytes_at).all()
    assert most_live(lifetimes(trace, made.actions)) == made.peak_bytes


@pytest.mark.parametrize("net", [*CONFORMANCE, "resnet18", "gpt2"])
def test_the_requests_of_any_plan_are_its_simulated_bytes_at_every_tick(net):
    """ResNet-18 has results of in-place operations, which a replay makes anew beside what it reads."""
    bench = bench_of(net) if net in CONFORMANCE else Bench(*build(net))
    trace = bench.record().with_machine([Link(to, 1e9, 1e9, device_bytes=4096) for to in ("host", "disk")], EXACT)
    for seed in range(6):
        for actions in (random_actions(trace, seed), away_actions(trace, seed)):
            assert (live_at_ticks(trace, actions) == simulate(trace, actions).bytes_at).all()


@pytest.mark.parametrize("net", NETS)
def test_reserved_is_no_less_than_allocated_and_packing_no_less_than_what_is_live(net):
    trace = bench_of(net).record()
    found = reserved_by(trace)
    live = most_live(lifetimes(trace))
    assert live <= found.packed_bytes <= found.allocated_bytes * 1.1
    assert live <= found.allocated_bytes <= found.reserved_bytes
    assert found.fragmentation >= 0
    assert "static addresses" in str(found)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("expandable_segments:True, backend:native", ""),
        ("max_split_size_mb:128,expandable_segments:True", "setting max_split_size_mb is not modelled"),
        ("roundup_power2_divisions:[256:1,>:4],backend:cudaMallocAsync", "roundup_power2_divisions and backend is not"),
    ],
)
def test_settings_that_the_model_leaves_out_are_named(settings, said, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    text = str(reserved_by(bench_of("residual").record()))
    assert said in text
    assert ("not modelled" in text) == bool(said)
    assert expandable_segments() == ("expandable" in settings)


def test_a_limit_is_kept_or_missed():
    trace = bench_of("residual").record().with_static(64 << 20)
    found = reserved_by(trace)
    assert runs_within(trace, None, found.reserved_bytes)
    assert not runs_within(trace, None, found.allocated_bytes - (1 << 20))


def large(trace, factor=1500):
    """The same step with larger tensors: segments of 20 MiB must not set the peak."""
    sizes = [replace(s, n_bytes=s.n_bytes * factor) for s in trace.storages]
    return replace(trace, device="cuda", storages=tuple(sizes), resident_bytes=trace.resident_bytes * factor)


def test_a_plan_for_which_segments_go_back_in_every_step_does_not_fit(monkeypatch):
    """Each time the device is waited for: 20 to 200 ms of a step."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    trace = large(bench_of("residual").record())
    found = reserved_by(trace)
    limits = range(found.allocated_bytes, found.reserved_bytes, 2 << 20)
    flushes = {limit: flushes_within(trace, None, limit) for limit in limits}
    running = [limit for limit, n in flushes.items() if n is not None]
    flushing = [limit for limit in running if flushes[limit]]
    assert flushing
    assert not any(runs_within(trace, None, limit) for limit in flushing)
    said = served_in_words(trace, None, flushing[0])
    assert f"the allocator gives segments back {flushes[flushing[0]]} times a step" in said
    assert said.endswith("Let PYTORCH_CUDA_ALLOC_CONF allow expandable segments.")
    assert not served_in_words(trace, None, found.reserved_bytes)
    made = plan(trace, flushing[0], "capuchin")
    assert flushes_within(trace, made.actions, flushing[0]) == 0
    assert made.peak_bytes < simulate(trace).peak_bytes


@pytest.mark.parametrize("expandable", [False, True])
def test_a_budget_of_a_gpu_is_kept_by_its_allocator(expandable, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    trace = large(bench_of("residual").record())
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
    assert served_in_words(trace, on_gpu.actions, budget).startswith("A card of ")
    assert on_gpu.actions == plan(replace(trace, device="cpu"), budget, "capuchin").actions
