"""The state of every random generator, as tensors a checkpoint may hold.

Lightning does not save it; without it no resumed run that shuffles or drops out can be the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ctdr_lightning.basics.errors import CheckpointError


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
    try:
        yield
    finally:
        put_back(before)


class Randomness:
    """The random state of a run: saved with every checkpoint, taken up by the run that resumes it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tensor] | None = None

    def save(self, trainer: Any) -> dict[str, Tensor]:
        """State of every rank, stacked; called on all ranks."""
        state = capture()
        if trainer.world_size == 1:
            return {name: value.unsqueeze(0) for name, value in state.items()}
        device = trainer.strategy.root_device
        return {name: trainer.strategy.all_gather(value.to(device)).cpu() for name, value in state.items()}

    def load(self, trainer: Any, stacked: Any, *, trained: bool = True) -> None:
        """Take this rank's state from what :meth:`save` gave; warns where there is none for it.

        Args:
            trainer: About to train.
            stacked: The states of all ranks.
            trained: Whether the saved run had reached its training; if not, its first epoch's data order was not yet
                drawn, and the state is put back at once.

        Raises:
            CheckpointError: When it is no state of random generators.
        """
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
        if not trained:
            put_back(own)
            return
        with isolated():  # what is damaged is found before any time is spent
            put_back(own)
        self._loaded = own

    def train_start(self) -> None:
        """Set the generators as they were when the checkpoint was written."""
        if self._loaded is not None:
            put_back(self._loaded)

    def epoch_start(self, trainer: Any) -> None:
        """Have a resumed run's first epoch draw its data order from the state taken up."""
        if self._loaded is not None:
            if trainer.fit_loop.restarted_on_epoch_start:
                # Lightning would take the batches of the epoch before for this one's, and skip a whole epoch
                trainer.fit_loop.epoch_loop.restarting = False
            # Lightning made the epoch's iterator before `train_start`; it makes it again once it no longer resumes
            trainer.fit_loop.on_iteration_done()
            self._loaded = None
