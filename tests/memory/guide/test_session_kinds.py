"""Kinds of steps over a run: a first step that is lighter than the others, and more kinds than are kept."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.basics.torch_private import n_dispatch_modes, top_saved_tensors_hooks
from ctdr_lightning.memory import Session, plan, signature_of
from ctdr_lightning.memory.guide import step_kinds
from ctdr_lightning.memory.guide.events import Differed
from ctdr_lightning.memory.guide.step_guide import WATCHED_STEPS
from ctdr_lightning.memory.guide.step_kinds import MOST_KINDS, graph_of
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.simulator.actions import Offload
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import Link
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.trainer.reports.event_words import words_of
from tests.memory.leaks import assert_nothing_is_installed

BUDGET_BYTES = 200_000


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())])


def make_session(net):
    weights = sum(p.nbytes for p in net.parameters())
    return Session(lambda trace: plan(trace, BUDGET_BYTES), budget_bytes=BUDGET_BYTES, static_bytes=weights, root=net)


def whole(net, batch):
    return net(batch).square().mean()


def warm_up(net, batch):
    """A first forward without gradients."""
    with torch.no_grad():
        features = net[:-2](batch)
    return net[-2:](features).square().mean()


def thrown_away(net, batch):
    """A loss of two layers, while the others are not used yet."""
    return net[:2](batch).square().mean()


def step(session, net, batch, way):
    """One step; what it took at its peak, weights included."""
    net.zero_grad(set_to_none=True)
    with PeakMeter() as meter:
        session.begin(signature_of(batch, net), beside_bytes=batch.nbytes)
        loss = way(net, batch)
        session.forward_done()
        session.backward_begins(loss)
        loss.backward()
        session.end()
    return meter.live.peak + batch.nbytes + sum(p.nbytes for p in net.parameters())


def plain_peak(way):
    net = make_net()
    return step(Session(lambda trace: plan(trace, policy="keep"), root=net), net, torch.randn(128, 32), way)


@pytest.mark.slow
@pytest.mark.parametrize("first", [warm_up, thrown_away])
def test_a_first_step_lighter_than_the_others_leaves_no_plan_that_breaks_the_budget(first):
    assert plain_peak(first) < BUDGET_BYTES < plain_peak(whole)
    net, batch = make_net(), torch.randn(128, 32)
    session = make_session(net)
    peaks = [step(session, net, batch, way) for way in [first, *[whole] * 4]]
    assert max(peaks) <= BUDGET_BYTES
    assert any(isinstance(event, Differed) for event in session.events)
    assert not session.plan.keeps_all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "said"),
    [(warm_up, "forward 1 of a module runs with gradients"), (thrown_away, "forward 4 of a module runs")],
)
def test_a_change_after_many_light_steps_is_kept_under_the_budget_and_recorded(first, said):
    net, batch = make_net(), torch.randn(128, 32)
    session = make_session(net)
    ways = [first] * (WATCHED_STEPS + 3) + [whole] * 4
    peaks = [step(session, net, batch, way) for way in ways]
    assert said in "".join(map(words_of, session.events))
    assert sum(isinstance(event, Differed) for event in session.events) == 1
    assert max(peaks) <= BUDGET_BYTES
    assert not session.plan.keeps_all
    assert_nothing_is_installed()


def bare(net, batch, features=0):
    """Functions of the weights, without any module's forward, of which the first leave nothing behind."""
    with torch.no_grad():
        for layer in net[:features:2]:
            batch = torch.tanh(nn.functional.linear(batch, layer.weight, layer.bias))
    for layer in net[features::2]:
        batch = torch.tanh(nn.functional.linear(batch, layer.weight, layer.bias))
    return batch.square().mean()


def test_a_change_that_no_module_shows_is_noticed_at_the_end_and_recorded():
    net, batch = make_net(), torch.randn(128, 32)
    session = make_session(net)
    ways = [partial(bare, features=22)] * (WATCHED_STEPS + 3) + [bare] * 4
    peaks = [step(session, net, batch, way) for way in ways]
    assert "its graph is another" in "".join(map(words_of, session.events))
    assert sum(peak > BUDGET_BYTES for peak in peaks) == 1, "one step is over before it is noticed"
    assert max(peaks[-3:]) <= BUDGET_BYTES


def test_a_step_within_a_mode_of_its_own_is_left_alone():
    net, batch = make_net(), torch.randn(128, 32)
    session = make_session(net)

    def flops(net, batch):
        with FlopCounterMode(display=False):
            return whole(net, batch)

    for way in [*[warm_up] * (WATCHED_STEPS + 2), flops, *[whole] * 2]:
        peak = step(session, net, batch, way)
    assert peak <= BUDGET_BYTES
    assert_nothing_is_installed()


@pytest.mark.slow
def test_steps_that_take_turns_keep_the_budget_once_noticed():
    net, batch = make_net(), torch.randn(128, 32)
    session = make_session(net)
    ways = [thrown_away, whole] * 8
    peaks = [step(session, net, batch, way) for way in ways]
    assert max(peaks[4:]) <= BUDGET_BYTES


def test_a_step_without_any_op_ends():
    net = make_net()
    session = make_session(net)
    for _ in range(3):
        session.begin("nothing")
        session.forward_done()
        session.end()
    assert session.plan.keeps_all
    assert_nothing_is_installed()


def test_a_light_net_is_left_alone_after_it_was_watched():
    net, batch = make_net(), torch.randn(8, 32)
    session = make_session(net)
    for _ in range(1 + WATCHED_STEPS):
        step(session, net, batch, whole)
    session.begin(signature_of(batch, net))
    assert n_dispatch_modes() == 0
    assert top_saved_tensors_hooks(True) is None
    session.abort()
    assert_nothing_is_installed()
    assert len(session.events) == 1


@pytest.mark.slow
def test_kinds_are_bounded_in_number_and_in_ops(monkeypatch):
    net = make_net()
    keeper = Session(lambda trace: plan(trace, policy="keep"), root=net)
    for n in range(MOST_KINDS + 10):
        step(keeper, net, torch.randn(n + 1, 32), whole)
    assert len(keeper._kinds) == MOST_KINDS
    n_ops = len(keeper.trace.ops)
    monkeypatch.setattr(step_kinds, "MOST_OPS", 5 * n_ops)
    step(keeper, net, torch.randn(500, 32), whole)
    assert len(keeper._kinds) <= 6
    before = len(keeper.events)
    step(keeper, net, torch.randn(500, 32), whole)
    assert len(keeper.events) == before, "the last used is still there"


def test_graphs_are_told_apart():
    net, batch = make_net(), torch.randn(4, 32)
    assert graph_of(whole(net, batch)) == graph_of(whole(net, torch.randn(4, 32)))
    assert len({graph_of(way(net, batch)) for way in (whole, thrown_away)}) == 2
    assert graph_of(torch.zeros(())) == graph_of(torch.ones(()))


class Trimmed(Holders):
    """Holders that note for what they are trimmed."""

    def __init__(self, folder):
        super().__init__(HolderOptions(folder=folder))
        self.kept = []

    def trim(self, keep_bytes):
        self.kept.append(dict(keep_bytes))
        super().trim(keep_bytes)


def test_when_a_kind_is_forgotten_the_holders_keep_what_the_others_need(monkeypatch, tmp_path):
    monkeypatch.setattr(step_kinds, "MOST_KINDS", 2)
    holders, net, away = Trimmed(tmp_path), make_net(), []

    def planner(trace):
        facts = facts_of(trace)
        actions = {v: Offload("disk") for v in trace.saved if facts[v].movable}
        away.append(sum(trace.value_bytes(v) for v in actions))
        return plan(trace.with_machine([Link("disk", 1e9, 1e9)]), policy=lambda trace, budget: actions)

    steps = Session(planner, root=net, holders=holders)
    for length in (64, 16, 32, 8, 32):
        step(steps, net, torch.randn(length, 32), whole)
    # at 32 of 64, 16, 32 the first is forgotten, and no plan of 32 is made yet; at 8 the second
    assert holders.kept == [{"disk": away[1]}, {"disk": away[2]}]
    assert min(away) > 0
    holders.close()


def test_what_follows_from_another_value_is_held_from_the_second_time_on():
    error, kind = ReplayError("A tensor came back otherwise.", ticks={1, 4, 7}, first_ticks={1}), step_kinds.Kind()
    kind.hold(error)
    assert kind.held == {1}
    kind.hold(error)
    assert kind.held == {1, 4, 7}
    other = step_kinds.Kind()
    other.hold(ReplayError("A tensor came back otherwise.", ticks={2}))
    assert other.held == {2}


def test_of_a_plans_values_the_first_are_pinned_first():
    error, kind = ReplayError("Otherwise.", pins={1: "why", 4: "why"}, first_pins={1}), step_kinds.Kind()
    assert kind.pins_of(error) == {1: "why"}
    assert kind.pins_of(error) == {1: "why", 4: "why"}
    assert step_kinds.Kind().pins_of(ReplayError("Otherwise.", pins={4: "why"})) == {4: "why"}
