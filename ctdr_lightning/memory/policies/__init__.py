"""One published system, one file, one registered callable: a trace and a budget in, an action for each value out."""

from importlib import import_module
from pkgutil import iter_modules

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES, Policy

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["POLICIES", "Budget", "Policy"]
