"""The data that a run draws: resumed in any epoch under reloaded loaders, and after a tuner's trial steps."""

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback
from tests import parts

N_EPOCHS = 6


class Reloading(parts.Blobs):
    """Makes its loaders itself, and notes the epochs in which it does."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size, self.reloaded = 1e-3, 4, []

    def train_dataloader(self):
        self.reloaded.append(self.trainer.current_epoch)
        return DataLoader(parts.images(), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(parts.images(16, seed=1), 8)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


def run(*callbacks, seed=0, **options):
    parts.seed_everything(seed, verbose=False)
    module = Reloading()
    trainer = parts.quiet_trainer(*callbacks, max_epochs=N_EPOCHS, **options)
    return module, trainer


def ours():
    return CTDRCallback(rank=None, policy="sqrt", verbose=False)


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 3])
def test_a_resumed_run_draws_the_order_of_the_undisturbed_one(tmp_path, every):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, trainer = run(ours(), saver, reload_dataloaders_every_n_epochs=every, enable_checkpointing=True)
    trainer.fit(whole)
    for epoch in range(N_EPOCHS - 1):
        again, trainer = run(ours(), seed=epoch + 5, reload_dataloaders_every_n_epochs=every)
        trainer.fit(again, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert parts.same(again.state_dict(), whole.state_dict()), epoch
        assert again.reloaded[1:] == [e for e in whole.reloaded if e > epoch]
        assert trainer.reload_dataloaders_every_n_epochs == every


TUNERS = {
    "batch size": lambda: BatchSizeFinder(max_trials=2, steps_per_trial=1),
    "learning rate": lambda: LearningRateFinder(num_training_steps=5, min_lr=1e-4),
}


@pytest.mark.parametrize("tuner", TUNERS)
def test_what_follows_a_tuner_is_what_follows_it_without_us(tmp_path, tuner):
    ends = []
    for callbacks in ([], [ours()]):
        module, trainer = run(*callbacks, TUNERS[tuner](), default_root_dir=tmp_path)
        trainer.fit(module)
        ends.append((module.state_dict(), module.batch_size, module.lr))
    assert parts.same(*ends)
