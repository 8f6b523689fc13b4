import os
import signal
from functools import partial

import pytest
import torch
from lightning import Callback, Trainer
from torch.utils.data import TensorDataset

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.classifier import Classifier, cnn
from ctdr_recipes.preemption import PreemptionCheckpoint
from ctdr_recipes.resume import ResumableLoader


class Requeued(Exception):
    pass


class Preempt(Callback):
    """Signals this process in the middle of a batch, as a cluster would."""

    number = signal.SIGUSR2

    def __init__(self, batch_idx):
        self.batch_idx = batch_idx

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.batch_idx:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def launcher():
    """The handler a launcher installs: it notes the call and ends the process (here: the fit)."""
    calls = []

    def requeue(number, frame):
        calls.append(number)
        raise Requeued

    before = signal.signal(signal.SIGUSR2, requeue)
    yield requeue, calls
    signal.signal(signal.SIGUSR2, before)


def _fit(tmp_path, *callbacks, ckpt_path=None, validates=False):
    torch.manual_seed(0)
    data = ResumableLoader(TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 2), 4)
    model = Classifier(cnn([4], [2], n_classes=2), 2, partial(torch.optim.AdamW, lr=0.01))
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, data, data if validates else None, ckpt_path=ckpt_path)
    return model


def test_the_batch_is_finished_saved_and_handed_to_the_launcher(tmp_path, launcher):
    requeue, calls = launcher
    path = tmp_path / "last.ckpt"
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(path)), Preempt(3))
    assert calls == [signal.SIGUSR2]
    assert torch.load(path, weights_only=True)["global_step"] == 4
    assert signal.getsignal(signal.SIGUSR2) is requeue


@pytest.mark.parametrize("step", [5, 7])
def test_a_requeued_run_ends_as_if_never_interrupted(tmp_path, launcher, step):
    path = tmp_path / "last.ckpt"
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(path)), Preempt(step))
    resumed = _fit(tmp_path, ckpt_path=str(path))
    straight = _fit(tmp_path)
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_a_signal_nothing_is_written_and_the_handler_is_put_back(tmp_path, launcher):
    requeue, calls = launcher
    path = tmp_path / "last.ckpt"
    _fit(tmp_path, PreemptionCheckpoint(str(path)))
    assert not path.exists()
    assert not calls
    assert signal.getsignal(signal.SIGUSR2) is requeue


def test_an_unknown_signal_is_refused_at_once():
    with pytest.raises(ConfigError, match="SIGNONE"):
        PreemptionCheckpoint("last.ckpt", signal_names=["SIGNONE"])


class SignalInValidation(Callback):
    """Signals this process in the middle of an epoch's validation."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.current_epoch == self.epoch and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_signal_in_a_validation_is_seen_after_it(tmp_path, launcher, epoch):
    path = tmp_path / "last.ckpt"
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(path)), SignalInValidation(epoch), validates=True)
    assert launcher[1] == [signal.SIGUSR2]
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == (9 if epoch == 0 else 16)
    resumed = _fit(tmp_path, ckpt_path=str(path), validates=True)
    assert resumed.trainer.global_step == 16


class Terminate(Preempt):
    """The signal with which SLURM ends a job."""

    number = signal.SIGTERM


def test_the_end_of_a_job_is_handed_to_the_launcher_that_queues(tmp_path, launcher):
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(tmp_path / "last.ckpt")), Terminate(3))
    assert launcher[1] == [signal.SIGUSR2]


def test_without_a_launcher_the_end_of_a_job_ends_the_run_after_it_is_saved(tmp_path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(SystemExit) as ended:
        _fit(tmp_path, PreemptionCheckpoint(str(path)), Terminate(3))
    assert ended.value.code == 128 + signal.SIGTERM
    assert torch.load(path, weights_only=True)["global_step"] == 4
