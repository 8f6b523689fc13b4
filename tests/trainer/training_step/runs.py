"""Short runs, with their losses, true peaks and events."""

import torch

from ctdr_lightning.trainer.reports.event_words import words_of
from tests.parts import fit
from tests.trainer.true_peaks import Peaks


def one_epoch(module, data, *callbacks, **options):
    """The trained module, its losses, and the peaks of its batches."""
    peaks = Peaks()
    fit(module, *callbacks, peaks, data=(data, None), max_epochs=1, limit_val_batches=0, **options)
    return module, torch.stack(module.losses), peaks


def events_of(callback):
    return [words_of(event) for event in callback.run.memory.session.events]
