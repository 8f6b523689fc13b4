"""TFLMS: which tensors leave, and which op triggers their return."""

from collections.abc import Mapping

import pytest

from ctdr_lightning.memory import Prepared, plan
from ctdr_lightning.memory.policies import tflms
from ctdr_lightning.memory.search.layered import layer_inputs
from ctdr_lightning.memory.simulator.actions import Action
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.machine import Link
from tests.memory.graphs import Node, graph_trace
from tests.memory.policies.test_away_policies import benched, limit


def chain() -> Prepared:
    """Sixteen stages of one second that save ten bytes each; the link moves one byte a second."""
    nodes = [Node((i - 1,) if i else (), 10) for i in range(16)]
    return Prepared(graph_trace(nodes).with_machine([Link("host", 1.0, 1.0)]))


def candidates(monkeypatch: pytest.MonkeyPatch, step: Prepared, lower: int, upper: int) -> list[Mapping[int, Action]]:
    """The plans under one pair of bounds."""
    monkeypatch.setattr(tflms, "LOWER_BOUNDS", (lower,))
    monkeypatch.setattr(tflms, "UPPER_BOUNDS", (upper,))
    return [actions for actions in tflms._plans(step) if actions]  # private: the choice between them hides the bounds


@pytest.mark.parametrize(("lower", "upper"), [(1, 2), (1, 10_000), (5, 6), (5, 20), (20, 20)])
@pytest.mark.parametrize("make", [chain, lambda: Prepared(benched("residual")[2])], ids=["chain", "residual"])
def test_a_swap_in_is_triggered_between_its_bounds_or_not_held_back(make, lower, upper, monkeypatch):
    step = make()
    heard, needed = sorted(bells_of(step.trace)), Simulator(step).needed
    found = candidates(monkeypatch, step, lower, upper)
    assert found
    for actions in found:
        for value, action in actions.items():
            reader = needed(value)[0]
            window = [tick for tick in heard if lower <= reader - tick <= upper]
            early = [tick for tick in heard if reader - tick >= lower]
            assert action.back_at == (max(window) if window else heard[0] if early else reader)


def test_the_first_of_the_forward_on_long_edges_leave(monkeypatch):
    step = chain()
    far = [e.value for e in layer_inputs(step, lambda op: True) if e.needed - e.read > 20]
    found = candidates(monkeypatch, step, 20, 100)
    assert [list(actions) for actions in found] == [far[: int(share * len(far))] for share in tflms.SHARES]


@pytest.mark.parametrize(("make", "share"), [("chain", 0.7), ("residual", 0.85)])
def test_an_upper_bound_that_binds_gives_a_faster_plan(make, share, monkeypatch):
    """On a link that takes two steps' time for the saved values: swap-ins that begin earlier are waited for less."""
    trace = chain().trace if make == "chain" else benched("residual")[2]
    rate = sum(trace.value_bytes(v) for v in trace.saved) / (2 * trace.seconds)
    step = Prepared(trace.with_machine([Link(to, rate, rate) for to in ("host", "disk")]))
    budget = limit(step.trace, share)
    with_bound = plan(step, budget, "tflms")
    monkeypatch.setattr(tflms, "UPPER_BOUNDS", (10_000,))
    assert with_bound.seconds < 0.99 * plan(step, budget, "tflms").seconds
