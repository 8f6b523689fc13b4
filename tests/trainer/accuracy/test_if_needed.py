"""A memory budget and no other argument: layers are cut only where no exact plan is good enough."""

import json
import math
import random
import re
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_accuracy

from ctdr_lightning import CTDRCallback, plan, restore
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError, ReplayError
from ctdr_lightning.decomposition import FactorizedLayer
from ctdr_lightning.decomposition.trials.bench import Bench
from ctdr_lightning.joint import for_budget, search
from ctdr_lightning.joint.turns import Turns
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.traces.machine import Link
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.options import ELSEWHERE
from ctdr_lightning.trainer.training_step.spare_means import SpareMeans
from tests import parts
from tests.trainer.true_peaks import Peaks

ROOM = "1GiB"


@pytest.fixture
def plans_take(monkeypatch):
    """Sets the time of the dense model's plans by the clock; factorized ones take half of the dense step."""

    def take(slowdown):
        def in_turns(dense, step):
            cut = any(isinstance(layer, FactorizedLayer) for layer in step.model.modules())
            return Turns(1.0, 0.5, 0.5) if cut else Turns(1.0, slowdown, slowdown)

        monkeypatch.setattr(search, "in_turns", in_turns)
        monkeypatch.setattr(search, "PREDICTION_ERROR", 1e9)  # predictions come from this machine's clock

    return take


@pytest.fixture
def harmless(monkeypatch):
    """Any cut, of an untrained network too."""
    monkeypatch.setattr(for_budget, "USUAL_LOSS", 10.0)
    monkeypatch.setattr(for_budget, "USUAL_SHARE", 1e9)
    monkeypatch.setattr(Bench, "looks_untrained", False)


def callback(budget, **options):
    return CTDRCallback(memory_budget=budget, **grouped({"verbose": False, **options}))


def module():
    return parts.blobs(width=32)


def fit(chosen, *callbacks, **options):
    torch.manual_seed(0)
    return parts.fit(chosen, *callbacks, **{"max_epochs": 1, "limit_train_batches": 2, **options})


def n_factorized(chosen):
    return sum(isinstance(layer, FactorizedLayer) for layer in chosen.modules())


@pytest.fixture(scope="module")
def bounds():
    """Peak of a batch without a plan, and the least of the dense model."""
    made = callback(ROOM)
    fit(module(), made)
    return made.fit.dense_peak_bytes, plan(made.fit.plan.trace, Budget(seconds=math.inf)).peak_bytes


def test_with_room_the_run_is_the_plain_run_to_the_bit():
    plain, chosen, made = module(), module(), callback(ROOM)
    fit(plain, CTDRCallback(rank=None, policy="keep", verbose=False))
    fit(chosen, made)
    assert made.fit.is_dense
    assert made.fit.plan.keeps_all
    assert parts.same(plain.state_dict(), chosen.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize(("slowdown", "cut"), [(1.24, False), (3.0, True)])
def test_a_harmless_cut_takes_the_place_of_an_exact_plan_of_over_a_quarter_more_time(bounds, plans_take, slowdown, cut):
    plans_take(slowdown)
    chosen, made = module(), callback(sum(bounds) // 2)
    fit(chosen, made)
    assert n_factorized(chosen) == len(made.fit.choices.factorized)
    assert made.fit.is_dense is not cut
    assert made.fit.measured_slowdown == (0.5 if cut else slowdown)
    assert made.fit.options[0].model == "dense"
    assert sum(option.is_chosen for option in made.fit.options) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("harmless")
def test_the_page_of_a_run_that_was_cut_draws_the_dense_step_too(bounds, plans_take, tmp_path):
    plans_take(3.0)
    made = callback(sum(bounds) // 2)
    fit(module(), made, logger=CSVLogger(tmp_path))
    (page,) = tmp_path.rglob("report.html")
    memory = next(json.loads(found) for found in re.findall(r'(\{"curves".*?)</script>', page.read_text()))
    peaks = {curve["name"]: max(curve["ys"]) for curve in memory["curves"]}
    assert peaks["dense model"] == pytest.approx(made.fit.dense_peak_bytes, rel=1e-5)
    assert len(peaks) > 1


def test_no_cut_of_an_untrained_network_is_harmless(bounds, plans_take, monkeypatch):
    """Not even where the outputs say so; none is looked at."""
    monkeypatch.setattr(for_budget, "USUAL_SHARE", 1e9)
    plans_take(3.0)
    made = callback(sum(bounds) // 2)
    fit(module(), made)
    assert made.fit.is_dense
    assert [row.resource for row in made.fit.considered] == ["dense"]


def test_an_untrained_network_is_not_cut_however_slow_the_exact_plan(bounds, plans_take):
    plans_take(3.0)
    made = callback(sum(bounds) // 2)
    fit(module(), made)
    assert made.fit.is_dense


class Sorter(LightningModule):
    """The batch is most of its memory; ``loss`` takes logits and classes."""

    def __init__(self, loss=functional.cross_entropy, norm=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 4))
        self.loss = loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sort(chosen, *callbacks, batch_size=1024, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 64, generator=generator)
    rows = DataLoader(TensorDataset(x, x.argmax(1) % 4), batch_size=batch_size)
    torch.manual_seed(0)
    return parts.fit(chosen, *callbacks, data=(rows, None), **{"max_epochs": 1, **options})


def refused(chosen, **options):
    """A budget below all plans of all ranks."""
    with pytest.raises(InfeasibleBudgetError) as found:
        sort(chosen, callback(1024, rank="auto", **options))
    return found.value.least_peak_bytes


@pytest.mark.slow
def test_batches_run_in_parts_where_no_ranks_and_no_plan_fit(tmp_path):
    budget = round(0.6 * refused(Sorter()))
    plain, chosen, made = Sorter(), Sorter(), callback(budget)
    sort(plain, CTDRCallback(rank=None, policy="keep", verbose=False), max_epochs=2)
    peaks = Peaks()
    trainer = sort(chosen, made, peaks, max_epochs=2)
    assert n_factorized(chosen) == 0
    for name, weight in chosen.state_dict().items():
        assert torch.allclose(weight, plain.state_dict()[name], rtol=1e-4, atol=1e-6), name
    # before the first one the parts' memory is foreseen, with kernels of the processor on up to 32 MiB
    assert max(peaks.bytes[1:]) <= budget
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert CTDRCallback.from_checkpoint(tmp_path / "last.ckpt").options.sub_batches == "auto"
    sort(Sorter(), callback(budget), max_epochs=3, ckpt_path=tmp_path / "last.ckpt")


@pytest.fixture(scope="module")
def least():
    """The least peaks of the sorter's dense model, and of all cuts."""
    made = callback(ROOM, rounding=False)
    sort(Sorter(), made)
    return plan(made.fit.plan.trace, Budget(seconds=math.inf)).peak_bytes, refused(Sorter(), rounding=False)


class Wide(Sorter):
    """Weights and their gradients are most of its memory, which batches in parts do not divide."""

    def __init__(self):
        super().__init__()
        wide = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *wide, nn.Linear(256, 4))


@pytest.mark.slow
def test_batches_run_in_parts_rather_than_with_a_cut_that_loses_something(least, caplog):
    chosen, made = Sorter(), callback(sum(least) // 2, verbose=True)
    sort(chosen, made)
    assert n_factorized(chosen) == 0
    assert "No cut that loses next to nothing fits" in caplog.text


def selecting(logits, classes):
    return functional.cross_entropy(logits[classes >= 0], classes[classes >= 0])


@pytest.mark.slow
def test_batches_whose_loss_selects_by_values_run_in_parts_too(least, caplog):
    chosen = Sorter(loss=selecting)
    sort(chosen, callback(sum(least) // 2, verbose=True))
    assert n_factorized(chosen) == 0
    assert "batches run in parts" in caplog.text


def counting(logits, classes):
    """As many loops do: a loss is formatted, a metric validates its arguments, a number decides."""
    loss = functional.cross_entropy(logits, classes)
    multiclass_accuracy(logits, classes, num_classes=4)
    if not torch.isfinite(loss) or float(f"{loss:.3f}") < 0:
        raise ValueError("The loss is not finite.")
    return loss


def likelihood(logits, classes):
    return -Categorical(logits=logits).log_prob(classes).mean()


class Shifting(Sorter):
    """Draws as numbers."""

    def training_step(self, batch, batch_idx):
        x = batch[0].flip(1) if torch.rand(1) < 0.5 else batch[0]
        shift = int(torch.randint(0, 8, (1,)))
        return self.loss(self.net(x.roll(shift, 1)), batch[1])


class Emptying(Sorter):
    """Takes its batch apart."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch.pop(0), batch.pop(0)], batch_idx)


class Penalised(Sorter):
    """Asks for the gradient of its batch."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        logits = self.net(x)
        slopes = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)[0]
        return self.loss(logits, batch[1]) + slopes.square().sum(1).mean()


class Followed(Penalised):
    """Its batches require gradients when they come."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0].requires_grad_(), batch[1]]

    def training_step(self, batch, batch_idx):
        assert batch[0].requires_grad
        return super().training_step(batch, batch_idx)


class Lazy(Sorter):
    """Its first step alone sets a scale."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))
        self.seen = False

    def training_step(self, batch, batch_idx):
        if not self.seen:
            self.scale.fill_(2)
            self.seen = True
        return super().training_step([batch[0] * self.scale, batch[1]], batch_idx)


READING = {
    "metric": partial(Sorter, counting),
    "distribution": partial(Sorter, likelihood),
    "draws": Shifting,
    "empties": Emptying,
    "penalty": Penalised,
    "followed": Followed,
    "once": Lazy,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_batches_whose_step_reads_values_run_in_parts_too(least, caplog, name):
    chosen = READING[name]()
    sort(chosen, callback(sum(least) // 2, verbose=True))
    assert n_factorized(chosen) == 0
    assert "batches run in parts" in " ".join(caplog.text.split())


def test_of_an_untrained_network_no_cut_is_said_to_have_been_tried(least, caplog, monkeypatch):
    monkeypatch.setattr(Bench, "looks_untrained", True)
    sort(Sorter(), callback(sum(least) // 2, verbose=True))
    assert "No recomputation alone fits" in caplog.text
    assert "batches run in parts" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("harmless")
def test_a_harmless_cut_comes_before_batches_in_parts(least):
    chosen = Sorter()
    sort(chosen, callback(sum(least) // 2))
    assert n_factorized(chosen) > 0


@pytest.mark.slow
def test_layers_are_cut_where_batches_in_parts_do_not_fit_either():
    chosen, made = Wide(), callback("1.5MiB")
    sort(chosen, made, batch_size=64)
    assert n_factorized(chosen) > 0
    assert made.fit.untrained


def summed(logits, classes):
    return functional.cross_entropy(logits, classes, reduction="sum")


def noisy(logits, classes):
    return functional.cross_entropy(logits, classes) * (1 + random.SystemRandom().random())


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (partial(Sorter, norm=nn.BatchNorm1d), {"memory": {"batch_norm_in_parts": False}}),
        (partial(Sorter, loss=noisy), {}),
        (partial(Sorter, loss=summed), {}),
        (Sorter, {"max_slowdown": 1.5, "memory": {"rounding": False}}),
        (Sorter, {"select": "net.0", "memory": {"rounding": False}}),
    ],
)
def test_batches_that_may_not_run_in_parts_are_refused_with_the_least_peak(made, options):
    budget = round(0.6 * refused(made()))
    with pytest.raises(InfeasibleBudgetError, match="No ranks and plan fit"):
        sort(made(), callback(budget, **options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_slowdown": 1.5}, {"select": "net.0"}], ids=str)
def test_modules_run_in_tiles_where_an_argument_speaks_against_parts(options):
    made = callback(round(0.6 * refused(Sorter())), **options)
    sort(Sorter(), made)
    assert made.run.budget_fit.tiles
    assert made.run.memory.planner.lean_step.tiles == made.run.budget_fit.tiles
    assert made.run.memory.session.plan.peak_bytes <= made.run.memory.budget_bytes


@pytest.mark.slow
def test_layers_are_cut_where_no_exact_plan_fits(bounds):
    budget = round(0.9 * bounds[1])
    chosen, made = module(), callback(budget)
    fit(chosen, made)
    assert n_factorized(chosen) > 0
    assert made.run.memory.session.plan.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize("n_batches", [1, 4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 8))])
def test_a_chosen_budget_is_kept_with_accumulated_gradients(bounds, n_batches):
    """Gradients stay for the next batches, so the dense model needs more, and the choice counts that."""
    budget = round(0.9 * bounds[1])
    made = callback(budget, over_budget="raise")
    fit(module(), made, accumulate_grad_batches=n_batches, limit_train_batches=8, max_epochs=2)
    memory = made.run.memory
    assert made.fit.peak_bytes <= budget
    assert max(memory.rest_peak_bytes, *(plan.peak_bytes for plan in memory.session.plans)) <= budget
    assert made.run.steps.meters.measured.peak_bytes <= budget


@pytest.mark.parametrize(
    "options",
    [{"policy": "sqrt"}, {"offload": "disk"}, {"sub_batches": 1}, {"data": None}, {"rank": None}],
    ids=lambda options: next(iter(options)),
)
def test_beside_another_means_layers_stay_dense(options):
    chosen, made = module(), callback(ROOM, **options)
    fit(chosen, made)
    assert made.fit is None
    assert n_factorized(chosen) == 0
    assert made.run.memory.session is not None


def by_hand(chosen):
    chosen.automatic_optimization = False

    def training_step(batch):
        optimizer = chosen.optimizers()
        optimizer.zero_grad()
        chosen.manual_backward(nn.functional.cross_entropy(chosen(batch[0]), batch[1]))
        optimizer.step()

    chosen.training_step = training_step


def with_a_closure(chosen):
    chosen.configure_optimizers = lambda: torch.optim.LBFGS(chosen.parameters(), max_iter=2)


def with_kernels_of_other_bits(chosen):
    def never_the_same(_):
        raise ReplayError("A tensor came back with other contents.", "Hold it.")

    chosen.on_fit_start = lambda: vars(chosen).pop("training_step")
    chosen.training_step = never_the_same


@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize("change", [by_hand, with_a_closure, with_kernels_of_other_bits])
def test_where_no_choice_can_be_made_layers_stay_dense_and_training_goes_on(change, verbose, caplog):
    chosen, made = module(), callback(ROOM, verbose=verbose)
    change(chosen)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(chosen, made)
    assert n_factorized(chosen) == 0
    assert (
        any(text.startswith("CTDR: all layers stay dense: a choice of ranks ") for text in caplog.messages) is verbose
    )


@pytest.mark.parametrize(
    "options", [{"recovery": {"phases": [{"epochs": 1}]}}, {"max_loss": 0.1}, {"select": "net.*"}], ids=str
)
def test_where_an_argument_speaks_of_cuts_one_that_cannot_be_made_is_an_error(options):
    chosen = module()
    by_hand(chosen)
    with pytest.raises(ConfigError, match="needs automatic optimization"):
        fit(chosen, callback(ROOM, **options))


def test_a_pattern_that_names_no_layer_is_an_error():
    with pytest.raises(ConfigError, match="absent"):
        fit(module(), callback(ROOM, select="absent.*"))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_where_the_strategy_forbids_cuts_layers_stay_dense(start_method):
    made, strategy = callback(ROOM), DDPStrategy(start_method=start_method)
    trainer = parts.quiet_trainer(made, strategy=strategy, devices=2)
    made.setup(trainer, module(), "fit")
    assert not made.run.surgeon.decomposes


def test_where_another_callback_forbids_cuts_layers_stay_dense(caplog):
    plain, chosen, made = module(), module(), callback(ROOM, verbose=True)
    torch.manual_seed(0)
    parts.fit(plain, EMAWeightAveraging(), max_epochs=1, limit_train_batches=2)
    torch.manual_seed(0)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        parts.fit(chosen, EMAWeightAveraging(), made, max_epochs=1, limit_train_batches=2)
    assert made.fit is None
    assert any("stay dense: EMAWeightAveraging comes before" in text for text in caplog.messages)
    assert parts.same(plain.state_dict(), chosen.state_dict())


def test_recovery_without_a_cut_trains_the_plain_weights():
    plain, chosen, made = module(), module(), callback(ROOM, recovery={"phases": [{"epochs": 1}]})
    fit(plain, CTDRCallback(rank=None, policy="keep", verbose=False))
    fit(chosen, made)
    assert made.fit.is_dense
    assert parts.same(dict(plain.named_parameters()), dict(chosen.named_parameters()))


@pytest.mark.slow
def test_a_checkpoint_of_a_run_without_a_cut_gives_its_callback_and_its_model_back(tmp_path):
    whole, first, path = module(), module(), tmp_path / "one.ckpt"
    fit(whole, callback(ROOM), max_epochs=2)
    fit(first, callback(ROOM)).save_checkpoint(path)
    for again in (CTDRCallback.from_checkpoint(path), callback(ROOM)):
        resumed = module()
        fit(resumed, again, max_epochs=2, ckpt_path=path)
        assert parts.same(whole.state_dict(), resumed.state_dict())
    fresh = CTDRCallback.from_checkpoint(path, memory_budget="2GiB")
    fit(module(), fresh)
    assert fresh.run.surgeon.choices.factorized == {}
    assert parts.same(restore(module(), path).state_dict(), first.state_dict())


def test_the_callback_without_arguments_has_nothing_to_do():
    with pytest.raises(ConfigError, match="neither memory_budget nor rank is given") as error:
        CTDRCallback()
    assert error.value.hint == 'Write CTDRCallback(memory_budget="8GiB"), or CTDRCallback(rank=0.5).'


def test_the_opening_shows_the_options_and_how_to_choose_another(caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(module(), callback(ROOM, verbose=True))
    opening = next(text for text in caplog.messages if "loss (nats)" in text)
    assert max(map(len, opening.splitlines())) <= 100
    assert any(line.startswith(">  dense") for line in opening.splitlines())
    assert 'Others: rank="auto" looks for a harmless cut' in opening
    assert "whole model" not in opening  # no table of layers where none was cut


def linked(monkeypatch, bytes_per_s):
    """The disk has such a rate, as far as plans know."""
    monkeypatch.setattr(Places, "links", lambda places: [Link("disk", bytes_per_s, bytes_per_s)] * len(places.offload))


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize("over", ["raise", "auto"])
def test_tensors_wait_in_the_given_folder_rather_than_with_a_slow_plan_or_a_cut(
    bounds, plans_take, monkeypatch, tmp_path, caplog, over
):
    plans_take(3.0)
    linked(monkeypatch, 1e15)
    options = {"disk_folder": tmp_path, "over_budget": over, "verbose": True}
    plain, chosen, made, peaks = module(), module(), callback(sum(bounds) // 2, **options), Peaks()
    fit(plain, CTDRCallback(rank=None, policy="keep", verbose=False))
    fit(chosen, made, peaks)
    assert "tensors that do not fit wait off the device" in " ".join(caplog.text.split())
    assert made.run.memory.session.plan.away
    assert max(peaks.bytes[1:]) <= sum(bounds) // 2
    assert parts.same(plain.state_dict(), chosen.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize("folder", [True, False])
def test_over_a_slow_link_or_without_a_folder_a_harmless_cut_is_taken(
    bounds, plans_take, monkeypatch, tmp_path, folder
):
    plans_take(3.0)
    linked(monkeypatch, 1e3)
    chosen, made = module(), callback(sum(bounds) // 2, **({"disk_folder": tmp_path} if folder else {}))
    fit(chosen, made)
    assert n_factorized(chosen) == len(made.fit.choices.factorized) > 0


@pytest.mark.parametrize("slowdown", [1.1, 9.0])
def test_parts_come_before_tensors_that_wait_for_long(least, monkeypatch, tmp_path, slowdown):
    monkeypatch.setattr(SpareMeans, "_fitting", lambda *_: {ELSEWHERE: slowdown})
    chosen, made = Sorter(), callback(sum(least) // 2, disk_folder=tmp_path)
    sort(chosen, made)
    assert n_factorized(chosen) == 0
    assert made.run.memory.offloads is (slowdown < 2)


def test_places_that_a_run_may_turn_to(tmp_path):
    def places(device, **options):
        found = callback(ROOM, **options).options.elsewhere(device)
        return found and (found.rank, found.offload)

    assert places("cuda") == (None, ["host"])
    assert places("cuda", disk_folder=tmp_path) == (None, ["host", "disk"])
    assert places("cpu", disk_folder=tmp_path) == (None, ["disk"])
    assert places("cpu") is None
    assert places("cuda", select="net.*") is None
    assert places("cuda", max_slowdown=1.5) is None
    assert places("cuda", rank="auto") is None
    with pytest.raises(ConfigError, match="without offload"):
        callback(ROOM, rank=None, disk_folder=tmp_path)
