import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.memory import RECOMPUTE, Plan, Simulator, Trace, plan, record, simulate
from tests.memory.graphs import GRAPHS, graph_trace
from tests.memory.harness import everything_dropped, planned

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-2, 9), max_size=3), st.just({}), st.just(10**40),
)  # fmt: skip


def small_trace():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten())
    return record(lambda: net(torch.randn(2, 1, 5, 5)).square().sum())


TRACE = small_trace()
PLAN = planned(TRACE, everything_dropped(TRACE))


def places(document):
    """Every place in a JSON document, as the way to it."""
    found = []

    def visit(item, way):
        for key in item if isinstance(item, dict) else range(len(item)):
            found.append((*way, key))
            if isinstance(item[key], (dict, list)):
                visit(item[key], (*way, key))

    visit(document, ())
    return found


def damage(text, data):
    """The document with one to three places overwritten, or deleted."""
    document = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(places(document)))
        item = document
        for key in way:
            item = item[key]
        if data.draw(st.booleans()):
            item[last] = data.draw(JUNK)
        else:
            del item[last]
    return json.dumps(document)


@pytest.mark.parametrize("trace", [TRACE, *map(graph_trace, GRAPHS.values())])
def test_json_round_trip(trace, tmp_path):
    assert Trace.from_json(trace.to_json()) == trace
    trace.to_json(tmp_path / "trace.json")
    assert Trace.from_json(tmp_path / "trace.json") == trace
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_a_damaged_trace_is_refused_or_can_be_simulated(data):
    text = damage(TRACE.to_json(), data)
    try:
        trace = Trace.from_json(text)
    except CheckpointError:
        return
    simulate(trace)
    Simulator(trace, dict.fromkeys(trace.droppable, RECOMPUTE)).timeline().alive_at_peak()
    plan(trace, policy="sqrt").explain()


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_a_damaged_plan_is_refused_or_can_be_explained(data):
    text = damage(PLAN.to_json(), data)
    try:
        found = Plan.from_json(text)
    except CheckpointError:
        return
    assert found.explain()
    assert Plan.from_json(found.to_json()) == found


@given(st.text(max_size=40) | st.just("{" * 100_000) | st.just('{"kind": "trace", "version": 1}') | st.just("[]"))
def test_what_is_no_trace_is_refused(text):
    for kind in (Trace, Plan):
        with pytest.raises(CheckpointError, match="HINT"):
            kind.from_json(text)


def test_a_trace_of_another_version_is_refused():
    with pytest.raises(CheckpointError, match="version 5"):
        Trace.from_json(TRACE.to_json().replace('"version": 5', '"version": 1', 1))


def test_what_a_trace_says_of_itself():
    conv, norm = (next(i for i, op in enumerate(TRACE.ops) if op.name == name) for name in NAMES)
    made = TRACE.ops[conv].outputs[0]
    assert made in TRACE.saved
    assert made in TRACE.droppable
    assert TRACE.value_bytes(made) == 2 * 2 * 3 * 3 * 4
    assert TRACE.module_of(made) == "0"
    assert TRACE.ops[norm].outputs[0] in TRACE.unholdable, "the ReLU writes over it"
    assert all(not TRACE.ops[i].backward for i in TRACE.forward_ops)
    assert TRACE.seconds == sum(op.seconds for op in TRACE.ops)
    assert TRACE.resident_bytes >= 4 * sum(p.numel() for p in (torch.empty(2, 1, 3, 3), torch.empty(2)))


NAMES = ("aten.convolution.default", "aten.native_batch_norm.default")


def test_with_costs_changes_costs_alone():
    other = TRACE.with_costs([2.0] * len(TRACE.ops), {1: 7})
    assert other.seconds == 2.0 * len(TRACE.ops)
    assert other.ops[1].temp_bytes == 7
    assert other.ops[0].temp_bytes == TRACE.ops[0].temp_bytes
    assert other.values == TRACE.values
    with pytest.raises(ValueError, match="zip"):
        TRACE.with_costs([1.0], {})


def test_a_trace_is_plain_data():
    assert copy.deepcopy(TRACE) == TRACE


@pytest.mark.parametrize("mark", ["\ufeff", "\ufeff\n"])
def test_a_byte_order_mark_before_the_text_is_no_part_of_it(mark, tmp_path):
    for made in (TRACE, PLAN):
        text = mark + made.to_json()
        assert type(made).from_json(text) == made
        (tmp_path / "marked.json").write_text(text)
        assert type(made).from_json(tmp_path / "marked.json") == made
