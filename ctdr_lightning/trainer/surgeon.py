"""Decides once which layers are cut and how, the same on every rank, and cuts them stage by stage."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import CheckpointError, ConfigError, CTDRError
from ctdr_lightning.decomposition import Choices, Report, decompose
from ctdr_lightning.decomposition.choose.choices import LayerChoice, checked
from ctdr_lightning.decomposition.choose.costs import CostModel
from ctdr_lightning.decomposition.choose.request import Request, check_reachable, rank_for
from ctdr_lightning.decomposition.choose.select import Layer, find_layers
from ctdr_lightning.decomposition.choose.spectra import look_untrained, stable_rank
from ctdr_lightning.decomposition.methods import KeepDenseError
from ctdr_lightning.decomposition.report import LayerReport, LossyLayerWarning, report_of
from ctdr_lightning.recovery.decisions import first_cut_epoch, split
from ctdr_lightning.recovery.schedule import Recovery
from ctdr_lightning.recovery.transaction import PutBack

Outcome = tuple[CTDRError | None, Choices | None, list[list[str]]]

_REMEDIES = {  # by rank rule: a change that lowers its request
    "error": "Raise the error",
    "energy": "Lower the energy",
    "vbmf": "Give a share such as rank=0.5",
}


_WAITS = 'waits for its cut (cut_epochs="auto")'


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
        by_data: Whether ranks are chosen by training data.

    Raises:
        ConfigError: If ranks are chosen for a budget before training, and the layers are cut in its midst.
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
        self.by_data = False
        if self._waits:
            self._check_warm_up()

    def _check_warm_up(self) -> None:
        if self._given is not None and not self._given.factorized:
            raise ConfigError(
                'choices cut no layer, and cut_epochs="auto" chooses no others: they are of a run before its cut.',
                'Write rank= instead; of a checkpoint: from_checkpoint(path, ranks={"choices": None}).',
            )
        if self._options is not None and self._options["rank"] == "auto":
            raise ConfigError(
                'recovery.cut_epochs="auto" chooses ranks when the network is warm, but ranks for a budget are chosen '
                "before training.",
                "Write a share such as rank=0.25; memory_budget is then kept by plans, before the cut and after it.",
            )

    @property
    def _waits(self) -> bool:
        """Whether ranks are chosen when the layers are cut, in the midst of training."""
        return self._recovery is not None and self._recovery.warms_up

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

        One-shot decomposition is carried out on rank 0 on the way; otherwise the model stays unchanged. With
        ``cut_epochs="auto"`` only the layers are listed; `decide_warm` chooses their ranks.

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
        self.parameters_before, self.by_data = report_of(model).parameters_before, decomposer is not None
        self._decide(model, strategy, self._waiting if self._waits else partial(self._decide_here, decomposer))

    def decide_warm(self, model: Any, strategy: Any, decomposer: Decomposer | None) -> bool:
        """Choose ranks by the weights of this moment and cut the layers on rank 0, where they waited for that.

        Args:
            model: Dense, in the midst of training.
            strategy: Broadcasts the outcome.
            decomposer: Decomposes by more than the weights; None goes by these alone.

        Returns:
            Whether a layer is to be cut.

        Raises:
            ConfigError: On every rank alike, when the arguments do not fit the model.
        """
        waiting = self.choices, self.stages
        self._decide(model, strategy, partial(self._decide_here, decomposer))
        if self.choices is not None and self.choices.factorized:
            return True
        self.choices, self.stages = waiting
        return False

    def _decide(self, model: Any, strategy: Any, here: Callable[[Any], Outcome]) -> None:
        """Take the outcome that rank 0 finds, on every rank."""
        there = report_of(model)
        problem, self.choices, self.stages = strategy.broadcast(here(model) if strategy.is_global_zero else None)
        if problem is not None:
            raise problem
        if self.choices is not None and there.layers:  # other layers were cut by hand; they belong to the first stage
            self.choices = Choices({**self.choices.layers, **there.choices.layers})
            first, *later = self.stages or [[]]
            self.stages = [[row.name for row in there.layers] + first, *later]

    def stable_ranks(self, model: nn.Module) -> list[float]:
        """The stable rank of each dense layer that waits for its cut."""
        waiting = {name for names in self.stages for name in names}
        return [stable_rank(x.weight) for x in find_layers(model) if x.name in waiting and not x.refusal]

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

    def _waiting(self, model: Any) -> Outcome:
        """The layers that are going to be cut, dense until then."""
        try:
            names = [layer.name for layer in self._open_layers(model)]
        except CTDRError as error:
            return error.with_traceback(None), None, []
        return None, Choices({name: LayerChoice(reason=_WAITS) for name in names}), [names]

    def _open_layers(self, model: Any) -> list[Layer]:
        if self._given is not None:
            checked(self._given, find_layers(model))
            return [layer for layer in find_layers(model) if layer.name in self._given.factorized]
        asked = self._options or {}
        layers = find_layers(model, asked["select"])
        names = [layer.name for layer in layers]
        request = Request.read(names, asked["rank"], asked["method"], None, 1, CostModel())
        check_reachable(layers, request)
        reasons = {layer.name: _refusal(layer, request) for layer in layers}
        if all(reasons.values()):
            name, reason = next(iter(reasons.items()))
            raise ConfigError(f"no layer can be cut ({name}: {reason}).", "Widen select=, or give these layers a rank.")
        return [layer for layer in layers if not reasons[layer.name]]

    def _decide_here(self, decomposer: Decomposer | None, model: Any) -> Outcome:
        staged = self._recovery is not None and self._recovery.staged and not self._waits
        options = {"choices": self._given} if self._given is not None else dict(self._options or {})
        try:
            if isinstance(options.get("rank"), float) and not self._waits and first_cut_epoch(self._recovery) == 0:
                self._hint(model, options["select"])
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

    def _hint(self, model: Any, select: Any) -> None:
        """Name the warm-up where an untrained network is about to be cut."""
        layers = [layer for layer in find_layers(model, select) if not layer.refusal]
        weightless = any(parameter.is_meta for parameter in model.parameters())
        if layers and not weightless and look_untrained(model.parameters()):
            rank_zero_warn(
                'CTDR: the network looks untrained. recovery=Recovery(cut_epochs="auto") trains it densely first, and '
                "cuts it once its layers' spectra have settled."
            )

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


def _refusal(layer: Layer, request: Request) -> str:
    """The reason why a layer cannot be cut; empty if it can."""
    try:
        rank_for(layer, request)
    except KeepDenseError as reason:
        return str(reason)
    return ""
