import os
import signal
from functools import partial

import pytest
import torch
from lightning import Callback, Trainer
from torch.utils.data import DataLoader, TensorDataset

from recipes.classifier import Classifier, cnn
from recipes.preemption import PreemptionCheckpoint


class Requeued(Exception):
    pass


class Preempt(Callback):
    """Signals this process in the middle of a batch, as a cluster would."""

    def __init__(self, batch_idx):
        self.batch_idx = batch_idx

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.batch_idx:
            os.kill(os.getpid(), signal.SIGUSR2)


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


def _fit(tmp_path, *callbacks, ckpt_path=None):
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 2), 4)
    model = Classifier(cnn([4], [2], n_classes=2), 2, partial(torch.optim.AdamW, lr=0.01))
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def test_the_batch_is_finished_saved_and_handed_to_the_launcher(tmp_path, launcher):
    requeue, calls = launcher
    path = tmp_path / "last.ckpt"
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(path)), Preempt(3))
    assert calls == [signal.SIGUSR2]
    assert torch.load(path, weights_only=True)["global_step"] == 4
    assert signal.getsignal(signal.SIGUSR2) is requeue


def test_a_run_requeued_between_epochs_ends_as_if_never_interrupted(tmp_path, launcher):
    path = tmp_path / "last.ckpt"
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(path)), Preempt(7))
    resumed = _fit(tmp_path, ckpt_path=str(path))
    straight = _fit(tmp_path)
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_requeued_within_an_epoch_does_the_steps_that_were_left(tmp_path, launcher):
    path = tmp_path / "last.ckpt"
    with pytest.raises(Requeued):
        _fit(tmp_path, PreemptionCheckpoint(str(path)), Preempt(5))
    assert _fit(tmp_path, ckpt_path=str(path)).trainer.global_step == 16


def test_without_a_signal_nothing_is_written_and_the_handler_is_put_back(tmp_path, launcher):
    requeue, calls = launcher
    path = tmp_path / "last.ckpt"
    _fit(tmp_path, PreemptionCheckpoint(str(path)))
    assert not path.exists()
    assert not calls
    assert signal.getsignal(signal.SIGUSR2) is requeue


def test_an_unknown_signal_is_refused_at_once():
    with pytest.raises(KeyError):
        PreemptionCheckpoint("last.ckpt", signal_name="SIGNONE")
