"""What torch's dispatcher does not see gives no wrong gradient: it is pinned, verified, or refused in a sentence."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback, Memory
from ctdr_lightning.basics.errors import InfeasibleBudgetError, ReplayError
from ctdr_lightning.memory import Budget, Plan, Recorder, Session, Tape, Trace, plan
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.guide.events import Differed
from ctdr_lightning.memory.recorder import recorder
from ctdr_lightning.memory.recorder.contents import READS_UNSEEN, ContentsWatch
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.traces.trace import WRITTEN_UNSEEN
from ctdr_lightning.memory.values import replay
from ctdr_lightning.memory.values.op_traits import FILLABLE, UNPROVEN, traits
from ctdr_lightning.memory.values.op_trial import OpTrial
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.reports.event_words import words_of
from tests.memory.harness import Bench, everything_dropped, planned, random_actions
from tests.memory.holders.doubles import late_holders
from tests.memory.in_a_trainer import trained
from tests.memory.leaks import assert_nothing_is_installed
from tests.memory.unseen_steps import PICTURES, UNSEEN, Convs, raw
from tests.parts import fit

pytestmark = pytest.mark.usefixtures("short_searches")

EXACT = [name for name in CODECS if CODECS[name].exact]
COSTS = [
    CodecCost(name, c.exact, c.needs, c.payload_bits, c.side_bits, c.drops_zeros)
    for name, c in ((name, CODECS[name]) for name in EXACT)
]
LINKS = [Link(name, 2e8, 2e8, latency_s=1e-4) for name in ("host", "disk")]
# A value came back otherwise, is pinned, and the step runs again: more than so often no case needs.
MOST_TRIES = 4


@cache
def benched(name: str) -> Bench:
    torch.manual_seed(0)
    net, *rest = UNSEEN[name]()
    return Bench(net.train(), *rest)


@cache
def recorded(name: str) -> Trace:
    return benched(name).record().with_machine(LINKS, COSTS)


def within(trace: Trace, policy: str) -> Plan:
    """A policy's plan in the middle between the plain peak and its least."""
    least = trace.resident_bytes + 1
    try:
        return plan(trace, Budget(peak_bytes=least, time_limit_s=0.3), policy)
    except InfeasibleBudgetError as error:
        keep = plan(trace, policy="keep").peak_bytes
        room = max((keep + error.least_peak_bytes) // 2, error.least_peak_bytes)
        return plan(trace, Budget(peak_bytes=room, time_limit_s=0.3), policy)


def in_codec(trace: Trace, codec: str) -> Plan:
    facts = facts_of(trace)
    fits = [v for v in trace.saved if facts[v].movable and CODECS[codec].needs in facts[v].kinds]
    return planned(trace, {v: Compress((codec,)) for v in fits})


PLANS = {
    "sqrt": lambda trace: plan(trace, policy="sqrt"),
    "everything dropped": lambda trace: planned(trace, everything_dropped(trace)),
    "random": lambda trace: planned(trace, random_actions(trace, 4)),
    "auto": lambda trace: within(trace, "auto"),
    "dtr": lambda trace: within(trace, "dtr"),
    "disk": lambda trace: planned(trace, {v: Offload("disk") for v in trace.saved if facts_of(trace)[v].movable}),
} | {codec: lambda trace, codec=codec: in_codec(trace, codec) for codec in EXACT}


QUICK = ("sqrt", "everything dropped", "disk", "sign")


def run_until_right(bench: Bench, trace: Trace, make, folder, **options) -> list[str]:
    """What differs from the plain step once nothing is refuted any more."""
    want = bench.run()
    for _ in range(MOST_TRIES):
        tape = Tape(make(trace), holders=late_holders(0, folder), **options)
        try:
            differs = bench.run(tape).differs_from(want)
            assert not tape.diverged
            return differs
        except ReplayError as error:
            trace = trace.with_pins(error.pins)
    raise AssertionError("refuted again and again")


def test_there_are_as_many_as_promised():
    assert len(UNSEEN) >= 40


WRITTEN = [name for name in UNSEEN if name.startswith("a_kernel_") and "reads" not in name]
DRAWN = ("an_operator_draws_without_a_tag", "an_operator_that_draws_only_sometimes")
REASONS = {
    **dict.fromkeys(WRITTEN, WRITTEN_UNSEEN),
    **dict.fromkeys(DRAWN, "random, without saying so"),
    "a_kernel_fills_empty_like": "uninitialised memory",
    "a_kernel_that_only_reads": "",
    "an_operator_with_a_state_of_its_own": "gives other bits on the same inputs",
    "an_operator_writes_to_its_input_without_saying_so": "writes to its inputs without declaring it",
    "an_operator_that_repeats_itself": "",
    "a_recurrence_over_parts_of_a_sequence": "",
    "the_batch_is_written_over_after_the_forward": READS_UNSEEN,
    "a_static_batch_is_written_over_within_the_forward": READS_UNSEEN,
}


@pytest.mark.parametrize("name", REASONS)
def test_a_pin_has_its_reason(name):
    trace = recorded(name)
    pins = {v.pin for v in trace.values if v.op >= 0 and not trace.ops[v.op].backward}
    if REASONS[name] == WRITTEN_UNSEEN and FILLABLE in pins:  # of a GPU alone
        pins |= {WRITTEN_UNSEEN}
    unseen = pins & {*REASONS.values(), UNPROVEN, "uninitialised memory"} - {""}
    assert unseen >= {REASONS[name]} - {""}
    assert REASONS[name] or not unseen


def check_plans(name, kinds, folder):
    for kind in kinds:
        assert not run_until_right(benched(name), recorded(name), PLANS[kind], folder), kind
    assert_nothing_is_installed()


@pytest.mark.parametrize("name", UNSEEN)
def test_under_a_plan(name, tmp_path):
    check_plans(name, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_under_every_plan(name, tmp_path):
    check_plans(name, PLANS.keys() - set(QUICK), tmp_path)


@pytest.mark.parametrize("name", UNSEEN)
def test_while_it_is_recorded_under_a_budget(name):
    recorded(name)  # the trial of another library's operator moves a state that it keeps
    bench = benched(name)
    want, held = bench.run(), set()
    budget_bytes = int(0.6 * bench.peak_bytes())
    for _ in range(MOST_TRIES):
        try:
            differs = bench.run(Recorder(evictor=Evictor(budget_bytes), held=held), around=True).differs_from(want)
            break
        except ReplayError as error:
            held |= error.ticks
    else:
        raise AssertionError("refuted again and again")
    assert not differs
    assert_nothing_is_installed()


@pytest.mark.parametrize("name", UNSEEN)
def test_in_a_session_under_a_budget(name):
    recorded(name)  # as above
    bench = benched(name)
    want = bench.run()

    def planner(trace: Trace) -> Plan:
        return within(trace, "capuchin")

    session = Session(planner, budget_bytes=int(0.75 * bench.peak_bytes()), root=bench.model)
    n_right = 0
    for _ in range(3 + MOST_TRIES):
        bench.reset()
        session.begin("step")
        try:
            loss = bench.step(bench.model)
            session.forward_done()
            bench.backward(loss)
        except ReplayError as error:
            with pytest.warns(UserWarning, match="held from now on"):
                session.refute(error)
            continue
        session.end()
        assert not bench.outcome(loss).differs_from(want)
        n_right += 1
    assert n_right >= 3
    assert not any(isinstance(event, Differed) for event in session.events), session.events
    session.abort()
    assert_nothing_is_installed()


# -- a Trainer with the shortest line ----------------------------------------------------------------------------------


def trained_within(make, **options):
    """The same under the least budget that the shortest line takes."""
    budget = 1024
    for _ in range(5):
        callback = CTDRCallback(rank=None, memory_budget=budget, verbose=False, **grouped(options))
        try:
            return trained(make, 4, callback), callback
        except InfeasibleBudgetError as error:
            budget = int(error.least_peak_bytes * 1.02)
    raise AssertionError("no budget is enough")


# The first step finds out after it has evicted what reads the batch, and what it wrote cannot be put back.
REFUSED = {"the_batch_is_written_over_after_the_forward", "a_static_batch_is_written_over_within_the_forward"}
WITH_A_LOSS_ALONE = [name for name in UNSEEN if len(UNSEEN[name]()) == 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_A_LOSS_ALONE)
def test_in_a_trainer_with_the_shortest_line(name):
    want = trained(UNSEEN[name], 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CTDR")
        try:
            found, _ = trained_within(UNSEEN[name])
        except ReplayError as error:
            if name not in REFUSED or "a kernel that torch does not see writes" not in str(error):
                raise
            found = want
    assert [n for n in want if not torch.equal(want[n], found[n])] == []
    assert_nothing_is_installed()


@pytest.mark.parametrize(
    "name", ["a_kernel_fills_zeros_like", "a_kernel_reads_a_saved_relu", "an_operator_draws_without_a_tag"]
)
def test_in_a_trainer(name):
    test_in_a_trainer_with_the_shortest_line(name)


class LaterReader(LightningModule):
    """From the third batch on, a hook reads what ReLU saved: no step that was recorded has shown it."""

    def __init__(self):
        super().__init__()
        self.net = Convs()
        self.losses = []

    def training_step(self, batch, batch_idx):
        h = PICTURES * 1
        for conv, norm in zip(self.net.convs, self.net.norms, strict=True):
            y = F.relu(norm(conv(h)))
            if batch_idx >= 2:
                y.register_hook(lambda g, node=y.grad_fn: g * (1 + node._saved_result.detach()))
            h = F.max_pool2d(y, 2, 1)
        loss = h.square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def later(*callbacks):
    torch.manual_seed(0)
    module = LaterReader()
    fit(module, *callbacks, data=(DataLoader(torch.zeros(5, 1), 1), None), max_epochs=1, limit_val_batches=0)
    return [*module.state_dict().values(), *module.losses]


def test_a_reader_that_a_later_step_brings_is_given_the_contents():
    want = later()
    callback = CTDRCallback(rank=None, policy="gist", memory=Memory(codecs=["sign"]), verbose=False)
    with pytest.warns(UserWarning, match="keeps as its signs"):
        found = later(callback)
    assert all(map(torch.equal, want, found))
    assert any("keeps as its signs" in words_of(event) for event in callback.run.memory.session.events)


# -- each detector, removed in turn, makes its rows fail ---------------------------------------------------------------


def _nothing_is_looked_at(patch):
    patch.setattr(ContentsWatch, "look", lambda *_: None)
    patch.setattr(ContentsWatch, "look_at_storage", lambda *_: None)


def _every_operator_is_trusted(patch):
    patch.setattr(OpTrial, "judge", lambda self, out: traits(self._func).tried(""))
    for func in (torch.ops.unseen.drops.default, torch.ops.unseen.counts.default):
        op = traits(func)
        for name, value in (("pin", ""), ("unproven", False), ("special", False)):
            patch.setattr(op, name, value)


def _everybody_reads_signs_alone(patch):
    patch.setattr(recorder, "reader", lambda: "ReluBackward0")
    patch.setattr(replay, "reader", lambda: "ReluBackward0")


def _no_reader_is_asked_later(patch):
    patch.setattr(replay, "reader", lambda: "ReluBackward0")


REMOVED = {
    # from the detector to the steps, kinds of plan and `verify` under which its absence gives wrong gradients
    "fingerprints of the recorded step": (
        _nothing_is_looked_at, ("a_kernel_fills_clone", "a_kernel_writes_an_activation_that_was_read_before"),
        "everything dropped", "never",
    ),
    "verification": (
        lambda patch: None,
        ("a_tensor_is_written_over_when_nothing_reads_it_any_more", "an_operator_whose_bits_follow_from_the_thread"),
        "everything dropped", "never",
    ),
    "trials of operators": (
        _every_operator_is_trusted, ("an_operator_draws_without_a_tag", "an_operator_with_a_state_of_its_own"),
        "everything dropped", "never",
    ),
    "readers of a codec": (_everybody_reads_signs_alone, ("a_kernel_reads_a_saved_relu",), "sign", "first"),
}  # fmt: skip


@pytest.mark.parametrize("detector", REMOVED)
def test_a_detector_that_is_missing_is_missed(detector, monkeypatch, tmp_path):
    remove, names, kind, verify = REMOVED[detector]
    remove(monkeypatch)
    for name in names:
        bench = Bench(*UNSEEN[name]())
        trace = bench.record().with_machine(LINKS, COSTS)
        assert run_until_right(bench, trace, PLANS[kind], tmp_path, verify=verify), name


def test_a_later_reader_that_is_not_asked_is_given_signs(monkeypatch):
    _no_reader_is_asked_later(monkeypatch)
    found = later(CTDRCallback(rank=None, policy="gist", memory=Memory(codecs=["sign"]), verbose=False))
    assert not all(map(torch.equal, later(), found))


def test_an_eviction_that_nobody_verifies_is_missed():
    bench = benched("a_tensor_is_written_over_when_nothing_reads_it_any_more")
    want = bench.run()
    recorder = Recorder(evictor=Evictor(int(0.6 * bench.peak_bytes())), verify="never")
    assert bench.run(recorder, around=True).differs_from(want)


def test_an_eviction_of_what_is_known_to_have_changed_is_missed():
    bench = benched("a_kernel_fills_zeros_like")
    want = bench.run()
    evictor = Evictor(int(0.6 * bench.peak_bytes()))
    recorder = Recorder(evictor=evictor, verify="never")
    evictor.unrepeatable = frozenset
    assert bench.run(recorder, around=True).differs_from(want)


def test_a_batch_that_was_written_over_is_known_when_the_step_is_left():
    """Nothing reads it again, so that only a last look shows that the step must not run again."""
    x, weight = torch.randn(8, 8), torch.nn.Parameter(torch.ones(8))
    session = Session(within, budget_bytes=2**20)
    for writes in (False, True):
        session.begin(writes)
        loss = (x.exp() * weight).sum()
        if writes:
            raw(x)[...] = 7.0
        session.abort()
        assert session.writes_unseen is writes
        del loss
