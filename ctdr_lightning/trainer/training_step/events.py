"""Events of a run's batches, as data; those of its steps are the memory session's."""

from __future__ import annotations

from dataclasses import dataclass

from ctdr_lightning.memory.guide.events import Event


@dataclass(frozen=True)
class GradientsRead(Event):
    """Code reads gradients before the backward: those of the last step are kept until then."""

    reader: str


@dataclass(frozen=True)
class GradientsFreed(Event):
    """The gradients of the last step are freed before the forward, as the plan needs their bytes."""

    n_bytes: int


@dataclass(frozen=True)
class RestGrew(Event):
    """The optimizer's step took more than predicted."""

    n_bytes: int


@dataclass(frozen=True)
class ClosureMeasured(Event):
    """An optimizer holds bytes while it runs the step again as its closure."""

    n_bytes: int


@dataclass(frozen=True)
class BatchesCut(Event):
    """Batches run as several sub-batches."""

    n_samples: int
    number: int


@dataclass(frozen=True)
class MadeLean(Event):
    """Outputs of linear layers are left out of steps, or modules run in tiles.

    Attributes:
        summary: Which, and at what gain, in words.
    """

    summary: str


@dataclass(frozen=True)
class OutputMade(Event):
    """The output of a layer was made after all, as something other than a loss looked at it."""

    layer: str
    asked_by: str


@dataclass(frozen=True)
class RunsWhole(Event):
    """A module that was to run in tiles runs whole after all."""

    module: str
    reason: str


@dataclass(frozen=True)
class UnitsChosen(Event):
    """It is settled which FSDP2 units' weights stay gathered between forward and backward.

    Attributes:
        summary: Which, and at what gain, in words.
    """

    summary: str


@dataclass(frozen=True)
class RanOutOfMemory(Event):
    """A step ran out of memory and is tried again under a smaller budget."""

    message: str
    budget_bytes: int


@dataclass(frozen=True)
class RecordedOverBudget(Event):
    """A batch took more than the budget while its step was recorded."""

    n_bytes: int
