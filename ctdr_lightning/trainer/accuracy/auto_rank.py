"""``rank="auto"`` before training: ranks for a memory budget, on a silent copy, from batches drawn as fit does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError, CTDRError, ReplayError, first_line
from ctdr_lightning.decomposition import Report
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.joint.for_budget import fit_to_budget
from ctdr_lightning.joint.metric import MetricLike, alone, is_torchmetric, name_of
from ctdr_lightning.memory import Trace
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.trainer.accuracy.kept_choice import KeptChoice, question_of
from ctdr_lightning.trainer.accuracy.training_data import TrainingData
from ctdr_lightning.trainer.fake_trainer import optimizers_of
from ctdr_lightning.trainer.options import IN_PARTS, CallbackOptions
from ctdr_lightning.trainer.randomness import isolated

AccountOf = Callable[[Optimizer | None, Any, Trace, nn.Module], BatchAccount]
_HINT = "Write a share such as rank=0.5, which needs no training step; or call fit_to_budget on the network itself."


@dataclass(frozen=True)
class Copy:
    """The model on which a choice runs steps.

    Attributes:
        module: A copy.
        batch: Index and contents of the first batch.
        optimizer: Of the copy; None where it cannot be made yet.
    """

    module: LightningModule
    batch: tuple[int, Any]
    optimizer: Optimizer | None


class Means(Protocol):
    """Finds the means that keep a budget where recomputation alone does not, before layers are cut.

    Attributes:
        hindrances: Why a means cannot be used, by its name in words.
    """

    hindrances: dict[str, str]

    def parts(self, batch: Any) -> str:
        """The kind of parts that a batch may run in; empty for none."""

    def keeping(
        self, copy: Copy, step: Callable[[Any, Any], Tensor], dense: Trace, budget_bytes: int, slowdown: float
    ) -> str:
        """A means that keeps the budget within so many plain dense steps; empty for none."""


class AutoRank(TrainingData):
    """Decomposes a module to fit a memory budget.

    Args:
        trainer: In ``setup`` of a fit. All ranks make this object.
        options: The callback's.
        account: From the optimizer, the first batch, a candidate's recorded step and the candidate to the account of
            a batch.
        means: Finds what else keeps the budget, before layers are cut.

    Attributes:
        fit: The choice; None before, and on other ranks.
    """

    def __init__(self, trainer: Any, options: CallbackOptions, account: AccountOf, means: Means) -> None:
        super().__init__(trainer)
        self._asked, self._account, self._means = options, account, means
        self.fit: BudgetFit | None = None

    def decompose(self, module: LightningModule, options: Mapping[str, Any], change: bool) -> Report:
        """Choose, and decompose a module in place where ``change``.

        Raises:
            ConfigError: If there are no training batches, or no step can be run on a copy.
            InfeasibleBudgetError: If nothing fits.
        """
        if self._problem:
            raise ConfigError(f"a choice of ranks needs training data, but {self._problem}.", _HINT)
        if not module.automatic_optimization:
            raise ConfigError(
                "a choice of ranks needs automatic optimization: a manual step cannot be run alone.", _HINT
            )
        try:
            with isolated():
                return self._on_a_copy(module, options, change)
        except Exception as error:
            if isinstance(error, CTDRError) and not isinstance(error, ReplayError):
                raise
            raise ConfigError(
                f"a choice of ranks runs training steps on a copy, which cannot be done ({first_line(error)}).", _HINT
            ) from error

    def _decomposed(
        self, double: LightningModule, batches: Sequence[Any], step: Callable[[Any, Any], Any], options: Any
    ) -> Report:
        asked, first, optimizer = self._asked, batches[0][1], _optimizer(double)
        account, parts = partial(self._account, optimizer, first), self._means.parts(first)
        question = question_of(self._trainer, asked, double, optimizer, first)
        kept = KeptChoice(self._trainer, question, shown=asked.verbose)
        ask = partial(
            fit_to_budget, double, partial(_loss, self._trainer, step), batches, asked.memory_budget,
            max_slowdown=asked.max_slowdown, max_loss=asked.max_loss, method=asked.method, select=asked.select,
            metric=self._metric(double), progress=asked.verbose, prefer_dense=asked.prefers_dense,
            rounding=asked.rounding, tiles=asked.prefers_dense and parts != IN_PARTS, account=account,
            spare=partial(self._means.keeping, Copy(double, batches[0], optimizer)),
        )  # fmt: skip
        fit = kept.answer(lambda given: ask(given=given))
        self.fit = fit if fit.is_dense else replace(fit, hindrances=dict(self._means.hindrances))
        return self.fit.report

    def _metric(self, double: LightningModule) -> MetricLike | None:
        """The metric in a form for a copy, without the other ranks."""
        metric = self._asked.metric
        if metric is None or is_torchmetric(metric):
            return metric
        alone(double)  # a function may use the module's own metrics
        return _on_module(self._trainer, metric)


def _loss(trainer: Any, step: Callable[[Any, Any], Any], module: LightningModule, batch: Any) -> Tensor:
    module.trainer = trainer  # copies of a LightningModule leave their trainer behind
    output = step(module, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigError("training_step returned no loss on the first batches.", _HINT)
    return loss


def _on_module(trainer: Any, metric: Callable[[Any, Any], Any]) -> MetricLike:
    """A function of the user's, called with the module and the batch as validation would have them."""

    def measured(module: LightningModule, numbered: tuple[int, Any]) -> Any:
        module.trainer = trainer
        with trainer.precision_plugin.val_step_context():
            return metric(module, numbered[1])

    measured.__name__ = name_of(metric)
    return measured


def _optimizer(double: LightningModule) -> Optimizer | None:
    """The optimizer whose state will be resident; None if it cannot be made yet.

    Raises:
        ConfigError: If it runs the step itself, any number of times.
    """
    made = next(iter(optimizers_of(double)), None)
    if made is None:
        return None
    if signature(made.step).parameters["closure"].default is Parameter.empty:
        name = type(made).__name__
        raise ConfigError(
            f"a choice of ranks cannot price {name}, which runs the step itself, any number of times.", _HINT
        )
    return made
