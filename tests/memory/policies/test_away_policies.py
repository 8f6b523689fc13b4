"""What every policy that moves or compresses promises, on a machine that has links and codecs."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, RECOMPUTE, Budget, Plan, Prepared, Simulator, Tape, plan, simulate
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.holders import HolderOptions
from ctdr_lightning.memory.holders.base import Holders
from ctdr_lightning.memory.search.belady import evicted
from ctdr_lightning.memory.search.layered import LayerInput
from ctdr_lightning.memory.search.others import free_codecs
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.simulator.schedule import judge, scheduled, settled
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.traces.op_kinds import base_name, is_weighted
from tests.memory.harness import Bench
from tests.memory.policies.nets import CONFORMANCE, bench_of
from tests.memory.zoo import build

MOVING = (
    "vdnn", "vdnn_all", "vdnn_conv", "vdnn_plus", "flashneuron", "tflms", "cdma", "cswap", "ocdnn", "sentinel",
    "swapadvisor", "ssdtrain", "autotm",
)  # fmt: skip
BOTH = ("capuchin", "superneurons", "pofo")  # they recompute as well
NETS = ("residual", "GPT-2")
COSTS = [
    CodecCost(name, c.exact, c.needs, c.payload_bits, c.side_bits, c.drops_zeros, 1e-10, 1e-10)
    for name, c in ((name, CODECS[name]) for name in CODECS)
]
EXACT = [cost for cost in COSTS if cost.exact]


@cache
def benched(name):
    """The net, its plain outcome, and its trace on a machine whose link moves a step's saved bytes in a step's time."""
    bench = bench_of(name) if name in CONFORMANCE else Bench(*build(name))
    trace = bench.record()
    seconds = [1e-6 + trace.value_bytes(op.outputs[0]) * 1e-9 if op.outputs else 1e-6 for op in trace.ops]
    trace = trace.with_costs(seconds, {})
    rate = sum(trace.value_bytes(v) for v in trace.saved) / trace.seconds
    return bench, bench.run(), trace.with_machine([Link(to, rate, rate) for to in ("host", "disk")], EXACT)


@cache
def step_of(name):
    """The same trace, with what all policies make of it."""
    return Prepared(benched(name)[2])


def limit(trace, share):
    peak = simulate(trace).peak_bytes
    return None if share is None else trace.resident_bytes + int(share * (peak - trace.resident_bytes))


def planned(step, budget, policy):
    """The plan, or the error that says that there is none."""
    try:
        return plan(step, budget, policy)
    except InfeasibleBudgetError as error:
        return error


@pytest.mark.parametrize("share", [None, 0.7])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("policy", [*MOVING, *BOTH, "gist"])
def test_plans_fit_round_trip_and_are_exact(policy, net, share, tmp_path):
    bench, plain, trace = benched(net)
    budget = limit(trace, share)
    made = planned(step_of(net), Budget(peak_bytes=budget), policy)
    if not isinstance(made, Plan):
        assert made.least_peak_bytes > budget
        assert made.hint
        return
    assert budget is None or made.peak_bytes <= budget
    assert made.bound_seconds <= made.seconds * (1 + 1e-9)
    assert made.exact
    assert Plan.from_json(made.to_json()) == made
    holders = Holders(HolderOptions(folder=tmp_path))
    tape = Tape(made, holders=holders)
    assert not bench.run(tape).differs_from(plain)
    assert not tape.diverged
    holders.close()


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("policy", [*MOVING, *BOTH])
def test_what_moves_is_asked_back_where_the_tape_hears(policy, net):
    trace = benched(net)[2]
    made, heard = plan(step_of(net), None, policy), bells_of(trace)
    needed = Simulator(trace, made.actions).needed
    for value, action in made.away.items():
        if isinstance(action, Offload):
            assert action.back_at in heard or action.back_at == needed(value)[0]


@pytest.mark.parametrize("policy", MOVING)
def test_what_moves_makes_the_peak_smaller(policy):
    trace = benched("residual")[2]
    made = plan(trace, None, policy)
    if policy != "vdnn_conv":
        assert made.peak_bytes < simulate(trace).peak_bytes
    assert any(isinstance(action, Offload) for action in made.away.values())


@pytest.mark.slow
def test_auto_is_no_slower_than_any_of_them_and_faster_than_without_a_link():
    trace = benched("residual")[2]
    budget = Budget(peak_bytes=limit(trace, 0.5))
    best = plan(trace, budget, "auto")
    assert best.away
    for policy in (*MOVING, *BOTH, "gist"):
        other = planned(trace, budget, policy)
        assert not isinstance(other, Plan) or best.seconds <= other.seconds * (1 + 1e-9), policy
    without = trace.__class__(**{**_fields(trace), "links": (), "codecs": ()})
    assert best.seconds < plan(without, budget, "auto").seconds


def _fields(trace):
    return {name: getattr(trace, name) for name in trace.__dataclass_fields__}


def test_vdnn_moves_what_the_paper_moves():
    trace = benched("residual")[2]
    convolutions = {v for op in trace.ops if base_name(op) == "convolution" for v in op.inputs}
    alone = plan(trace, None, "vdnn_conv").away
    assert alone
    assert alone.keys() <= convolutions
    assert alone.keys() < plan(trace, None, "vdnn_all").away.keys()
    for action in alone.values():
        assert action.gone_by == action.out_at, "the layer waits for its transfer"


def test_vdnn_dyn_keeps_everything_that_fits():
    trace = benched("residual")[2]
    assert not plan(trace, 2 * simulate(trace).peak_bytes, "vdnn").away


def test_flashneuron_moves_the_first_of_the_forward_and_no_more_than_it_must():
    trace = benched("residual")[2]
    wide, tight = (plan(trace, limit(trace, share), "flashneuron").away for share in (0.9, 0.75))
    assert wide.keys() < tight.keys()
    assert max(wide) < min(tight.keys() - wide.keys())
    assert {action.to for action in tight.values()} == {"disk"}


@pytest.mark.parametrize(("times", "narrows"), [(0.5, False), (4.0, True)])
def test_flashneuron_writes_in_half_precision_only_what_the_step_cannot_hide(times, narrows):
    """``times`` steps move all saved values one way; the largest are narrowed first, and no more than needed."""
    trace = benched("residual")[2]
    rate = sum(trace.value_bytes(v) for v in trace.saved) / (trace.seconds * times)
    trace = trace.with_machine([Link("disk", rate, rate)], COSTS)
    away = plan(trace, None, "flashneuron").away
    narrow = {v for v, action in away.items() if action.codecs == ("bf16",)}
    assert bool(narrow) == narrows
    if narrows:
        wide = {v for v, action in away.items() if not action.codecs and "float" in facts_of(trace)[v].kinds}
        assert min(map(trace.value_bytes, narrow)) >= max(map(trace.value_bytes, wide), default=0)


def test_autotm_hides_what_its_link_can_hide_and_waits_for_the_rest():
    """On a link that hides nothing every move is waited for at once; on a fast one no move is."""
    step = step_of("residual")
    for times, waits in ((0.1, False), (50.0, True)):
        rate = sum(step.trace.value_bytes(v) for v in step.trace.saved) / (step.trace.seconds * times)
        trace = step.trace.with_machine([Link(to, rate, rate) for to in ("host", "disk")])
        made = plan(trace, limit(trace, 0.6), "autotm")
        assert made.away
        assert all(action.gone_by == action.out_at for action in made.away.values()) == waits


def test_gist_encodes_by_reader_and_is_lossy_only_where_that_is_allowed():
    trace = benched("googlenet")[2]
    lossless = plan(trace, None, "gist")
    kinds = {action.codecs for action in lossless.away.values()}
    assert kinds <= {("mask",), ("short",), ("sign",), ("bits",)}
    assert ("sign",) in kinds
    assert lossless.exact
    lossy = plan(trace.with_machine(codecs=COSTS), None, "gist")
    assert not lossy.exact
    assert lossy.peak_bytes < lossless.peak_bytes


def test_free_codecs_never_depend_on_contents():
    trace = benched("googlenet")[2]
    facts = facts_of(trace)
    found = free_codecs(trace)
    assert found
    for value, action in found.items():
        assert isinstance(action, Compress)
        assert facts[value].kinds & {"two_valued", "bool", "index", "sign_only"}


def test_without_links_and_codecs_they_keep_or_recompute():
    trace = bench_of("residual").record()
    for policy in (*MOVING, "gist"):
        assert not plan(trace, None, policy).away
        assert policy in POLICIES


def test_cdma_leaves_zeros_out_wherever_a_relu_made_the_tensor():
    trace = benched("residual")[2]
    facts = facts_of(trace)
    for value, action in plan(trace, None, "cdma").away.items():
        assert action.codecs == (("zvc",) if "zeros" in facts[value].kinds else ())


@pytest.mark.parametrize(("s_per_byte", "pays"), [(0.0, True), (1.0, False)])
def test_cswap_compresses_only_where_the_swap_grows_shorter(s_per_byte, pays):
    trace = benched("residual")[2]
    values = tuple(replace(v, zeros=0.5) for v in trace.values)
    cost = next(c for c in EXACT if c.name == "zvc")
    slow = replace(cost, encode_s_per_byte=s_per_byte, decode_s_per_byte=s_per_byte)
    trace = replace(trace, values=values).with_machine([Link("host", 1e5, 1e5), Link("disk", 1e5, 1e5)], [slow])
    codecs = {action.codecs for action in plan(trace, None, "cswap").away.values()}
    assert (("zvc",) in codecs) == pays


def test_ocdnn_fetches_a_layer_ahead():
    trace = benched("residual")[2]
    away = plan(trace, None, "ocdnn").away
    assert any(action.back_at < simulate_needed(trace, value) for value, action in away.items())


def simulate_needed(trace, value):
    return Simulator(trace).needed(value)[0]


def test_swapadvisor_sends_what_is_needed_last():
    trace = benched("residual")[2]
    away = plan(trace, limit(trace, 0.8), "swapadvisor").away
    needs = {v: simulate_needed(trace, v) for v in plan(trace, None, "vdnn_all").away}
    stayed = [tick for v, tick in needs.items() if v not in away]
    assert max(needs, key=needs.__getitem__) in away
    assert min(stayed) < min(needs[v] for v in away)


@pytest.mark.parametrize("seed", range(20))
def test_swapadvisor_evicts_what_is_needed_last_of_what_is_there(seed):
    """Against the rule said plainly: of the tensors read before the tick and needed after it, the farthest goes."""
    choose, n_ticks = random.Random(seed), 30
    reads = sorted(choose.sample(range(n_ticks - 2), 10))
    inputs = [
        LayerInput(v, read, choose.randrange(read + 1, n_ticks), choose.randint(1, 5)) for v, read in enumerate(reads)
    ]
    live, limit_bytes = np.array([choose.randint(5, 20) for _ in range(n_ticks)]), 12
    left, wanted = live.copy(), []
    for tick in range(n_ticks):
        while left[tick] > limit_bytes:
            there = [e for e in inputs if e.read < tick < e.needed and e not in wanted]
            if not there:
                break
            wanted.append(max(there, key=lambda e: (e.needed, e.n_bytes)))
            left[wanted[-1].read + 1 : wanted[-1].needed] -= wanted[-1].n_bytes
    assert evicted(live, inputs, limit_bytes) == wanted
    assert live.tolist() == left.tolist()


def test_ticks_settled_as_one_tensor_after_the_other_goes_are_those_settled_at_once():
    """Capuchin keeps one simulator for all its choices."""
    trace = benched("GPT-2")[2]
    simulator, actions = Simulator(trace), {}
    movable = [v for v in plan(trace, None, "vdnn_all").away if v in trace.droppable]
    for place, value in enumerate(movable):
        picked = {value: RECOMPUTE if place % 3 == 2 else Offload("host")}
        actions |= picked
        simulator.change(picked)
        simulator.change(settled(simulator, actions))
        assert simulator.bytes_at().tolist() == judge(trace, actions).bytes_at.tolist()
    assert simulator.timeline().actions == scheduled(trace, actions)


def test_ssdtrain_writes_no_more_than_the_forward_hides():
    trace = benched("GPT-2")[2]
    away = plan(trace, None, "ssdtrain").away
    forward_s = sum(trace.ops[i].seconds for i in trace.forward_ops)
    rate = next(link for link in trace.links if link.to == "disk").out_bytes_per_s
    assert away
    assert sum(trace.value_bytes(v) for v in away) <= forward_s * rate


def test_autotm_names_a_least_peak_that_it_reaches_and_vdnn_does_not_go_below():
    step, least = step_of("residual"), {}
    for policy in ("autotm", "vdnn_all"):
        with pytest.raises(InfeasibleBudgetError) as caught:
            POLICIES[policy](step, Budget(step.trace.resident_bytes + 1))
        least[policy] = caught.value.least_peak_bytes
    reached = POLICIES["autotm"](step, Budget(least["autotm"])).peak_bytes
    assert reached <= least["autotm"] <= least["vdnn_all"]


def test_autotm_moves_less_than_vdnn():
    trace = benched("residual")[2]
    budget = limit(trace, 0.9)
    moved = sum(trace.value_bytes(v) for v in plan(trace, budget, "autotm").away)
    assert moved
    for rule in ("vdnn", "vdnn_plus"):
        other = planned(trace, Budget(peak_bytes=budget), rule)
        assert not isinstance(other, Plan) or moved <= sum(trace.value_bytes(v) for v in other.away)


def test_sentinel_migrates_in_intervals():
    trace = benched("GPT-2")[2]
    plans = [planned(trace, Budget(peak_bytes=limit(trace, share)), "sentinel") for share in (0.9, 0.8, 0.7)]
    backs = [[action.back_at for action in made.away.values()] for made in plans if isinstance(made, Plan)]
    assert any(len(set(ticks)) < len(ticks) for ticks in backs)


def test_capuchin_swaps_what_has_time_and_recomputes_the_rest_on_a_slow_link():
    trace = benched("residual")[2]
    budget = limit(trace, 0.6)
    fast = plan(trace.with_machine([Link("host", 1e15, 1e15), Link("disk", 1e15, 1e15)]), budget, "capuchin")
    slow = plan(trace.with_machine([Link("host", 1e3, 1e3), Link("disk", 1e3, 1e3)]), budget, "capuchin")
    assert fast.away
    assert not fast.recompute_seconds
    assert not slow.away
    assert slow.recompute_seconds > 0


def test_superneurons_moves_no_more_checkpoints_than_the_cache_cannot_hold():
    trace = benched("residual")[2]
    made_by = {v: trace.ops[trace.values[v].op] for v in trace.saved}
    least = plan(trace.with_machine(), None, "superneurons")
    assert all(is_weighted(made_by[v]) for v in least.away)
    roomy = plan(trace, simulate(trace).peak_bytes, "superneurons")
    assert not roomy.away
