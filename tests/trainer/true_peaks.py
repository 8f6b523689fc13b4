"""True peaks of batches, counted apart from the engine, and the budgets that errors name."""

import re

import torch
from lightning.pytorch import Callback

from ctdr_lightning.basics.units import parse_bytes
from ctdr_lightning.memory.values.live_bytes import PeakMeter


def tensors_in(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_in(each)


def gradients_of(module):
    """Outside of the callback: one that reads gradients keeps the optimizer's step out of the backward."""
    return [p.grad for p in module.parameters() if p.grad is not None]


class Peaks(Callback):
    """Each batch's true peak, counted apart from the engine: what stands before it, and all that is made meanwhile."""

    def __init__(self):
        self.bytes, self.meter = [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.leave()  # a batch may end the epoch before it runs
        self.standing = sum(t.nbytes for t in (*pl_module.parameters(), *pl_module.buffers(), *tensors_in(batch)))
        self.meter = PeakMeter()
        self.meter.__enter__()
        self.meter.live.track(gradients_of(pl_module))
        self.meter.live.track(list(tensors_in([list(o.state.values()) for o in trainer.optimizers])))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.bytes.append(self.standing + self.meter.live.peak)
        self.leave()

    def on_train_epoch_end(self, trainer, pl_module):
        self.leave()

    def on_exception(self, trainer, pl_module, exception):
        self.leave()

    def leave(self):
        meter, self.meter = self.meter, None
        if meter is not None:
            meter.__exit__(None, None, None)


def named(error):
    found = re.search(r"[Rr]aise memory_budget to ([\d.]+ \w+)", error.hint)
    assert found, error.hint
    return parse_bytes(found[1])
