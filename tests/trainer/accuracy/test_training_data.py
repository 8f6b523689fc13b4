"""Ranks chosen by training data, inside a fit."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import BatchSampler, DataLoader

from ctdr_lightning import CTDRCallback, Ranks
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose import batches
from ctdr_lightning.trainer.accuracy import rehearsal
from ctdr_lightning.trainer.groups import grouped
from tests import forks, parts


class Watch(Callback):
    """Notes the random state and the first weights that training finds."""

    def on_train_start(self, trainer, pl_module):
        self.random = torch.get_rng_state()
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch[0].sum())


def run(module=None, watch=None, **options):
    callback = CTDRCallback(**grouped({"rank": 0.4, "policy": "keep", "verbose": False, **options}))
    parts.fit(module or parts.blobs(), callback, *([watch] if watch else []), max_epochs=1)
    return callback.run.surgeon.report


def test_the_default_looks_at_training_batches():
    report = run()
    assert report.divergence >= 0
    kept = sum(row.parameters_after for row in report) / sum(row.parameters_before for row in report)
    assert kept < 0.45


def test_no_more_batches_are_moved_to_the_device_than_are_used(monkeypatch):
    monkeypatch.setattr(batches, "_MOST_ELEMENTS", 10)
    drawn, draw = [], rehearsal.training_batches

    def counted(*args):
        for batch in draw(*args):
            drawn.append(batch)
            yield batch

    monkeypatch.setattr(rehearsal, "training_batches", counted)
    run()
    assert len(drawn) == 1


def test_no_random_state_moves_and_no_batch_is_lost():
    first, second = Watch(), Watch()
    run(watch=first)
    run(watch=second, data=None)
    assert torch.equal(first.random, second.random)
    assert parts.same(first.seen, second.seen)


def test_the_module_s_own_logs_and_modes_are_left_alone():
    module = parts.blobs()
    run(module)
    assert len(module.losses) == 4  # one a training batch, none of the steps that were tried
    assert "training_step" not in vars(module)


def test_a_share_that_the_model_misses_is_said_with_what_stays():
    module = parts.blobs()
    module.experts = torch.nn.Parameter(torch.randn(4, 16, 16))
    notes = run(module).notes()
    assert notes[0].startswith("rank=0.4 was requested")
    assert notes[1].startswith("experts (4 x 16 x 16, ")


class NeedsSetup(parts.Blobs):
    """Its loader exists only after its own setup, which runs after every callback's."""

    def setup(self, stage):
        self.data = parts.loaders()[0]

    def train_dataloader(self):
        return self.data


class Refuses(parts.Blobs):
    def training_step(self, batch, batch_idx):
        assert hasattr(self, "trained"), "only a real step may run"
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.trained = True


@pytest.mark.parametrize(("kind", "why"), [(NeedsSetup, "cannot be loaded yet"), (Refuses, "only a real step")])
def test_where_the_data_cannot_be_had_the_weights_decide_and_it_is_said(kind, why):
    callback = CTDRCallback(rank=0.4, policy="keep", verbose=False)
    trainer = parts.quiet_trainer(callback, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(), *(() if kind is NeedsSetup else parts.loaders()))
    assert any(why in str(warning.message) for warning in caught)
    assert callback.run.surgeon.report.factorized
    assert trainer.state.status == "finished"


def test_a_loader_that_fails_in_setup_leaves_the_classes_of_loaders_as_they_are():
    kinds = (DataLoader, BatchSampler)
    before = [dict(vars(kind)) for kind in kinds]
    with pytest.warns(UserWarning, match="cannot be loaded yet"):
        parts.quiet_trainer(CTDRCallback(rank=0.4, policy="keep", verbose=False), max_epochs=1).fit(NeedsSetup())
    assert [dict(vars(kind)) for kind in kinds] == before
    assert len(parts.quiet_trainer().predict(parts.blobs(), parts.loaders()[1])) == 2


def test_data_that_are_insisted_on_and_missing_are_an_error():
    callback = CTDRCallback(rank=0.4, ranks=Ranks(allocate="loss"), policy="keep", verbose=False)
    with pytest.raises(ConfigError, match="needs training data"):
        parts.quiet_trainer(callback, max_epochs=1).fit(NeedsSetup())


class Data(LightningDataModule):
    def setup(self, stage):
        self.train = parts.loaders()[0]

    def train_dataloader(self):
        return self.train


def test_a_data_module_serves():
    callback = CTDRCallback(rank=0.4, policy="keep", verbose=False)
    parts.quiet_trainer(callback, max_epochs=1).fit(parts.blobs(), datamodule=Data())
    assert callback.run.surgeon.report.divergence >= 0


class Gathers(parts.Blobs):
    """Its step asks the other ranks."""

    def training_step(self, batch, batch_idx):
        everyone = self.all_gather(batch[1])
        assert everyone.shape[-1] == len(batch[1])
        return super().training_step(batch, batch_idx)


def test_two_ranks_train_the_factors_that_rank_0_found(tmp_path):
    def train(folder):
        torch.manual_seed(parts.rank())
        module = Gathers()
        callback = CTDRCallback(rank=0.4, policy="keep", verbose=False)
        trainer = parts.fit(module, callback, strategy="ddp", devices=2, max_epochs=1)
        torch.save([callback.run.surgeon.choices.to_dict(), module.state_dict()], folder / f"{trainer.global_rank}.pt")

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert parts.same(first, second)


@pytest.mark.parametrize(
    "arguments",
    [{"data": "test"}, {"data": 3}, {"allocate": "loss", "data": None}, {"allocate": "parametres"}, {"allocate": 3}],
)
def test_arguments_that_cannot_be_used(arguments):
    with pytest.raises(ConfigError) as caught:
        CTDRCallback(rank=0.5, **grouped(arguments))
    assert caught.value.hint


def test_frozen_layers_are_chosen_too():
    module = parts.blobs()
    module.net[0].requires_grad_(False)
    module.net[3].requires_grad_(False)
    assert run(module).divergence >= 0
    frozen = list(module.net[3].parameters())
    assert not any(p.requires_grad for p in frozen)
