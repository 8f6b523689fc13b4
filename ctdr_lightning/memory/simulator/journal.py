"""Outcome of a change of actions, and a journal of it for undo."""

from __future__ import annotations

from dataclasses import dataclass, field

from ctdr_lightning.memory.simulator.actions import Action, Away
from ctdr_lightning.memory.simulator.away import AwayEffect
from ctdr_lightning.memory.simulator.effect import Effect
from ctdr_lightning.memory.simulator.groups import Flags, Group
from ctdr_lightning.memory.simulator.timeline import Segments


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a change of actions.

    Attributes:
        seconds: Increase of the step's time.
        segments: ``(first tick, tick after the last, bytes)``: increase of the live bytes.
    """

    seconds: float
    segments: Segments


@dataclass(slots=True)
class Journal:
    """Record of one change, for undo."""

    actions: dict[int, Action | None]
    seconds: float
    flags: dict[int, Flags] = field(default_factory=dict)
    removed: dict[int, tuple[Group, Effect]] = field(default_factory=dict)
    inserted: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    away: dict[int, Away | None] = field(default_factory=dict)
    parts: dict[int, AwayEffect | None] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
