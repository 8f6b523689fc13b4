"""Progress of the recovery, and the decision before the next epoch.

Pure functions of plain state, so that a resumed run decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

from ctdr_lightning.basics.checks import from_mapping, whole
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.recovery.schedule import Phase, Recovery

Move = Literal["go on", "cut", "roll back", "stop"]
T = TypeVar("T")
# Share of the largest change, and of the epochs that are left to the factors. Of cuts after 0.5, 0.7, 0.8 and 0.9 of a
# run those from 0.8 on lost least on G of `benchmarks.from_scratch`, two thirds of the loss of a cut at half.
_LEVEL, _LEFT = 0.05, 5


@dataclass
class Progress:
    """State of the recovery in a checkpoint, tensors excluded.

    Args:
        stages: Stages in all.
        stage: Stages cut so far.
        stage_epoch: Epoch before which the last one was cut.
        entered_epoch: Last epoch that was entered, so that none is entered twice.
        metric: Last validation's monitored metric.
        reference: The dense model's metric.
        phase_steps: Optimizer steps taken in the phase at hand.
        rolled_back: Whether a stage was rolled back, which ends the cutting.
        raw: Metric right after the first cut.
        batchnorm: Metric after BatchNorm re-estimation.
        estimated_epoch: Last epoch with whose weights BatchNorm was re-estimated, so that none is twice.
        spectra: With ``cut_epochs="auto"``: stable rank of each layer at the start of the last epoch entered.
        changes: Likewise: mean relative change of these ranks over each epoch before, the oldest first.
    """

    stages: int = 1
    stage: int = 0
    stage_epoch: int = 0
    entered_epoch: int = -1
    metric: float | None = None
    reference: float | None = None
    phase_steps: int = 0
    rolled_back: bool = False
    raw: float | None = None
    batchnorm: float | None = None
    estimated_epoch: int = -1
    spectra: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as primitives."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> Progress:
        """Read :meth:`to_dict`'s result.

        Raises:
            CheckpointError: If it is something else.
        """
        try:
            read = from_mapping(cls, value, "recovery progress")
            for name in ("stages", "stage", "stage_epoch", "phase_steps"):
                whole(f"recovery progress: {name}", getattr(read, name), least=0)
            for name in ("entered_epoch", "estimated_epoch"):
                whole(f"recovery progress: {name}", getattr(read, name), least=-1)
            for name in ("metric", "reference", "raw", "batchnorm"):
                _measured(f"recovery progress: {name}", getattr(read, name))
            for name in ("spectra", "changes"):
                _numbers(f"recovery progress: {name}", getattr(read, name))
        except ConfigError as error:
            raise CheckpointError(error.problem, "The checkpoint is from another version or damaged.") from error
        return read


def _measured(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name} is {value!r}, not a number.", "")


def _numbers(name: str, values: Any) -> None:
    if not isinstance(values, list) or None in values:
        raise ConfigError(f"{name} is {values!r}, not a list of numbers.", "")
    for value in values:
        _measured(name, value)


def split(layers: Sequence[T], recovery: Recovery | None) -> list[list[T]]:
    """Split layers, the most tolerant first, into the stages they are cut in.

    Args:
        layers: Layers in the order in which they are to be cut.
        recovery: Schedule; None or one-shot gives one stage.
    """
    ordered = list(layers)
    if recovery is None or not recovery.staged or not ordered:
        return [ordered]
    if recovery.layers_per_stage is not None:
        per = recovery.layers_per_stage
        return [ordered[start : start + per] for start in range(0, len(ordered), per)]
    count = min(1 if recovery.warms_up else len(recovery.cut_epochs or ()), len(ordered))
    bounds = [round(index * len(ordered) / count) for index in range(count + 1)]
    return [ordered[start:stop] for start, stop in pairwise(bounds)]


def first_cut_epoch(recovery: Recovery | None) -> int | None:
    """Epoch before which the first stage is cut; None where the spectra decide."""
    if recovery is None or not recovery.cut_epochs:
        return 0
    return None if isinstance(recovery.cut_epochs, str) else recovery.cut_epochs[0]


def observed(progress: Progress, spectra: Sequence[float]) -> Progress:
    """The progress after the layers' stable ranks were measured at the start of an epoch."""
    before = progress.spectra
    pairs = zip(before, spectra, strict=True) if len(before) == len(spectra) else ()
    moved = [abs(now - then) / max(now, then) if now != then else 0.0 for then, now in pairs]
    changes = [*progress.changes, sum(moved) / len(moved)] if moved else progress.changes
    return replace(progress, spectra=list(spectra), changes=changes)


def shortfall(recovery: Recovery, progress: Progress) -> float | None:
    """Drop of the metric below the reference (negative: better); None if either is unknown."""
    if progress.metric is None or progress.reference is None:
        return None
    if math.isnan(progress.metric):
        return math.inf
    gap = progress.reference - progress.metric
    return gap if recovery.mode == "max" else -gap


def phase_at(recovery: Recovery, progress: Progress, epoch: int) -> tuple[Phase | None, int]:
    """The phase that an epoch belongs to (None outside of all) and the epochs already spent in it."""
    since = epoch - progress.stage_epoch
    if progress.stage == 0 or since < 0 or progress.rolled_back:
        return None, 0
    for phase in recovery.phases:
        if since < phase.epochs:
            return phase, since
        since -= phase.epochs
    return None, since


def settled(changes: Sequence[float], epoch: int, epochs: int | None) -> bool:
    """Whether the spectra of a network that is trained from scratch have settled, so that its layers can be cut.

    Stable ranks fall fast while a network finds its directions, then level off. They have settled once an epoch's
    change is a twentieth of the largest one so far; at the latest when a fifth of the epochs is left.

    Args:
        changes: Mean relative change of the layers' stable ranks over each epoch so far, the oldest first.
        epoch: The epoch about to begin.
        epochs: Epochs of the run; None where it has no such limit, and the changes alone decide.

    Source:
        The switch of Cuttlefish (Wang et al., MLSys 2023, arXiv:2305.02538), there at an absolute change.

    Example:
        >>> [settled(changes, len(changes), 20) for changes in ([], [0.3], [0.3, 0.6], [0.3, 0.6, 0.02])]
        [False, False, False, True]
    """
    if epochs is not None and epoch >= max(1, epochs - max(1, epochs // _LEFT)):
        return True
    return bool(changes) and changes[-1] <= _LEVEL * max(changes)


def next_move(recovery: Recovery, progress: Progress, epoch: int, epochs: int | None = None) -> Move:
    """Decide the move before an epoch.

    Args:
        recovery: The schedule.
        progress: State after the epoch before, its validation included.
        epoch: The epoch about to begin.
        epochs: Epochs of the run; None where it has no such limit.
    """
    if progress.rolled_back:
        return "go on"
    gap = shortfall(recovery, progress)
    recovered = gap is not None and gap <= recovery.tolerance
    phases_over = epoch - progress.stage_epoch >= sum(phase.epochs for phase in recovery.phases)
    last = progress.stage >= progress.stages
    due = _cut_due(recovery, progress, epoch, epochs, recovered or phases_over)
    fresh = progress.stage == 0 or epoch == progress.stage_epoch
    if not fresh and failed(recovery, progress) and (due or (last and phases_over)):
        return "roll back"
    if not last:
        return "cut" if due else "go on"
    return "stop" if recovered and not fresh and recovery.stop_when_recovered else "go on"


def failed(recovery: Recovery, progress: Progress) -> bool:
    """Whether the stage at hand, should it end now, has to be rolled back."""
    gap = shortfall(recovery, progress)
    return recovery.max_drop is not None and progress.stage > 0 and gap is not None and gap > recovery.max_drop


def _cut_due(recovery: Recovery, progress: Progress, epoch: int, epochs: int | None, done: bool) -> bool:
    if progress.stage >= progress.stages:
        return False
    if recovery.warms_up:
        return settled(progress.changes, epoch, epochs)
    if isinstance(recovery.cut_epochs, tuple):
        return epoch >= recovery.cut_epochs[progress.stage]
    return progress.stage == 0 or done
