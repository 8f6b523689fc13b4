"""``rank="auto"``: chosen before training, the same on every rank, saved, resumed to the bit. Time limits are wide."""

import pytest
import torch

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.decomposition import Choices, FactorizedLayer
from ctdr_lightning.joint import pricing, search
from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from tests import forks, parts

BUDGET = 800_000


@pytest.fixture(autouse=True)
def short_thoughts(monkeypatch):
    for module in (pricing, search):
        monkeypatch.setattr(module, "PLANNING_S", 0.1)


def automatic(budget=BUDGET, **options):
    return CTDRCallback(rank="auto", memory_budget=budget, **{"max_slowdown": 50.0, "verbose": False, **options})


def module():
    return parts.blobs(width=32)


def n_factorized(module):
    return sum(isinstance(layer, FactorizedLayer) for layer in module.modules())


def test_layers_are_cut_to_what_the_budget_asks_for_and_the_optimizer_owns_them():
    chosen, callback = module(), automatic()
    trainer = parts.fit(chosen, callback, max_epochs=1)
    assert callback.fit.budget_bytes == BUDGET
    assert callback.fit.peak_bytes <= BUDGET
    assert n_factorized(chosen) == len(callback.fit.choices.factorized) > 0
    assert callback.run.memory.session.plan.peak_bytes <= BUDGET
    owned = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert owned == {id(p) for p in chosen.parameters()}


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
    assert peaks[0] - peaks[1] == copied + copied // 8 > 0


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
        parts.fit(chosen, automatic(1000))
    assert parts.same(before, dict(chosen.state_dict()))


def test_arguments_that_say_nothing_are_refused():
    with pytest.raises(ConfigError, match="needs data"):
        automatic(data=None)
    with pytest.raises(ConfigError, match="max_loss"):
        CTDRCallback(rank=0.5, max_loss=0.1)
    with pytest.raises(ConfigError, match="max_loss"):
        automatic(max_loss=-1.0)


@pytest.mark.slow
def test_two_ranks_train_the_layers_and_factors_that_rank_0_chose(tmp_path):
    def train(folder):
        torch.manual_seed(parts.rank())
        chosen, callback = module(), automatic()
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
            parts.fit(module(), automatic(1000), strategy="ddp", devices=2, max_epochs=1)
        (folder / str(parts.rank())).touch()

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_module_that_optimizes_by_hand_is_told_what_to_do():
    chosen = module()
    chosen.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic optimization"):
        parts.fit(chosen, automatic())
