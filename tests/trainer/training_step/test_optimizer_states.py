"""A Trainer whose optimizer's state waits on a disk: the plain run's weights to the bit, under a smaller budget."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory.holders import HolderOptions, Holders
from ctdr_lightning.memory.holders.optimizer_bytes import predict
from ctdr_lightning.memory.holders.optimizer_state import StateAway, state_away_of
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.training_step.optimizer.resident import state_bytes
from tests import parts

WIDTH, DEPTH = 512, 24  # a layer of 1 MiB


class Wide(LightningModule):
    """Weights, gradients and Adam's state of 96 MiB; activations are nothing beside them."""

    def __init__(self, kind=torch.optim.Adam):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def training_step(self, batch):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=1e-3, foreach=False)


def data():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(12, WIDTH)), batch_size=2)


def fit(callback, folder, module=None, **options):
    torch.manual_seed(2)
    module = module or Wide()
    callbacks = [callback] if callback is not None else []
    saves = ModelCheckpoint(folder, save_last=True, save_top_k=0)
    defaults = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=[*callbacks, saves], accelerator="cpu", **{**defaults, **options})
    trainer.fit(module, data(), ckpt_path=options.pop("ckpt_path", None))
    return module, trainer


def ctdr(**options):
    return CTDRCallback(rank=None, verbose=False, **grouped({"retry_on_oom": False, **options}))


@pytest.mark.slow
def test_weights_gradients_and_state_above_the_budget_train_under_it_to_the_bit(tmp_path):
    plain, usual = fit(None, tmp_path / "plain")
    budget = 64 * 2**20
    total = 4 * sum(4 * p.numel() for p in plain.parameters())
    assert total > 1.4 * budget
    with pytest.raises(InfeasibleBudgetError, match=r"optimizer_state='disk'\), with which it takes"):
        fit(ctdr(memory_budget=budget), tmp_path / "refused")
    callback = ctdr(memory_budget=budget, optimizer_state="disk", disk_folder=tmp_path)
    moved, trainer = fit(callback, tmp_path / "moved")
    assert parts.same(plain.state_dict(), moved.state_dict())
    assert parts.same(usual.optimizers[0].state_dict(), trainer.optimizers[0].state_dict())
    saved = [torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("plain", "moved")]
    assert parts.same(saved[0]["optimizer_states"], saved[1]["optimizer_states"])
    assert state_away_of(trainer.optimizers[0]) is None


class AfterBatch(Callback):
    def __init__(self, meter):
        self.meter, self.peaks = meter, []

    def on_train_batch_end(self, trainer, module, *_):
        self.peaks.append(self.meter.live.peak)


@pytest.mark.slow
def test_every_batch_keeps_the_budget(tmp_path):
    budget, module = 64 * 2**20, Wide()
    callback = ctdr(memory_budget=budget, optimizer_state="disk", disk_folder=tmp_path)
    with PeakMeter() as meter:
        batches = AfterBatch(meter)
        Trainer(
            callbacks=[callback, batches], max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, accelerator="cpu",
        ).fit(module, data())  # fmt: skip
    assert len(batches.peaks) == 6
    weights = sum(p.nbytes for p in module.parameters())
    assert 1.5 * weights < weights + batches.peaks[-1] <= budget


@pytest.mark.slow
def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    whole, _ = fit(ctdr(optimizer_state="disk"), tmp_path / "whole")
    fit(ctdr(optimizer_state="disk"), tmp_path / "half", max_epochs=1)
    module = Wide()
    torch.manual_seed(2)
    trainer = Trainer(
        callbacks=[ctdr(optimizer_state="disk")], max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(module, data(), ckpt_path=tmp_path / "half" / "last.ckpt")
    assert parts.same(whole.state_dict(), module.state_dict())


def test_what_a_step_takes_is_predicted(tmp_path):
    module = Wide()
    optimizer = module.configure_optimizers()
    plain = predict([optimizer])
    holders = Holders(HolderOptions(folder=tmp_path))
    StateAway(optimizer, holders["disk"])
    away = predict([optimizer])
    layer = 4 * WIDTH * WIDTH
    assert plain.state >= 8 * layer
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert away.state == holders["disk"].device_bytes + state_bytes([optimizer])
    with PeakMeter() as meter:
        optimizer.step()
    assert 0.9 * away.temporary <= meter.live.peak <= away.temporary
    holders.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_state": "tape"}, "holder 'tape' is not known"),
        ({"optimizer_state": "host"}, "optimizer_state='host': the steps run on 'cpu'"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        fit(ctdr(**options), tmp_path)


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(tmp_path):
    module = Wide(lambda p, lr, foreach: torch.optim.LBFGS(p, lr=lr))
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(ctdr(optimizer_state="disk"), tmp_path, module)
