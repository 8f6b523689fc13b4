"""Events of the steps of a run, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something that happened between two steps."""


@dataclass(frozen=True)
class PlanMade(Event):
    """A kind of step has a plan.

    Attributes:
        summary: The plan in a sentence. Not the plan: events outlive the kinds of steps that are forgotten.
        shapes: The tensors of its batches, in words.
        foreseen: Whether it was made before a step of its sizes ran.
    """

    summary: str
    shapes: tuple[str, ...] = ()
    foreseen: bool = False


@dataclass(frozen=True)
class Differed(Event):
    """A step differed from its plan.

    Attributes:
        where: The place or the reason, in words.
    """

    where: str


@dataclass(frozen=True)
class OverBudget(Event):
    """A step exceeded the budget while it ran without a plan: recorded, or unlike its plan.

    Attributes:
        n_bytes: By so much.
    """

    n_bytes: int


@dataclass(frozen=True)
class Refuted(Event):
    """A dropped tensor came back with other contents, and is held from now on.

    Attributes:
        problem: The error's own words.
    """

    problem: str


@dataclass(frozen=True)
class Recorded(Event):
    """A recorded step has a property that limits its plans.

    Attributes:
        what: The op or module.
        why: The property, in words.
    """

    what: str
    why: str
