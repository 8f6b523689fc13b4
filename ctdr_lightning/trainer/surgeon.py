"""Decides once which layers are cut and how, the same on every rank, and cuts them stage by stage."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import CheckpointError, ConfigError, CTDRError
from ctdr_lightning.decomposition import Choices, Report, decompose
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.report import LayerReport, LossyLayerWarning, report_of
from ctdr_lightning.recovery.decisions import split
from ctdr_lightning.recovery.schedule import Recovery
from ctdr_lightning.recovery.transaction import PutBack

Outcome = tuple[CTDRError | None, Choices | None, list[list[str]]]

_REMEDIES = {  # by rank rule: a change that lowers its request
    "error": "Raise the error",
    "energy": "Lower the energy",
    "vbmf": "Give a share such as rank=0.5",
}


@dataclass(frozen=True)
class Surgery:
    """Decisions about a model, in the form of a checkpoint.

    Attributes:
        choices: Method and ranks of each layer; None where nothing is decided yet.
        stages: Names of the layers that are cut together, in the order of the cuts.
        parameters_before: Parameters of the dense model.
    """

    choices: Choices | None
    stages: list[list[str]]
    parameters_before: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as primitives."""
        choices = self.choices.to_dict() if self.choices is not None else None
        return {"choices": choices, "stages": self.stages, "parameters_before": self.parameters_before}

    @classmethod
    def from_dict(cls, state: Any) -> Surgery:
        """Read the output of `to_dict`.

        Raises:
            CheckpointError: If it is something else.
        """
        given: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        stages, counted = given.get("stages"), given.get("parameters_before")
        good = isinstance(stages, list) and all(_are_names(names) for names in stages) and isinstance(counted, int)
        problem = "The checkpoint's decomposition choices are damaged."
        if not good or "choices" not in given:  # undecided choices are saved as None; an entry that is gone is damage
            raise CheckpointError(problem, "Use an earlier one, or restore(model, path).")
        try:
            choices = None if given["choices"] is None else Choices.from_dict(given["choices"])
        except ConfigError as error:
            raise CheckpointError(problem, "Use an earlier one, or restore(model, path).") from error
        return cls(choices, list(stages or []), int(counted or 0))


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


class Decomposer(Protocol):
    """Decomposes a model by knowledge beyond its weights."""

    def decompose(self, module: Any, options: Mapping[str, Any], change: bool) -> Report:
        """Decompose in place where ``change``, else only find the choices."""


class Surgeon:
    """The decomposition of one model.

    Args:
        options: Arguments for `decompose`; None where nothing is decomposed.
        choices: Choices to follow instead.
        recovery: Says into how many stages the layers are split.

    Attributes:
        choices: The choice for each layer; None before the decision.
        report: Of the cut on rank 0.
        parameters_before: Parameters of the dense model.
        stages: Names of the layers that are cut together, in the order of the cuts.
        adopted: Whether the layers were cut before this run, so that its own arguments choose none.
    """

    def __init__(self, options: Mapping[str, Any] | None, choices: Choices | None, recovery: Recovery | None) -> None:
        self._options = options
        self._given = choices
        self._recovery = recovery
        self.choices: Choices | None = None
        self.report: Report | None = None
        self.parameters_before = 0
        self.stages: list[list[str]] = []
        self.adopted = False

    @property
    def decomposes(self) -> bool:
        """Whether layers are decomposed at all."""
        return self._options is not None or self._given is not None

    def leave_dense(self) -> None:
        """Decompose nothing, as if no rank had been asked for."""
        self._options = None

    def adopt(self, model: nn.Module) -> None:
        """Take over the layers of a model that is cut already, where they are among those that were to be cut.

        Raises:
            ConfigError: If the arguments name layers that the model has not.
        """
        if not self.decomposes or self.choices is not None:
            return
        found = report_of(model)
        cut = {row.name: (row.method, row.ranks) for row in found.layers}
        if not cut or not self._wants(model, cut):
            return
        self.choices, self.stages, self.adopted = found.choices, [list(cut)], True
        self.parameters_before = found.parameters_before

    def _wants(self, model: nn.Module, cut: Mapping[str, Any]) -> bool:
        if self._given is not None:
            return all(cut.get(name) == (c.method, c.ranks) for name, c in self._given.factorized.items())
        select = self._options.get("select") if self._options is not None else None
        return any(layer.name in cut for layer in find_layers(model, select))

    def decide(self, model: Any, strategy: Any, decomposer: Decomposer | None = None) -> None:
        """Choose ranks on rank 0, tell the others, and split the layers into stages.

        One-shot decomposition is carried out on rank 0 on the way; otherwise the model stays unchanged.

        Args:
            model: Dense; its weights are read.
            strategy: Broadcasts the outcome.
            decomposer: Decomposes by more than the weights; None goes by these alone.

        Raises:
            ConfigError: On every rank alike, when the arguments do not fit the model.
            InfeasibleBudgetError: Likewise, when no ranks fit the budget.
        """
        if not self.decomposes or self.choices is not None:
            return
        there = report_of(model)
        self.parameters_before = there.parameters_before
        found: Any = self._decide_here(model, decomposer) if strategy.is_global_zero else None
        problem, self.choices, self.stages = strategy.broadcast(found)
        if problem is not None:
            raise problem
        if self.choices is not None and there.layers:  # other layers were cut by hand; they belong to the first stage
            self.choices = Choices({**self.choices.layers, **there.choices.layers})
            first, *later = self.stages or [[]]
            self.stages = [[row.name for row in there.layers] + first, *later]

    def as_now(self) -> PutBack:
        """Remember the decisions; the result restores them."""
        before = self.choices, self.report, self.parameters_before, self.stages, self.adopted

        def put_back() -> None:
            self.choices, self.report, self.parameters_before, self.stages, self.adopted = before

        return put_back

    def check(self) -> None:
        """Require that something is decomposed; after a checkpoint, if any, was read.

        Ranks that depend on the weights find nothing in a fresh model that is about to be loaded.

        Raises:
            ConfigError: If no layer is, with each layer's reason.
        """
        if self._options is None or self.choices is not None:
            return
        rank = self._options["rank"]
        rules = {str(r).partition("=")[0].strip() for r in (rank.values() if isinstance(rank, Mapping) else [rank])}
        raise ConfigError(
            f"nothing is decomposed: {self._why_nothing(rank)}.",
            f"{_REMEDIES.get(min(rules), 'Lower rank=')}, widen select=, or use CTDRCallback(rank=None) for memory "
            "planning alone.",
        )

    def _why_nothing(self, rank: Any) -> str:
        """The reason of one layer, for all of them."""
        rows = self.report.layers if self.report is not None else ()
        if not rows:
            return "see rank 0" if self.report is None else "no layer of a supported kind is selected"
        largest = max(rows, key=lambda row: row.parameters_before)
        reason = f"({largest.name}: {largest.reason.split(';')[0]})"
        return f"rank={rank!r} is met by no layer of {len(rows)} {reason}"

    def _decide_here(self, model: Any, decomposer: Decomposer | None) -> Outcome:
        staged = self._recovery is not None and self._recovery.staged
        options = {"choices": self._given} if self._given is not None else dict(self._options or {})
        try:
            if decomposer is not None:
                report = decomposer.decompose(model, options, change=not staged)
            else:
                report = decompose(duplicate(model) if staged else model, **options)
        except CTDRError as error:
            return error.with_traceback(None), None, []
        self.report = report
        if not report.factorized:
            decided = self._given is not None or options["rank"] == "auto"  # that all layers stay dense
            return None, report.choices if decided else None, []
        order = sorted(report.factorized, key=_tolerance)
        return None, report.choices, split([row.name for row in order], self._recovery)

    def cut(self, model: nn.Module, stage: int) -> None:
        """Cut every layer of the stages before ``stage``; those cut already stay as they are.

        Args:
            model: Changed in place.
            stage: Stages to have been cut afterwards.
        """
        if self.choices is None or stage == 0:
            return
        names = {name for names in self.stages[:stage] for name in names}
        with warnings.catch_warnings():  # it was said on rank 0, by the errors after the refit
            warnings.simplefilter("ignore", LossyLayerWarning)
            decompose(model, choices=self.choices.only(names), progress=False)

    def surgery(self) -> Surgery:
        """State for a checkpoint."""
        return Surgery(self.choices, self.stages, self.parameters_before)

    def load(self, state: Surgery, model_names: set[str] | None = None) -> None:
        """Take choices and stages from a checkpoint.

        Args:
            state: Value of `surgery`.
            model_names: The model's factorized layers.

        Raises:
            CheckpointError: If the model's factorized layers are not among the choices.
        """
        strange = (model_names or set()) - {name for names in state.stages for name in names}
        if strange:
            raise CheckpointError(
                f"checkpoint: layer {sorted(strange)[0]!r} is factorized, but its choices do not say so.",
                "The checkpoint was altered; use an earlier one.",
            )
        if state.choices is None:
            return  # saved before anything was decided: this run's own decision holds
        self.choices, self.stages, self.parameters_before = state.choices, state.stages, state.parameters_before
        self.adopted = False


def _tolerance(row: LayerReport) -> float:
    return math.inf if math.isnan(row.relative_error) else row.relative_error
