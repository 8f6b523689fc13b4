"""A memory budget and no other argument: the optimizer steps in the backward where gradients break the budget."""

import math
from functools import partial
from inspect import signature

import pytest
import torch
from torch import nn

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.decomposition import FactorizedLayer
from ctdr_lightning.joint import pricing, search
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.joint.turns import Turns
from ctdr_lightning.trainer.accuracy.auto_rank import Copy
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.options import ELSEWHERE, IN_PARTS, INSIDE, NORMS_IN_PARTS, STATE_ELSEWHERE, CallbackOptions
from ctdr_lightning.trainer.training_step import spare_means
from ctdr_lightning.trainer.training_step.optimizer.in_backward import may_step_inside
from ctdr_lightning.trainer.training_step.spare_means import SpareMeans
from tests import parts
from tests.trainer.training_step.test_step_in_backward import DEPTH, ReadsLate, ReadsOn, Twice, Wide, fit
from tests.trainer.true_peaks import Peaks

# The dense step takes 13.0 MiB at least; 10.1 with one gradient at a time.
BUDGET = "11.5MiB"
WORDS = "the optimizer updates each parameter in the backward"


@pytest.fixture(autouse=True)
def any_prediction(monkeypatch):
    monkeypatch.setattr(search, "PREDICTION_ERROR", 1e9)  # predictions come from this machine's clock


def callback(budget=BUDGET, **options):
    return CTDRCallback(memory_budget=budget, **grouped({"verbose": False, **options}))


def is_cut(module):
    return any(isinstance(layer, FactorizedLayer) for layer in module.modules())


@pytest.mark.slow
def test_weights_and_state_are_the_plain_ones_to_the_bit_within_the_budget(caplog):
    plain, usual = fit(Wide())
    made, peaks = callback(verbose=True), Peaks()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        found, trainer = fit(Wide(), made, peaks)
    assert WORDS in " ".join(caplog.text.split())
    assert not is_cut(found)
    assert parts.same(plain.state_dict(), found.state_dict())
    assert parts.same(usual.optimizers[0].state_dict(), trainer.optimizers[0].state_dict())
    assert max(peaks.bytes[1:]) <= made.run.memory.budget_bytes


@pytest.mark.slow
def test_with_room_for_all_gradients_the_step_stays_where_it_is(caplog):
    made = callback("1GiB", verbose=True)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(Wide(), made)
    assert made.fit.is_dense
    assert WORDS not in " ".join(caplog.text.split())


STEPS = {
    "plain": (lambda module, batch: module.training_step(batch, 0), True),
    "a selection by values": (lambda module, batch: module.net(batch[0])[batch[0][:, 0] > 0].mean(), True),
    "a number that is read": (lambda module, batch: module.net(batch[0]).mean() * batch[0].std().item(), True),
    "a weight in two places": (lambda module, batch: (module.net(batch[0]) @ module.net[0].weight).mean(), True),
    "a weight in two parts of the backward": (Twice.training_step, False),
    "a weight that is read after its update": (ReadsOn.training_step, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_would_fail_inside_is_known_before(name):
    step, allowed = STEPS[name]
    batch = [torch.randn(4, 256)]
    found = may_step_inside(Wide(), batch, step if len(signature(step).parameters) == 2 else partial(step, index=0))
    assert found is allowed


class Answered(BaseException):
    """Ends a choice."""


@pytest.fixture
def ends_with_the_answer(monkeypatch):
    real = SpareMeans.keeping

    def keeping(*args):
        raise Answered(real(*args))

    monkeypatch.setattr(SpareMeans, "keeping", keeping)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "callbacks", "means"),
    [
        ({}, [], INSIDE),
        ({"gradient_clip_val": 1.0}, [], ""),
        ({"accumulate_grad_batches": 2}, [], ""),
        ({}, [ReadsLate], ""),
    ],
    ids=str,
)
@pytest.mark.usefixtures("ends_with_the_answer")
def test_where_the_run_forbids_it_other_means_are_looked_for(trainer, callbacks, means):
    with pytest.raises(Answered, match=f"^{means}$"):
        fit(Wide(), callback(), *(kind() for kind in callbacks), **trainer)


@pytest.mark.slow
@pytest.mark.usefixtures("ends_with_the_answer")
def test_where_the_step_would_fail_other_means_are_looked_for(monkeypatch):
    monkeypatch.setattr(spare_means, "may_step_inside", lambda *_: False)
    with pytest.raises(Answered, match=r"^$"):
        fit(Wide(), callback())


@pytest.mark.parametrize(
    ("times", "parts_of_batch", "slowdown", "found"),
    [
        ({INSIDE: 1.2, ELSEWHERE: 1.1}, IN_PARTS, 1.25, ELSEWHERE),
        ({INSIDE: 1.1, ELSEWHERE: 1.1}, IN_PARTS, 1.25, INSIDE),
        ({INSIDE: 1.5}, IN_PARTS, 1.25, ""),
        ({INSIDE: 1.5, ELSEWHERE: 1.4}, IN_PARTS, math.inf, INSIDE),
        ({INSIDE: 9.0, ELSEWHERE: 1.4}, IN_PARTS, math.inf, IN_PARTS),
        ({INSIDE: 9.0, ELSEWHERE: 1.4}, NORMS_IN_PARTS, math.inf, ELSEWHERE),
        ({INSIDE: 9.0}, "", math.inf, INSIDE),
        ({STATE_ELSEWHERE: 0}, IN_PARTS, math.inf, IN_PARTS),
        ({STATE_ELSEWHERE: 0, INSIDE: 9.0}, "", math.inf, INSIDE),
        ({STATE_ELSEWHERE: 0}, NORMS_IN_PARTS, math.inf, STATE_ELSEWHERE),
        ({STATE_ELSEWHERE: 0}, "", 1.25, ""),
        ({}, NORMS_IN_PARTS, math.inf, NORMS_IN_PARTS),
        ({}, "", math.inf, ""),
    ],
)
def test_the_order_of_the_means(monkeypatch, times, parts_of_batch, slowdown, found):
    means = SpareMeans(None, None, None)
    monkeypatch.setattr(spare_means, "may_step_inside", lambda *_: True)
    state = times.keys() & {STATE_ELSEWHERE}
    times = {name: time for name, time in times.items() if name not in state}
    known = {"_fitting": times, "parts": parts_of_batch, "_fits_in_parts": True, "_fits_with_state_elsewhere": state}
    for name, value in known.items():
        monkeypatch.setattr(means, name, lambda *_, value=value: value)
    assert means.keeping(Copy(None, (0, None), None), None, None, 1, slowdown) == found


class Heavy(Wide):
    """Its weights and their state are nearly all of its memory."""

    def __init__(self, make=torch.optim.Adam):
        super().__init__(make)
        self.net = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.ReLU())))


@pytest.mark.slow
def test_the_optimizers_state_waits_in_the_given_folder_before_a_layer_is_cut(tmp_path, caplog):
    clipped = {"gradient_clip_val": 1.0}  # which needs all gradients before the first update
    plain, _ = fit(Heavy(), **clipped)
    made, peaks = callback("20MiB", disk_folder=tmp_path, verbose=True), Peaks()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        found, _ = fit(Heavy(), made, peaks, **clipped)
    assert "the optimizer's state waits off the device" in " ".join(caplog.text.split())
    assert not is_cut(found)
    assert parts.same(plain.state_dict(), found.state_dict())
    assert max(peaks.bytes[1:]) <= made.run.memory.budget_bytes
    assert made.run.states.moved_bytes == 0, "it is back in the end"


@pytest.mark.parametrize(
    "given",
    [{"optimizer_state": "disk"}, {"optimizer_step": "in_backward"}, {"max_slowdown": 3.0}, {"rank": 0.5}],
    ids=str,
)
def test_the_state_stays_where_an_argument_speaks_against_a_move(given):
    usual = CallbackOptions(memory_budget=BUDGET)
    assert usual.state_elsewhere("cuda").optimizer_state == "host"
    assert usual.state_elsewhere("cpu") is None
    assert CallbackOptions(memory_budget=BUDGET, **given).state_elsewhere("cuda") is None


@pytest.mark.slow
def test_a_choice_counts_the_state_where_the_user_has_it_wait(tmp_path):
    """It counted as if the state stood beside the step, and cut layers that fitted."""
    made = callback("20MiB", optimizer_state="disk", disk_folder=tmp_path)
    found, _ = fit(Heavy(), made, gradient_clip_val=1.0)
    assert made.fit.is_dense
    assert not is_cut(found)


@pytest.mark.parametrize(
    "given",
    [
        {"keep_gradients": True}, {"optimizer_state": "disk"}, {"optimizer_step": "in_backward"}, {"max_slowdown": 3.0},
        {"select": "net.*"}, {"rank": 0.5}, {"rank": "auto"}, {"rank": None}, {"policy": "sqrt"},
    ],
    ids=str,
)  # fmt: skip
def test_where_an_argument_speaks_against_it_it_is_not_tried(given):
    assert CallbackOptions(memory_budget=BUDGET).inside().optimizer_step == "in_backward"
    assert CallbackOptions(memory_budget=BUDGET, **given).inside() is None


@pytest.mark.slow
def test_a_cut_says_why_no_other_means_was_possible():
    made = callback()
    module, _ = fit(Wide(), made, gradient_clip_val=1.0)
    assert is_cut(module)
    told = [text for text in made.fit.sentences() if text.startswith("Not possible: ")]
    assert told[0] == (
        "Not possible: the optimizer's step in the backward (gradient_clip_val=1.0 needs all gradients before the "
        "first update)."
    )
    assert told[1].startswith("Not possible: batches in parts (")
    assert not BudgetFit.from_json(made.fit.to_json()).hindrances


@pytest.mark.slow
def test_an_optimizer_that_the_user_put_inside_does_not_forbid_a_cut():
    """Parts, which an argument excludes, were tried for the refusal's sake, and ended in another."""
    module, _ = fit(Wide(), callback("8MiB", optimizer_step="in_backward"))
    assert is_cut(module)


@pytest.mark.slow
def test_a_checkpoint_is_taken_up_by_the_shortest_line(tmp_path):
    whole, _ = fit(Wide(), callback(), max_epochs=2)
    _, trainer = fit(Wide(), callback(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again, _ = fit(Wide(), callback(), max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert parts.same(whole.net[0].state_dict(), again.net[0].state_dict())
    assert CTDRCallback.from_checkpoint(tmp_path / "one.ckpt").options.optimizer_step == "in_backward"


class Deep(Wide):
    """Activations weigh as much as the gradients, so that a plan within the budget takes long."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(256, 256), nn.Tanh())))


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "taken"), [(2.0, True), (4.0, False)])
def test_of_two_exact_means_beyond_the_wished_time_the_faster_is_taken(monkeypatch, inside, taken):
    asked = []

    def keeping(self, copy, step, dense, budget_bytes, slowdown):
        asked.append(slowdown)
        return INSIDE if inside <= slowdown else ""

    monkeypatch.setattr(SpareMeans, "keeping", keeping)
    monkeypatch.setattr(search, "in_turns", lambda dense, step: Turns(1.0, 3.0, 3.0))
    monkeypatch.setattr(pricing.Pricer, "slowdown", lambda self, seconds: 3.0 if seconds else 1.0)
    monkeypatch.setattr(search, "PREDICTION_ERROR", 1.0)
    made = callback("14MiB")
    module, _ = fit(Deep(), made)
    assert not is_cut(module)
    assert (made.run.budget_fit is None) is taken
    assert 3.0 in asked


@pytest.mark.slow
def test_a_budget_that_no_means_keeps_is_refused():
    with pytest.raises(InfeasibleBudgetError):
        fit(Wide(partial(torch.optim.Adam, amsgrad=True)), callback("1KiB"))
