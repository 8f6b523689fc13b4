"""``rank="auto"``: chosen before training, the same on every rank, saved, resumed to the bit. Time limits are wide."""

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from ctdr_lightning import CTDRCallback, Ranks
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.decomposition import Choices, FactorizedLayer
from ctdr_lightning.memory.account.batch import with_room
from ctdr_lightning.trainer.fake_trainer import attach_fake_trainer
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from tests import forks, parts

BUDGET = 800_000


def automatic(budget=BUDGET, **options):
    given = {"rank": "auto", "max_slowdown": 50.0, "verbose": False, **options}
    return CTDRCallback(budget, **grouped(given))


def module():
    return parts.blobs(width=32)


def n_factorized(module):
    return sum(isinstance(layer, FactorizedLayer) for layer in module.modules())


@pytest.mark.slow
def test_layers_are_cut_to_what_the_budget_asks_for_and_the_optimizer_owns_them():
    chosen, callback = module(), automatic()
    trainer = parts.fit(chosen, callback, max_epochs=1)
    assert callback.fit.budget_bytes == BUDGET
    assert callback.fit.peak_bytes <= BUDGET
    assert n_factorized(chosen) == len(callback.fit.choices.factorized) > 0
    assert callback.run.memory.session.plan.peak_bytes <= BUDGET
    owned = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert owned == {id(p) for p in chosen.parameters()}


class LogsItsRate(parts.Blobs):
    """Asks for its optimizer in each step, as those do that log the learning rate."""

    waits = False

    def training_step(self, batch, batch_idx):
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        if self.waits and not self.trainer.training:
            raise RuntimeError("asked before training")
        return super().configure_optimizers()


@pytest.mark.slow
def test_a_step_that_asks_for_its_optimizer_is_tried():
    chosen, callback = LogsItsRate(width=32), automatic()
    parts.fit(chosen, callback, max_epochs=1)
    assert n_factorized(chosen) > 0


@pytest.mark.parametrize("waits", [False, True])
def test_the_command_finds_the_optimizer_of_a_step(waits):
    asked = LogsItsRate(width=32)
    asked.waits = waits
    attach_fake_trainer(asked)
    asked.trainer.training = not waits
    assert asked.optimizers().param_groups[0]["params"]


@pytest.mark.slow
def test_a_large_weight_that_no_layer_kind_covers_is_named(caplog):
    chosen = module()
    chosen.experts = torch.nn.Parameter(torch.randn(4, 16, 16))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        parts.fit(chosen, automatic(verbose=True), max_epochs=1, limit_train_batches=1)
    opening = next(text for text in caplog.messages if "whole model" in text)
    assert "experts (4 x 16 x 16, " in opening
    assert "stays: no layer kind covers it" in opening


def test_the_copies_of_a_retry_count_in_what_is_chosen():
    peaks = []
    for retries in (True, False):
        callback = automatic("1GiB", retry_on_oom=retries)
        parts.fit(module(), callback, max_epochs=1, limit_train_batches=1)
        peaks.append(callback.fit.dense_peak_bytes)
    batch = next(iter(parts.loaders()[0]))
    copied = sum(t.nbytes for t in (*module().buffers(), *batch) if t.numel() <= SMALL_ELEMENTS)
    state = torch.get_rng_state().nbytes if torch.get_default_device().type == "cpu" else 0
    assert peaks[0] - peaks[1] == with_room(copied + state) > 0


def test_a_run_that_may_stay_dense_is_the_plain_run_to_the_bit():
    plain, chosen = module(), module()
    torch.manual_seed(0)
    parts.fit(plain)
    callback = automatic("1GiB")
    torch.manual_seed(0)
    parts.fit(chosen, callback)
    assert callback.fit.is_dense
    assert n_factorized(chosen) == 0
    assert parts.same(plain.losses, chosen.losses)
    assert parts.same(plain.state_dict(), chosen.state_dict())


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    whole, first = module(), module()
    torch.manual_seed(0)
    parts.fit(whole, automatic(), max_epochs=2)
    torch.manual_seed(0)
    trainer = parts.fit(first, automatic(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = module()
    parts.fit(second, automatic(), max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert parts.same(whole.state_dict(), second.state_dict())
    again = CTDRCallback.from_checkpoint(tmp_path / "one.ckpt")
    assert set(again.options.choices.factorized) == set(first_choices(first))


def first_choices(module):
    return [name for name, layer in module.named_modules() if isinstance(layer, FactorizedLayer)]


def test_what_cannot_be_met_stops_before_training_and_leaves_the_model_alone():
    chosen = module()
    before = {name: tensor.clone() for name, tensor in chosen.state_dict().items()}
    with pytest.raises(InfeasibleBudgetError, match="least peak found"):
        parts.fit(chosen, automatic(1024))
    assert parts.same(before, dict(chosen.state_dict()))


def test_arguments_that_say_nothing_are_refused():
    with pytest.raises(ConfigError, match="needs data"):
        automatic(data=None)
    with pytest.raises(ConfigError, match="max_loss"):
        CTDRCallback(rank=0.5, ranks=Ranks(max_loss=0.1))
    with pytest.raises(ConfigError, match="max_loss"):
        automatic(max_loss=-1.0)


def metric_fit(metric, budget=BUDGET, **options):
    chosen, callback = module(), automatic(budget, max_loss=0.5, metric=metric)
    trainer = parts.fit(chosen, callback, max_epochs=1, limit_train_batches=1, **options)
    return trainer, callback


@pytest.mark.slow
def test_a_torchmetric_bounds_what_the_ranks_cost_and_stays_as_it_is(tmp_path):
    metric = MulticlassAccuracy(4, average="micro")
    trainer, callback = metric_fit(metric)
    found = callback.fit.metric
    assert (found.name, found.allowed) == ("MulticlassAccuracy", 0.5)
    assert found.drop <= 0.5
    assert metric.update_count == 0
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = CTDRCallback.from_checkpoint(tmp_path / "one.ckpt")
    assert again.options.metric is again.options.max_loss is None  # its choices stand; a name is no metric
    assert callback.options.to_dict()["metric"] == "MulticlassAccuracy"


def test_a_function_is_given_the_module_and_the_batch_as_validation_has_them():
    seen = []

    def right(model, batch):
        seen.append((type(model).__name__, model.training, model.trainer.max_epochs, len(batch)))
        return (model(batch[0]).argmax(1) == batch[1]).float().mean()

    callback = metric_fit(right, "1GiB")[1]
    assert callback.fit.metric.name == "right"
    assert set(seen) == {("Blobs", False, 1, 2)}


def test_opening_and_closing_account_name_the_metric(caplog):
    callback = automatic("1GiB", max_loss=0.5, metric=MulticlassAccuracy(4), verbose=True)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        parts.fit(module(), callback, max_epochs=1, limit_train_batches=1)
    text = " ".join(" ".join(caplog.messages).split())
    assert "In the metric: MulticlassAccuracy" in text
    assert "Measured before training: x1.00 of the dense step's time; MulticlassAccuracy" in text
    assert "0.0000 worse (0.5 allowed)" in text


def test_a_metric_that_fails_stops_before_training():
    with pytest.raises(ConfigError, match="MulticlassAccuracy cannot be measured"):
        metric_fit(MulticlassAccuracy(3))
    with pytest.raises(ConfigError, match="without max_loss"):
        automatic(metric=MulticlassAccuracy(4))
    with pytest.raises(ConfigError, match=r"max_loss=0\.1 bounds the choice of ranks"):
        CTDRCallback(rank=0.5, ranks=Ranks(max_loss=0.1, metric=MulticlassAccuracy(4)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_loss": 0.5, "metric": MulticlassAccuracy(4)}], ids=["loss", "metric"])
def test_two_ranks_train_the_layers_and_factors_that_rank_0_chose(tmp_path, options):
    def train(folder):
        torch.manual_seed(parts.rank())
        chosen, callback = module(), automatic(**options)
        trainer = parts.fit(chosen, callback, strategy="ddp", devices=2, max_epochs=1)
        kept = {"choices": callback.run.surgeon.choices.to_dict(), "weights": chosen.state_dict()}
        kept["peak"] = callback.run.memory.session.plan.peak_bytes
        torch.save(kept, folder / f"{trainer.global_rank}.pt")

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert Choices.from_dict(first["choices"]).factorized
    assert first["choices"] == second["choices"]
    assert parts.same(first["weights"], second["weights"])
    assert max(first["peak"], second["peak"]) <= BUDGET


def test_a_budget_that_cannot_be_met_stops_every_rank(tmp_path):
    def train(folder):
        with pytest.raises(InfeasibleBudgetError, match="least peak found"):
            parts.fit(module(), automatic(1024), strategy="ddp", devices=2, max_epochs=1)
        (folder / str(parts.rank())).touch()

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_module_that_optimizes_by_hand_is_told_what_to_do():
    chosen = module()
    chosen.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic optimization"):
        parts.fit(chosen, automatic())


def test_an_optimizer_that_runs_the_step_itself_is_refused_in_a_sentence():
    class Closures(parts.Blobs):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="a choice of ranks cannot price LBFGS, which runs the step itself") as caught:
        parts.fit(Closures(), automatic())
    assert "rank=0.5" in caught.value.hint


def test_an_error_of_ours_in_the_data_is_quoted_in_a_sentence():
    class Lacking(parts.Blobs):
        def train_dataloader(self):
            raise ConfigError("data.root='x' has no folder 'train'.", "Point it elsewhere.")

    with pytest.raises(ConfigError) as caught:
        parts.fit(Lacking(), automatic(), data=(None, None))
    assert "cannot be loaded yet (data.root='x' has no folder 'train')." in caught.value.problem
    assert "HINT" not in caught.value.problem
