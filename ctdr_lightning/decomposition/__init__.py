"""Decomposition: select layers, choose ranks, replace them by smaller ones. Works on any ``nn.Module``."""

from __future__ import annotations

from ctdr_lightning.decomposition.algorithms.solvers import SOLVERS, Solver
from ctdr_lightning.decomposition.apply import decompose
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.rank import RANK_RULES, Rule
from ctdr_lightning.decomposition.layers.dense_again import merge
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.methods import METHODS, Method
from ctdr_lightning.decomposition.report import LayerReport, Report
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, Kind
from ctdr_lightning.decomposition.trials.bench import Bench, bench_of

__all__ = [
    "KINDS",
    "METHODS",
    "RANK_RULES",
    "SOLVERS",
    "Bench",
    "Choices",
    "FactorizedLayer",
    "Kind",
    "LayerChoice",
    "LayerReport",
    "Method",
    "Report",
    "Rule",
    "Solver",
    "bench_of",
    "decompose",
    "merge",
]
