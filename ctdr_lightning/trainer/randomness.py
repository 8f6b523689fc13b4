"""The state of every random generator, as tensors a checkpoint may hold.

Lightning does not save it; without it no resumed run that shuffles or drops out can be the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

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
    """Set the generators to what `capture` returned.

    Raises:
        CheckpointError: When the state is damaged.
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
    """Whatever the block draws, the generators stand afterwards as before."""
    before = capture()
    with put_back_after(lambda: put_back(before)):
        yield


def _epochs(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """How many epochs the run that wrote a checkpoint had begun and completed; empty where it does not say."""
    try:
        return dict(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"])
    except (KeyError, TypeError):
        return {}


class Randomness:
    """The random state of a run: saved with every checkpoint, taken up by the run that resumes it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tensor] | None = None
        self._reloads: int | None = None
        self._aligned_at = self._resumed_at = 0

    def save(self, trainer: Any) -> dict[str, Tensor]:
        """State of every rank, stacked; called on all ranks."""
        state = capture()
        if trainer.world_size == 1:
            return {name: value.unsqueeze(0) for name, value in state.items()}
        device = trainer.strategy.root_device
        return {name: trainer.strategy.all_gather(value.to(device)).cpu() for name, value in state.items()}

    def load(self, trainer: Any, stacked: Any, checkpoint: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Take this rank's state from what :meth:`save` gave; warns where there is none for it.

        Nothing is taken from a checkpoint of a run whose first epoch had not begun: Lightning's tuners write and load
        such a one around their trial steps, and in a plain run the numbers that they drew stay drawn.

        Args:
            trainer: About to train.
            stacked: The states of all ranks.
            checkpoint: Tells how far the saved run was.
            at_once: Put it back now, because the saved run ended before its first epoch's data order was drawn.

        Raises:
            CheckpointError: When it is no state of random generators.
        """
        epochs = _epochs(checkpoint)
        if not at_once and epochs.get("ready") == 0:
            return
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
        with isolated():  # what is damaged is found before any time is spent
            put_back(own)
        self._loaded = own

    def train_start(self, trainer: Any) -> None:
        """Set the generators as they were when the checkpoint was written, and reload data when that run would have."""
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
