"""Decomposition: select layers, choose ranks, replace them by smaller ones. Works on any ``nn.Module``."""

from __future__ import annotations

from ctdr_lightning.decompose.algorithms.solvers import SOLVERS, Solver
from ctdr_lightning.decompose.api import decompose
from ctdr_lightning.decompose.kinds import KINDS, Kind
from ctdr_lightning.decompose.layers import FactorizedLayer
from ctdr_lightning.decompose.methods import METHODS, Method
from ctdr_lightning.decompose.rank import RANK_RULES, Rule
from ctdr_lightning.decompose.report import LayerReport, Report
from ctdr_lightning.decompose.surgery import merge

__all__ = [
    "KINDS",
    "METHODS",
    "RANK_RULES",
    "SOLVERS",
    "FactorizedLayer",
    "Kind",
    "LayerReport",
    "Method",
    "Report",
    "Rule",
    "Solver",
    "decompose",
    "merge",
]
