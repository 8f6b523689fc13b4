"""``rank="auto"`` before training: ranks for a memory budget, on a silent copy, from batches drawn as fit does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError, CTDRError
from ctdr_lightning.basics.torch_private import tree_leaves
from ctdr_lightning.decomposition import Choices, Report, decompose
from ctdr_lightning.decomposition.choose.uncovered import staying_weights
from ctdr_lightning.decomposition.layers.attention import opened
from ctdr_lightning.decomposition.report import LayerReport
from ctdr_lightning.joint.budget_fit import BudgetFit, LayerCost
from ctdr_lightning.joint.for_budget import fit_to_budget
from ctdr_lightning.joint.metric import MetricLike, alone, is_torchmetric, name_of
from ctdr_lightning.recovery.duplicate import duplicate
from ctdr_lightning.trainer.accuracy.choosing import TrainingData
from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.randomness import isolated
from ctdr_lightning.trainer.strategies import bucket_bytes

_HINT = "Write a share such as rank=0.5, which needs no training step; or call fit_to_budget on the network itself."


class BudgetChoice(TrainingData):
    """Decomposes a module to what a memory budget asks for.

    Args:
        trainer: In ``setup`` of a fit. All ranks make this object.
        options: The callback's.
        resumed: The choices of the checkpoint that the run goes on from; None for a fresh run.

    Attributes:
        fit: What was chosen; None before, on other ranks, and in a resumed run.
    """

    def __init__(self, trainer: Any, options: CallbackOptions, resumed: Choices | None = None) -> None:
        super().__init__(trainer)
        self._asked, self._resumed = options, resumed
        self.fit: BudgetFit | None = None

    def decompose(self, module: LightningModule, options: Mapping[str, Any], change: bool) -> Report:
        """Choose, and decompose a module in place where ``change``.

        Raises:
            ConfigError: When there are no training batches, or no step can be run on a copy.
            InfeasibleBudgetError: When nothing fits.
        """
        if self._resumed is not None:
            return decompose(module if change else duplicate(module), choices=self._resumed, progress=False)
        if self._problem:
            raise ConfigError(f'rank="auto" needs training data, but {self._problem}.', _HINT)
        if not module.automatic_optimization:
            raise ConfigError('rank="auto" needs automatic optimization: a manual step cannot be run alone.', _HINT)
        try:
            with isolated():
                return self._on_a_copy(module, options, change)
        except CTDRError:
            raise
        except Exception as error:
            raise ConfigError(
                f'rank="auto": a training step cannot be run on a copy ({type(error).__name__}: {error}).', _HINT
            ) from error

    def _decomposed(
        self, double: LightningModule, batches: Sequence[Any], step: Callable[[Any, Any], Any], options: Any
    ) -> Report:
        asked = self._asked
        n_before = sum(parameter.numel() for parameter in double.parameters())
        self.fit = fit_to_budget(
            double, partial(_loss, self._trainer, step), batches, asked.memory_budget,
            max_slowdown=asked.max_slowdown, max_loss=asked.max_loss, method=asked.method, select=asked.select,
            metric=self._metric(double), optimizer=_optimizer(double), progress=asked.verbose,
            beside_bytes=partial(self._beside_bytes, batches[0][1]),
        )  # fmt: skip
        n_after = sum(parameter.numel() for parameter in double.parameters())
        rows = tuple(_row(cost) for cost in self.fit.layers)
        with opened(double):
            staying = staying_weights(double, {row.name: "" for row in rows})
        return Report(rows, n_before, n_after, staying=staying)

    def _metric(self, double: LightningModule) -> MetricLike | None:
        """The metric as it is called on a copy, without the other ranks."""
        metric = self._asked.metric
        if metric is None or is_torchmetric(metric):
            return metric
        alone(double)  # a function may use the module's own metrics
        return _on_module(self._trainer, metric)

    def _beside_bytes(self, batch: Any, candidate: nn.Module) -> int:
        copied = _copied_bytes(candidate, batch) if self._asked.retry_on_oom else 0
        return copied + bucket_bytes(self._trainer.strategy, candidate)


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


def _copied_bytes(double: nn.Module, batch: Any) -> int:
    """Bytes of the copies by which a step that ran out of memory is put back: of all small tensors but the weights.

    A budget that is only just met without them is refused, or planned anew, once training makes them.
    """
    frozen = [p for p in double.parameters() if not p.requires_grad]
    batched = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    small = [t for t in (*frozen, *double.buffers(), *batched) if t.numel() <= SMALL_ELEMENTS]
    n_bytes = sum(t.nbytes for t in {id(t): t for t in small}.values())
    return n_bytes + n_bytes // 8  # the room that the step's own plan gives them


def _optimizer(double: LightningModule) -> Optimizer | str:
    """The optimizer whose state will stand in memory; Adam where it cannot be made yet."""
    try:
        made: Any = double.configure_optimizers()
    except Exception:  # the user's code may ask for anything that comes after setup
        return "adam"
    while isinstance(made, list | tuple | dict) and made:
        made = made["optimizer"] if isinstance(made, dict) else made[0]
    return made if isinstance(made, Optimizer) else "adam"


def _row(cost: LayerCost) -> LayerReport:
    return LayerReport(
        name=cost.name,
        kind=cost.kind,
        method=cost.method or None,
        ranks=cost.ranks,
        parameters_before=cost.parameters_before,
        parameters_after=cost.parameters_after,
        flops_before=0,
        flops_after=0,
        relative_error=cost.error,
        net_bytes=None,
        decision="factorized" if cost.method else "dense",
        reason=cost.reason,
    )
