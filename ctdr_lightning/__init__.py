"""CTDR for Lightning: tensor decomposition and recomputation under one memory budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctdr_lightning.callback import CTDRCallback
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
    from ctdr_lightning.recovery import Recovery
    from ctdr_lightning.trainer.groups import Memory, Ranks
    from ctdr_lightning.trainer.modules import load_from_checkpoint

__version__ = "0.1.0"

_HOMES = {
    "callback": ("CTDRCallback",),
    "decomposition": ("Choices", "Report", "decompose", "merge"),
    "decomposition.layers.from_checkpoint": ("restore",),
    "joint.budget_fit": ("BudgetFit",),
    "joint.for_budget": ("fit_to_budget",),
    "memory": (
        "Budget", "LazyHeads", "Plan", "Session", "Simulator", "Tape", "TiledModules", "Timeline", "Trace",
        "max_batch", "plan", "record", "simulate",
    ),
    "recovery": ("Recovery",),
    "trainer.groups": ("Memory", "Ranks"),
    "trainer.modules": ("load_from_checkpoint",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
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
    """Import a name on first use: the core never loads Lightning, and ``ctdr --help`` does not wait for torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
