"""CTDR for Lightning: tensor decomposition and recomputation under one memory budget."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ctdr_lightning.decomposition import Choices, Report, decompose, merge
from ctdr_lightning.decomposition.layers.from_checkpoint import restore
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.joint.for_budget import fit_to_budget
from ctdr_lightning.memory import (
    Budget,
    LazyHeads,
    Plan,
    Session,
    Simulator,
    Tape,
    TiledModules,
    Timeline,
    Trace,
    max_batch,
    plan,
    record,
    simulate,
)

__version__ = "0.1.0"

_LAZY = {
    "CTDRCallback": "callback",
    "Memory": "trainer.groups",
    "Ranks": "trainer.groups",
    "Recovery": "recovery",
    "load_from_checkpoint": "trainer.modules",
}
__all__ = [
    "Budget",
    "BudgetFit",
    "CTDRCallback",
    "Choices",
    "LazyHeads",
    "Memory",
    "Plan",
    "Ranks",
    "Recovery",
    "Report",
    "Session",
    "Simulator",
    "Tape",
    "TiledModules",
    "Timeline",
    "Trace",
    "decompose",
    "fit_to_budget",
    "load_from_checkpoint",
    "max_batch",
    "merge",
    "plan",
    "record",
    "restore",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import names that need Lightning on first use, so that the core never loads it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
