"""Guided steps are verified: the first of each kind, after a change of settings, one in many, always, or never."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.basics.errors import ConfigError, ReplayError
from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory import RECOMPUTE, Plan, Recorder, Session, Tape, plan, record
from ctdr_lightning.memory.guide.events import Refuted
from ctdr_lightning.memory.simulator.actions import Compress, first_wrong
from ctdr_lightning.memory.tape import verifier
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.tape.verifier import Verifier
from ctdr_lightning.memory.traces.facts import facts_of
from tests.memory.harness import Bench, everything_dropped, planned
from tests.memory.test_unseen import COSTS

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Sigmoid())])


@pytest.fixture
def made():
    model = net()
    return model, planned(trace := record(lambda: model(X).square().sum()), everything_dropped(trace))


def run(model, made, **options):
    with Tape(made, **options):
        loss = model(X).square().sum()
    loss.backward()


@pytest.fixture
def compared(monkeypatch):
    """How many values have come back to a verifier."""
    found = []
    original = Verifier.returned
    monkeypatch.setattr(Verifier, "returned", lambda self, *args: found.append(1) or original(self, *args))
    return found


@pytest.mark.parametrize(("verify", "verified"), [("first", 1), ("always", 4), ("never", 0)])
def test_which_steps_are_verified(made, compared, verify, verified):
    n_compared = []
    for _ in range(4):
        compared.clear()
        run(*made, verify=verify)
        n_compared.append(bool(compared))
    assert sum(n_compared) == verified
    assert n_compared[0] is (verify != "never")


def test_a_plan_that_was_verified_is_so_again_after_many_steps(made, compared, monkeypatch):
    monkeypatch.setattr(verifier, "STEPS_BETWEEN", 5)
    found = []
    for _ in range(12):
        compared.clear()
        run(*made)
        found.append(bool(compared))
    assert [k for k, one in enumerate(found, 1) if one] == [1, 5, 10]


def precision():
    torch.set_float32_matmul_precision("high")


def benchmark():
    torch.backends.cudnn.benchmark = True


def deterministic():
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def _settings_back():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("change", [precision, benchmark, deterministic])
@pytest.mark.usefixtures("_settings_back")
def test_a_step_under_other_settings_is_verified(made, compared, change):
    run(*made)
    compared.clear()
    run(*made)
    assert not compared
    change()
    run(*made)
    assert compared
    compared.clear()
    run(*made)
    assert not compared


def test_a_step_within_autocast_is_another_setting(made, compared):
    run(*made)
    compared.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        settings = verifier.numeric_settings()
    assert settings != verifier.numeric_settings()


def test_a_step_without_a_backward_proves_nothing(made, compared):
    with Tape(made[1]):
        made[0](X)
    run(*made)
    assert compared


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="'first', 'always', 'never'"):
        Session(plan, verify="sometimes")


class Unsteady(nn.Module):
    """A kernel writes over a buffer when nothing reads it any more, from a step on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("state", torch.linspace(0, 1, 64 * 64).view(64, 64))  # more than the tape copies
        self.writes = False

    def forward(self):
        h = torch.ones_like(self.state)
        for layer in self.layers:
            h = layer(h) * self.state.exp().sin()
        if self.writes:
            self.state.numpy()[...] += 1
        return h.square().mean()


def unsteady_bench():
    torch.manual_seed(0)
    return Bench(Unsteady(), lambda model: model())


@pytest.mark.parametrize("at_once", [False, True])
def test_the_error_names_operation_and_module_and_what_to_pin(at_once):
    bench = unsteady_bench()
    trace = bench.record()
    bench.model.writes = True
    want = bench.run()
    with pytest.raises(ReplayError, match=r"aten\.\w+\.\w+ of .* came back with other contents") as caught:
        bench.run(Tape(planned(trace, everything_dropped(trace)), at_once=at_once))
    assert caught.value.pins
    assert "with_pins" in caught.value.hint
    for _ in range(4):
        trace = trace.with_pins(caught.value.pins)
        try:
            assert not bench.run(Tape(planned(trace, everything_dropped(trace)))).differs_from(want)
            break
        except ReplayError as error:
            caught.value.pins = error.pins
    else:
        raise AssertionError("refuted again and again")


def test_a_session_pins_what_was_refuted_and_says_so_once():
    bench = unsteady_bench()
    session = Session(lambda trace: planned(trace, everything_dropped(trace)), root=bench.model)

    def step():
        bench.reset()
        session.begin("step")
        loss = bench.step(bench.model)
        session.forward_done()
        loss.backward()
        session.end()
        return bench.outcome(loss)

    step()
    bench.model.writes = True
    want = bench.run()
    n_refuted = 0
    for _ in range(8):
        try:
            assert not step().differs_from(want)
        except ReplayError as error:
            n_refuted += 1
            with pytest.warns(UserWarning, match="came back with other contents.*held from now on"):
                session.refute(error)
    assert 1 <= n_refuted <= 4
    assert sum(isinstance(event, Refuted) for event in session.events) == n_refuted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_what_is_evicted_without_a_plan_is_verified_unless_it_is_never(compared):
    bench = Bench(net(), lambda model: model(X).square().sum())
    budget_bytes = bench.peak_bytes() // 2
    bench.run(Recorder(evictor=Evictor(budget_bytes)), around=True)
    assert compared
    compared.clear()
    bench.run(Recorder(evictor=Evictor(budget_bytes), verify="never"), around=True)
    assert not compared


def test_numbers_on_a_device_are_compared_when_the_backward_is_over(monkeypatch):
    """As on a GPU: fingerprints are tensors, and a mismatch in the middle ends the backward at its end."""

    def on_device(how, tensor):
        with no_dispatch_modes(), torch.no_grad():
            return tensor.double().sum()

    monkeypatch.setattr(verifier, "_fingerprint", on_device)
    settled = []
    original = Verifier._settle
    monkeypatch.setattr(Verifier, "_settle", lambda self: settled.append(len(self._pending)) or original(self))
    model = net()
    trace = record(lambda: model(X).square().sum())
    run(model, planned(trace, everything_dropped(trace)))
    assert settled == [4]


# -- codecs for one reader ---------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.looks = ""

    def forward(self, h):
        read = 0
        for conv in self.convs:
            y = F.relu(conv(h))
            node = y.grad_fn
            if self.looks == "in the forward":
                read = read + node._saved_result.detach().sum() * 1e-3
            if self.looks == "in a hook":
                y.register_hook(lambda g, node=node: g * node._saved_result.detach().clone())
            h = F.max_pool2d(y, 2, 1)
        if self.looks == "after the forward":
            read = node._saved_result.detach().sum() * 1e-3
        return h.square().mean() * (1 + read)


def in_signs(trace) -> Plan:
    facts = facts_of(trace)
    return planned(trace, {v: Compress(("sign",)) for v in trace.saved if "sign_only" in facts[v].kinds})


IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("looks", ["in the forward", "in a hook", "after the forward"])
def test_a_reader_of_a_later_step_is_refused_and_then_given_the_contents(looks, verify):
    torch.manual_seed(0)
    bench = Bench(Pooled(), lambda model: model(IMAGES))
    trace = bench.record().with_machine((), COSTS)
    made = in_signs(trace)
    assert len(made.away) == 3
    assert made.exact
    bench.run(Tape(made))
    bench.model.looks = looks
    want = bench.run()
    for _ in range(4):
        try:
            outcome = bench.run(Tape(in_signs(trace), verify=verify))
            break
        except ReplayError as error:
            assert "keeps as its signs" in error.problem  # noqa: PT017
            assert error.read_by_others  # noqa: PT017
            for value in error.read_by_others:
                trace = trace.with_reader(value)
    assert not outcome.differs_from(want)


def test_a_hook_of_a_module_makes_a_step_one_to_be_verified(compared):
    bench = Bench(net(), lambda model: model(X).square().sum())
    session = Session(lambda trace: planned(trace, everything_dropped(trace)), root=bench.model)

    def step():
        compared.clear()
        bench.reset()
        session.begin("step")
        loss = bench.step(bench.model)
        session.forward_done()
        loss.backward()
        session.end()
        return bool(compared)

    assert [step() for _ in range(3)] == [False, True, False]
    bench.model[2].register_forward_hook(lambda *_: None)
    assert [step() for _ in range(2)] == [True, False]


def test_what_was_made_again_from_a_wrong_value_is_not_the_first():
    net, x = nn.Sequential(*(nn.Tanh() for _ in range(5))), torch.ones(2, 4, requires_grad=True)
    trace = record(lambda: net(x).sum())
    made = [op.outputs[0] for op in trace.ops if op.name == "aten.tanh.default"]
    dropped = dict.fromkeys(made, RECOMPUTE)
    assert first_wrong(trace, dropped, {made[1], made[3]}, set()) == {made[1]}
    assert first_wrong(trace, dropped, {made[1], made[3]}, {made[2]}) == {made[1], made[3]}  # the one between was right
    kept = {v: action for v, action in dropped.items() if v != made[2]}
    assert first_wrong(trace, kept, {made[1], made[3]}, set()) == {made[1], made[3]}
    assert first_wrong(trace, dropped, {-1, made[3]}, set()) == {-1, made[3]}
