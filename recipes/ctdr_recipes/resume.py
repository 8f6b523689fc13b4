"""A resumed run is the undisturbed one: the same config, the same random numbers, the same place in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import islice
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, RandomSampler

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.randomness import Randomness, isolated

_KEY = "recipe_config"
_FREE = (
    "name", "output_dir", "init_from", "ckpt_path", "evaluate", "test", "logger", "callbacks.checkpoint",
    "callbacks.last", "callbacks.preemption", "trainer.default_root_dir",
    "trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.log_every_n_steps",
    "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.plugins",
)  # fmt: skip


class ResumableLoader(DataLoader):
    """A loader that a checkpoint written within an epoch resumes at the next batch.

    The order of an epoch and the seeds of its workers come from one number, drawn when the epoch begins. A resumed
    loader takes that number again and loads the batches that were seen, to the bit and at the cost of loading them.

    Args:
        args: As for `DataLoader`.
        epoch_batches: Gives the number of batches after which the trainer ends an epoch, where that is fewer than all.
        options: As for `DataLoader`.
    """

    def __init__(self, *args: Any, epoch_batches: Callable[[], float] | None = None, **options: Any) -> None:
        super().__init__(*args, **{"generator": torch.Generator(), **options})
        self._epoch_batches = epoch_batches
        self._seed, self._drawn = 0, 0
        self._resumed: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin an epoch, or go on with the one that was interrupted."""
        self._seed, self._drawn = int(torch.empty((), dtype=torch.int64).random_().item()), 0
        return self._epoch(self._seed)

    def _epoch(self, drawn: int) -> Iterator[Any]:
        self._seed, seen = self._resumed or (drawn, 0)
        self._resumed = None
        self.generator.manual_seed(self._seed)
        batches = super().__iter__()
        with isolated():
            for _ in islice(batches, seen):
                pass
        self._drawn = seen
        for batch in batches:
            self._drawn += 1
            yield batch

    def __copy__(self) -> DataLoader:
        """A plain loader over the same data, whose batches do not count."""
        sampler: Any = self.sampler
        shuffles = isinstance(sampler, RandomSampler)
        return DataLoader(
            self.dataset,
            self.batch_size,
            sampler=RandomSampler(sampler.data_source) if shuffles else copy(sampler),
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
        )

    def state_dict(self) -> dict[str, int]:
        """The epoch's number, the batches seen, and whether they were all; Lightning saves and loads it."""
        limit = self._epoch_batches() if self._epoch_batches is not None else float("inf")
        return {"seed": self._seed, "drawn": self._drawn, "over": self._drawn >= min(len(self), limit)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on within an epoch; nothing where it was over."""
        self._resumed = None if state["over"] else (state["seed"], state["drawn"])


class Resume(Callback):
    """Keeps the config and the random state in every checkpoint, and takes them up again.

    Args:
        config: The run's config as plain dicts and values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._config = dict(flat(config))
        self._random = Randomness()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the config and the random state of every rank."""
        checkpoint[_KEY] = {"config": self._config, "random": self._random.save(trainer)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another config.

        Raises:
            ConfigError: Naming each entry that differs.
        """
        if trainer.state.fn != "fit":
            return
        saved = checkpoint.get(_KEY)
        if saved is None:
            rank_zero_warn("The checkpoint holds no config: whether it is of this run cannot be checked.")
            return
        check_same(saved["config"], self._config)
        self._random.load(trainer, saved["random"], checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the random state."""
        self._random.train_start(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the data order of a resumed run's first whole epoch from the state taken up."""
        self._random.epoch_start(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reload data when the undisturbed run would have."""
        self._random.epoch_end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the trainer its own setting back."""
        self._random.release(trainer)


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested dicts and lists by their dotted names."""
    items = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    if not items and not isinstance(config, Mapping | list):
        yield prefix, config
    for key, value in items:
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def check_same(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse to resume a run of another config; how long it trains and where it writes may differ.

    Raises:
        ConfigError: Naming each entry that differs.
    """
    names = [name for name in {**saved, **own} if not any(name == f or name.startswith(f"{f}.") for f in _FREE)]
    absent = "absent"
    changed = [name for name in names if saved.get(name, absent) != own.get(name, absent)]
    if changed:
        said = "; ".join(f"{n} was {saved.get(n, absent)}, now {own.get(n, absent)}" for n in changed[:8])
        raise ConfigError(
            f"the checkpoint is of another run: {said}{' ...' if len(changed) > 8 else ''}.",
            "Give another name= (or hydra.run.dir=) to start a new run, ckpt_path=null to train anew there, or "
            "init_from= to start from its weights.",
        )
