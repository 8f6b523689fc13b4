"""Decides once which layers are cut and how, the same on every rank, and cuts them stage by stage."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ctdr_lightning.basics.errors import CheckpointError, ConfigError, CTDRError
from ctdr_lightning.decomposition import Choices, Report, decompose
from ctdr_lightning.decomposition.losses import LossyLayerWarning
from ctdr_lightning.decomposition.report import LayerReport
from ctdr_lightning.recovery.decisions import split
from ctdr_lightning.recovery.duplicate import duplicate
from ctdr_lightning.recovery.schedule import Recovery
from ctdr_lightning.recovery.transaction import PutBack

Outcome = tuple[CTDRError | None, Choices | None, list[list[str]]]

_REMEDIES = {  # by rank rule: what makes it ask for less
    "error": "Raise the error",
    "energy": "Lower the energy",
    "vbmf": "Give a share such as rank=0.5",
}


@dataclass(frozen=True)
class Surgery:
    """What is decided about a model, as a checkpoint keeps it.

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
        """Read what `to_dict` gave.

        Raises:
            CheckpointError: When it is something else.
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
    """Decomposes a model by what it knows beside the weights."""

    def decompose(self, module: Any, options: Mapping[str, Any], change: bool) -> Report:
        """Decompose in place where ``change``, else only find the choices."""


class Surgeon:
    """The decomposition of one model.

    Args:
        options: Arguments for `decompose`; None where nothing is decomposed.
        choices: Choices to follow instead.
        recovery: Says into how many stages the layers are split.
    """

    def __init__(self, options: Mapping[str, Any] | None, choices: Choices | None, recovery: Recovery | None) -> None:
        self._options = options
        self._given = choices
        self._recovery = recovery
        self.choices: Choices | None = None
        self.report: Report | None = None
        self.parameters_before = 0
        self.stages: list[list[str]] = []

    @property
    def decomposes(self) -> bool:
        """Whether layers are decomposed at all."""
        return self._options is not None or self._given is not None

    def decide(self, model: Any, strategy: Any, decomposer: Decomposer | None = None) -> None:
        """Choose ranks on rank 0, tell the others, and split the layers into stages.

        One-shot decomposition is carried out on rank 0 on the way; otherwise the model is left as it is.

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
        self.parameters_before = sum(parameter.numel() for parameter in model.parameters())
        found: Any = self._decide_here(model, decomposer) if strategy.is_global_zero else None
        problem, self.choices, self.stages = strategy.broadcast(found)
        if problem is not None:
            raise problem

    def as_now(self) -> PutBack:
        """Remember what is decided; the result puts it back."""
        before = self.choices, self.report, self.parameters_before, self.stages

        def put_back() -> None:
            self.choices, self.report, self.parameters_before, self.stages = before

        return put_back

    def check(self) -> None:
        """Require that something is decomposed; after a checkpoint, if any, was read.

        Ranks that depend on the weights find nothing in a fresh model that is about to be loaded.

        Raises:
            ConfigError: When no layer is, with each layer's reason.
        """
        if not self.decomposes or self.choices is not None:
            return
        rank = self._options["rank"] if self._options is not None else None
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
            return "see rank 0" if self.report is None else "no layer of a kind that can be is selected"
        largest = max(rows, key=lambda row: row.parameters_before)
        reason = f"({largest.name}: {largest.reason.split(';')[0]})"
        if rank is None:
            return f"the choices keep all {len(rows)} layers dense {reason}"
        return f"rank={rank!r} is met by none of {len(rows)} layers {reason}"

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
            return None, report.choices if options.get("rank") == "auto" else None, []
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
        """What a checkpoint keeps."""
        return Surgery(self.choices, self.stages, self.parameters_before)

    def load(self, state: Surgery, model_names: set[str] | None = None) -> None:
        """Take choices and stages from a checkpoint.

        Args:
            state: What `surgery` gave.
            model_names: The model's factorized layers.

        Raises:
            CheckpointError: When the model's factorized layers are not among the choices.
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


def _tolerance(row: LayerReport) -> float:
    return math.inf if math.isnan(row.relative_error) else row.relative_error
