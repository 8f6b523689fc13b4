from functools import partial

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_recipes.classifier import Classifier, cnn
from ctdr_recipes.measure import training_tensors
from ctdr_recipes.meter import StepMeter


def _fit(meter, batch_size):
    torch.manual_seed(0)
    data = DataLoader(
        TensorDataset(torch.randn(10 * batch_size, 1, 8, 8), torch.zeros(10 * batch_size).long()), batch_size
    )
    model = Classifier(cnn([8], [1]), 10, partial(torch.optim.Adam, lr=0.01))
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[meter], logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return trainer


def test_times_only_the_batches_asked_for():
    meter = StepMeter(first_batch=2, n_batches=5)
    _fit(meter, 4)
    assert len(meter.seconds) == 5
    assert all(seconds > 0 for seconds in meter.seconds)
    assert meter.memory is None


def test_the_curve_ends_with_what_training_leaves_and_peaks_above_it():
    meter = StepMeter(first_batch=2, n_batches=4, profile=True)
    trainer = _fit(meter, 64)
    left = storage_bytes(training_tensors(trainer.lightning_module, trainer.optimizers[0]))
    assert meter.seconds == []
    assert meter.memory.live_bytes[-1] == pytest.approx(left, rel=0.05, abs=80_000)
    activation = 64 * 8 * 8 * 8 * 4
    assert meter.memory.peak_bytes > left + 2 * activation


def test_activations_grow_with_the_batch_and_weights_do_not():
    peaks = []
    for batch_size in (32, 128):
        meter = StepMeter(first_batch=2, n_batches=4, profile=True)
        _fit(meter, batch_size)
        peaks.append(meter.memory.peak_bytes)
    assert 3 < peaks[1] / peaks[0] < 4.2
