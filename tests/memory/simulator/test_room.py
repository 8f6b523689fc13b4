"""The step waits for transfers where it has no room: on a chain whose arithmetic is known, and on nets."""

from dataclasses import replace

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Prepared, Tape, plan, simulate
from ctdr_lightning.memory.holders import HolderOptions
from ctdr_lightning.memory.holders.base import Holders
from ctdr_lightning.memory.search.others import moved_to, others_of
from ctdr_lightning.memory.simulator.actions import Offload
from ctdr_lightning.memory.simulator.room import with_room
from ctdr_lightning.memory.simulator.schedule import judge, scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.machine import Link
from tests.memory.graphs import Node, graph_trace
from tests.memory.policies.test_away_policies import benched, limit

WAITING = ("vdnn_plus", "tflms", "flashneuron", "swapadvisor", "autotm", "ocdnn")


def chain(n_stages=16, bytes_per_s=1.0):
    """Stages of one second that save ten bytes each, on a link that takes far longer than a stage."""
    nodes = [Node((i - 1,) if i else (), 10) for i in range(n_stages)]
    return graph_trace(nodes).with_machine([Link("host", bytes_per_s, bytes_per_s)])


def everything(step):
    return moved_to(others_of(step, ()), "host")


def test_a_chain_at_half_its_peak_waits_for_its_link():
    step = Prepared(chain())
    half = step.plain_peak_bytes // 2
    free = judge(step, everything(step))
    assert free.peak_bytes > half
    made = judge(step, with_room(step, everything(step), half))
    assert made.peak_bytes <= half
    assert any(move.wait_s for move in made.transfers.moves if move.out)
    assert made.seconds < (1 + 1e-9) * plan(step, None, "vdnn_all").seconds


def test_a_plan_with_room_is_left_alone():
    step = Prepared(chain(bytes_per_s=100.0))
    assert with_room(step, everything(step), step.plain_peak_bytes) == scheduled(step, everything(step))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_waits_come_before_the_op_that_needs_the_room(share):
    trace = benched("residual")[2]
    step = Prepared(trace)
    budget = limit(trace, share)
    before, after = scheduled(step, everything(step)), with_room(step, everything(step), budget)
    forward = {trace.ops[index].tick for index in trace.forward_ops}
    heard, simulator = bells_of(trace), Simulator(step, after)
    assert simulator.peak_bytes <= budget
    for value, action in after.items():
        assert action.out_at <= action.gone_by <= before[value].gone_by
        assert action.gone_by in forward
        assert action.back_at >= before[value].back_at
        assert action.back_at in heard or action.back_at == simulator.needed(value)[0]


@pytest.mark.parametrize("policy", WAITING)
@pytest.mark.parametrize("rate", [0.5, 1.0, 20.0])
def test_every_system_that_waits_reaches_the_least_peak_of_vdnn(policy, rate):
    step = Prepared(chain(bytes_per_s=rate))
    least = plan(step, None, "vdnn_all").peak_bytes
    made = plan(step, int(1.05 * least), policy)
    assert made.peak_bytes <= 1.05 * least
    assert made.seconds <= (1 + 1e-9) * plan(step, None, "vdnn_all").seconds


@pytest.mark.parametrize("share", [0.5, 0.35])
@pytest.mark.parametrize("policy", WAITING)
def test_plans_that_wait_are_exact_on_the_tape(policy, share, tmp_path):
    bench, plain, trace = benched("residual")
    made = plan(trace, Budget(peak_bytes=limit(trace, share)), policy)
    assert any(isinstance(action, Offload) for action in made.away.values())
    holders = Holders(HolderOptions(folder=tmp_path))
    tape = Tape(made, holders=holders)
    assert not bench.run(tape).differs_from(plain)
    assert not tape.diverged
    holders.close()


@pytest.mark.slow
def test_auto_waits_where_recomputation_is_dearer():
    trace = benched("residual")[2]
    trace = trace.with_costs([3e-4 if "convolution" in op.name else 3e-5 for op in trace.ops], {})
    trace = replace(trace, links=tuple(replace(x, out_bytes_per_s=2e8, in_bytes_per_s=2e8) for x in trace.links))
    budget = Budget(peak_bytes=limit(trace, 0.3), time_limit_s=1.0)
    alone = POLICIES["auto"](Prepared(replace(trace, links=())), budget)
    made = plan(trace, budget, "auto")
    assert simulate(trace, made).transfers.waits_s > 0
    assert made.seconds < 0.7 * alone.seconds


@pytest.mark.slow
def test_below_what_moving_reaches_there_is_an_error():
    step = Prepared(chain())
    with pytest.raises(InfeasibleBudgetError, match="least peak"):
        plan(step, 15, "vdnn_plus")
