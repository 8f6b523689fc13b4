"""A user's metric as the measure of the ranks' loss, on batches that no factor is fitted to."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.checks import real
from ctdr_lightning.basics.errors import ConfigError, CTDRError, first_line
from ctdr_lightning.basics.nests import leaves_of
from ctdr_lightning.basics.progress_bar import doing
from ctdr_lightning.decomposition.choose.batches import Step, batch_size, untouched
from ctdr_lightning.decomposition.choose.divergence import kind_of_output, named_tensors, watched_outputs
from ctdr_lightning.decomposition.trials.refit import Statistics, set_statistics
from ctdr_lightning.joint.twins import twin_of

if TYPE_CHECKING:
    from torchmetrics import Metric

MetricLike = Callable[[Any, Any], Any]  # or a metric of torchmetrics, which is called otherwise
_TARGETS = ("labels", "label", "targets", "target", "y")
_CALLABLE = "Write metric as a function of model and batch that returns one number, higher is better."


def check_metric(metric: Any, max_loss: float | None) -> None:
    """Require a metric that can be measured, and a largest drop of it.

    Raises:
        ConfigError: If one of the two cannot be used with the other.
    """
    if metric is None:
        return
    if not callable(metric):
        raise ConfigError(f"metric={metric!r} is neither a function nor a metric of torchmetrics.", _CALLABLE)
    if is_torchmetric(metric) and metric.higher_is_better is None:
        raise ConfigError(f"metric={name_of(metric)} does not say whether higher is better.", _CALLABLE)
    if max_loss is None:
        raise ConfigError(
            f"metric={name_of(metric)} is given without max_loss, its largest drop.", "Write max_loss=0.005 beside it."
        )
    real("max_loss", max_loss, least=0)


def is_torchmetric(found: Any) -> TypeGuard[Metric]:
    """Whether something is a metric of torchmetrics, which is not loaded for it."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(found, torchmetrics.Metric)


def name_of(metric: MetricLike) -> str:
    """Name of a metric in tables: a function's name, else the class."""
    name = str(getattr(metric, "__name__", type(metric).__name__))
    return "metric" if name in ("<lambda>", "partial") else name


class MetricJudge:
    """Measures one metric of the dense model and of those that may take its place.

    Args:
        metric: A function of model and batch, or a metric of torchmetrics, which is copied.
        model: Dense.
        batches: Batches for the measurement.
        step: Runs a model on a batch; a metric of torchmetrics receives its output.

    Attributes:
        name: Name of the metric.
        higher_is_better: Whether it falls if a model gets worse.
        n_batches: Number of batches for the measurement.
        dense: The dense model's value.

    Raises:
        ConfigError: If the metric fails on the dense model, or is no finite number there.
    """

    def __init__(self, metric: MetricLike, model: nn.Module, batches: Sequence[Any], step: Step) -> None:
        self.name = name_of(metric)
        self.higher_is_better = not is_torchmetric(metric) or bool(metric.higher_is_better)
        self.n_batches = len(batches)
        self._metric, self._batches, self._step = metric, batches, step
        self.dense = self.value(twin_of(model))
        if not math.isfinite(self.dense):
            raise ConfigError(f"metric={self.name} is {self.dense} for the dense model: no drop from it can be told.")

    @doing("measure the metric")
    def value(self, model: nn.Module, statistics: Statistics | None = None) -> float:
        """A model's value, in evaluation mode; buffers and torch's random state stay unchanged.

        Args:
            model: A twin of the dense model, so that the model's own state stays unchanged.
            statistics: Running statistics that its BatchNorm layers should have.

        Raises:
            ConfigError: If the metric fails, or returns something else than one number.
        """
        measure = self._accumulated if is_torchmetric(self._metric) else self._mean
        try:
            with untouched(model, training=False):
                set_statistics(model, statistics or {})
                return measure(model)
        except (CTDRError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"metric={self.name} cannot be measured on a batch ({first_line(error)}).",
                _CALLABLE if is_torchmetric(self._metric) else "It is called with a copy of the model and a batch.",
            ) from error

    def drop(self, value: float) -> float:
        """Drop below the dense model's value; infinite if the value is not finite."""
        if not math.isfinite(value):
            return math.inf
        return self.dense - value if self.higher_is_better else value - self.dense

    def _mean(self, model: nn.Module) -> float:
        sizes = [batch_size(leaves_of(batch)) or 1 for batch in self._batches]
        values = [self._number(self._metric(model, batch)) for batch in self._batches]
        return sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)

    def _accumulated(self, model: nn.Module) -> float:
        assert is_torchmetric(self._metric)
        copied: Any = alone(self._metric.clone())
        copied.reset()
        for batch in self._batches:
            output = self._output(model, batch)
            copied.to(output.device).update(output, self._target(batch))
        return self._number(copied.compute())

    def _number(self, found: Any) -> float:
        if isinstance(found, Tensor) and found.numel() == 1:
            return float(found)
        if isinstance(found, int | float):
            return float(found)
        raise ConfigError(f"metric={self.name} returned {_shown(found)}, which is not a number.", _CALLABLE)

    def _output(self, model: nn.Module, batch: Any) -> Tensor:
        """The one output of a step, or of several the one with logits."""
        with watched_outputs(model) as given:
            self._step(model, batch)
        named = named_tensors(given)
        logits = [tensor for name, tensor in named if kind_of_output(name, tensor, batch)[0] == "logits"]
        found = [tensor for _, tensor in named] if len(named) == 1 else logits
        if len(found) != 1:
            raise ConfigError(
                f"metric={self.name} takes one output, and a step gives {len(named)}, {len(logits)} of them logits.",
                _CALLABLE,
            )
        return found[0].float() if found[0].itemsize < 4 else found[0]

    def _target(self, batch: Any) -> Tensor:
        """A mapping's labels, or the last of a pair."""
        if isinstance(batch, Mapping):
            named = [batch[key] for key in _TARGETS if isinstance(batch.get(key), Tensor)]
            if named:
                return named[0]
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            return batch[1] if isinstance(batch[1], Tensor) else self._target(batch[1])
        raise ConfigError(
            f"metric={self.name} takes a target, and the batch is neither a pair of input and target nor a mapping "
            f"with {', '.join(_TARGETS[:-1])} or {_TARGETS[-1]}.",
            _CALLABLE,
        )


def alone(module: nn.Module) -> nn.Module:
    """Have all metrics in a module compute without other processes, which do not take part in the choice."""
    for metric in module.modules():
        if is_torchmetric(metric):
            metric.distributed_available_fn = _never
    return module


def _never() -> bool:
    return False


def _shown(found: Any) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)[:60]
