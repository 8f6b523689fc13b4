"""The state of every random generator, as tensors a checkpoint may hold, and the place of a resumed run in its data.

Lightning does not save the former; without it no resumed run that shuffles or drops out can be the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DistributedSampler

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.interrupts import put_back_after


def capture() -> dict[str, Tensor]:
    """State of torch's, Python's and NumPy's generators, and of the current CUDA device's where there is one."""
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = legacy
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def put_back(state: dict[str, Tensor]) -> None:
    """Set the generators to the result of `capture`.

    Raises:
        CheckpointError: If the state is damaged.
    """
    try:
        torch.set_rng_state(state["torch"])
        words = tuple(state["python"].tolist())
        given, gauss = state["python_gauss"].tolist()
        random.setstate((3, words, gauss if given else None))
        numbers = state["numpy"].tolist()
        keys = np.array(numbers[:-2], dtype=np.uint32)
        np.random.set_state(("MT19937", keys, numbers[-2], numbers[-1], state["numpy_gauss"].item()))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"The checkpoint's random state is damaged: {error}.", "Use an earlier one.") from error


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the generators after the block."""
    before = capture()
    with put_back_after(lambda: put_back(before)):
        yield


def _epochs(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of epochs begun and completed by the run that wrote a checkpoint; empty if unknown."""
    try:
        return dict(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"])
    except (KeyError, TypeError):
        return {}


def _has_loader_states(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the run that wrote a checkpoint had loaders that keep their place."""
    try:
        return bool(checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"])
    except (KeyError, TypeError):
        return False


def _warn_of_other_places(trainer: Any) -> None:
    """Say where Lightning goes on with other batches although the loaders keep their place."""
    # to know the last batch Lightning fetches one ahead, and the loader's state counts it as trained
    if math.isinf(trainer.num_training_batches):
        rank_zero_warn(
            "The training data have no length, so one batch is skipped where the epoch is resumed. "
            "Set Trainer(limit_train_batches=...) to the number of batches to resume at the next one."
        )
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    if any(_draws_its_order_anew(trainer, loader) for loader in loaders):
        rank_zero_warn(
            "The order of the training data may be drawn anew where an epoch is resumed: their loader does not keep "
            "the place of its sampler, which several processes share. Give it torchdata's "
            "sampler=StatefulDistributedSampler(dataset)."
        )


def _draws_its_order_anew(trainer: Any, loader: Any) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    if isinstance(sampler, DistributedSamplerWrapper):
        return True  # around a sampler that draws a new order whenever it is asked
    # torchdata's loader skips seen batches when it is made, before Lightning sets the sampler's epoch
    at_once = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    stateless = isinstance(sampler, DistributedSampler) and not hasattr(sampler, "state_dict")
    return at_once and stateless and trainer.current_epoch > 0


class Randomness:
    """The random state of a run: saved with every checkpoint, taken up by the run that resumes it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tensor] | None = None
        self._reloads: int | None = None
        self._aligned_at = self._resumed_at = 0
        self._has_places = False

    def save(self, trainer: Any) -> dict[str, Tensor]:
        """State of every rank, stacked; called on all ranks."""
        state = capture()
        if trainer.world_size == 1:
            return {name: value.unsqueeze(0) for name, value in state.items()}
        device = trainer.strategy.root_device
        return {name: trainer.strategy.all_gather(value.to(device)).cpu() for name, value in state.items()}

    def load(self, trainer: Any, stacked: Any, checkpoint: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Take this rank's state from the output of :meth:`save`; warns if there is none for it.

        Nothing is taken from a checkpoint of a run whose first epoch had not begun: Lightning's tuners write and load
        such a one around their trial steps, and in a plain run the numbers that they drew stay drawn.

        Args:
            trainer: About to train.
            stacked: The states of all ranks.
            checkpoint: Tells how far the saved run was.
            at_once: Put it back now, because the saved run ended before its first epoch's data order was drawn.

        Raises:
            CheckpointError: If it is no state of random generators.
        """
        epochs = _epochs(checkpoint)
        if not at_once and epochs.get("ready") == 0:
            return
        self._has_places = _has_loader_states(checkpoint)
        if self._has_places:
            self._read_places(trainer)
        self._resumed_at = epochs.get("completed", 0)
        rank, size = trainer.global_rank, trainer.world_size
        if stacked is None:
            rank_zero_warn("The checkpoint holds no random state: the run goes on with other random numbers.")
            return
        values = list(stacked.values()) if isinstance(stacked, dict) else []
        if not values or not all(isinstance(value, Tensor) and value.ndim == 2 and len(value) for value in values):
            raise CheckpointError("The checkpoint's random state is damaged.", "Use an earlier one.")
        if any(len(value) != size for value in values):
            rank_zero_warn("The checkpoint is from another number of processes: its random state is not taken up.")
            return
        # torch.set_rng_state reads from the start of the storage, so a view would crash it
        own = {str(name): value[rank].clone() for name, value in stacked.items()}
        if at_once:
            put_back(own)
            return
        with isolated():  # damage is found before any time is spent
            put_back(own)
        self._loaded = own

    def train_start(self, trainer: Any) -> None:
        """Set the generators as they were when the checkpoint was written, and reload data when that run would have."""
        self.release(trainer)
        if self._has_places and trainer.fit_loop.restarted_mid_epoch:
            _warn_of_other_places(trainer)
        if self._loaded is not None:
            put_back(self._loaded)
            self._align_reloads(trainer)

    def epoch_start(self, trainer: Any) -> None:
        """Have a resumed run's first epoch draw its data order from the state taken up."""
        if self._loaded is not None:
            if trainer.fit_loop.restarted_on_epoch_start:
                # Lightning would take the batches of the epoch before for this one's, and skip a whole epoch
                trainer.fit_loop.epoch_loop.restarting = False
            # Lightning made the epoch's iterator before `train_start`; it makes it again once it no longer resumes
            trainer.fit_loop.on_iteration_done()
            self._loaded = None

    def epoch_end(self, trainer: Any) -> None:
        """Reload as the user said, once a resumed run has come to the epoch of its first reload."""
        if self._reloads is not None and trainer.current_epoch >= self._aligned_at:
            self.release(trainer)

    def release(self, trainer: Any) -> None:
        """Give the trainer its own setting back."""
        if self._reloads is not None:
            trainer.reload_dataloaders_every_n_epochs, self._reloads = self._reloads, None

    def _read_places(self, trainer: Any) -> None:
        # Lightning reads a loader's state when it makes the loader. One that was asked for before the checkpoint was
        # read (ranks chosen by training data, `estimated_stepping_batches`) would start its epoch anew. So Lightning is
        # to make it again when training begins: any negative number means now.
        if trainer.reload_dataloaders_every_n_epochs >= 0:
            self._reloads, trainer.reload_dataloaders_every_n_epochs = trainer.reload_dataloaders_every_n_epochs, -1

    def _align_reloads(self, trainer: Any) -> None:
        # Lightning counts `reload_dataloaders_every_n_epochs` from where a run is resumed, and of a run that is not
        # interrupted from 0. Each reload draws a random number, so the next one is brought to where it would be.
        every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
        if every < 1:
            return
        begins = epoch % every == 0 and not trainer.fit_loop.restarted_mid_epoch
        self._aligned_at = epoch if begins else (epoch // every + 1) * every
        self._reloads = every
        # 0 would mean never, and any negative number means now
        trainer.reload_dataloaders_every_n_epochs = self._aligned_at - self._resumed_at or -1
