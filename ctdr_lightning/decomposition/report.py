"""Report of a decomposition: a table to read, choices to store."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ctdr_lightning.basics.columns import aligned
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.costs import CostModel, factor_costs, samples, weigh
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.choose.uncovered import LEAST_SHARE, NO_KIND, StayingWeight
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.decomposition.methods import METHODS
from ctdr_lightning.decomposition.shapes.layer_kinds import weight_of

_HEAD = (
    "layer", "kind", "method", "ranks", "parameters", "kept", "FLOPs", "error", "memory", "saved", "freed", "for",
    "decision",
)  # fmt: skip
_NOMINAL_AXIS = 32
# Half of a layer's energy lost. A weight's error says little where the outputs were measured: after a refit a digits
# CNN at a quarter has layers at .86 and outputs 2e-5 nats from dense. So it counts where nothing was measured, or where
# the outputs are this far: .05 nats were 1 to 2 points of accuracy on digits.
MOST_ERROR = 0.7
_NEAR_NATS = 0.05
_SHOWN = 8


class LossyLayerWarning(UserWarning):
    """Layers whose rank is too low to carry their outputs, or whose error is large."""


@dataclass(frozen=True)
class LayerReport:
    """One layer, before and after. Plain data.

    Args:
        name: Dotted name in the model.
        kind: Class of the dense layer.
        method: Method name; None where the layer stays dense.
        ranks: Ranks, input side first.
        parameters_before: Weights and bias of the dense layer.
        parameters_after: Weights and bias now.
        reason: Why.
        relative_error: ``||W - W'|| / ||W||`` of the weight; NaN where nobody looked.
        flops_before: Operations of one sample's forward, dense; 0 where nobody counted.
        flops_after: The same now.
        net_bytes: Change of a step's memory: activations added less weights, gradients and optimizer state saved; None
            where the input's shape is not known.
        saved_bytes: Bytes that autograd saves inside the layer; 0 without a recorded step.
        freed_bytes: Bytes of these that a memory plan drops and recomputes.
        recompute_s: Seconds of this recomputation.
    """

    name: str
    kind: str
    method: str | None
    ranks: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    reason: str
    relative_error: float = 0.0
    flops_before: int = 0
    flops_after: int = 0
    net_bytes: int | None = None
    saved_bytes: int = 0
    freed_bytes: int = 0
    recompute_s: float = 0.0

    @property
    def decision(self) -> str:
        """Outcome of the layer: "factorized" or "dense"."""
        return "factorized" if self.method else "dense"


@dataclass(frozen=True)
class Report:
    """Every layer that was looked at, and the totals.

    Args:
        layers: One row a layer, in the model's order.
        parameters_before: All parameters of the model before.
        parameters_after: All parameters of the model after.
        divergence: How far the outputs are from the dense model's, in nats, on batches that nothing was fitted to; NaN
            where no data was given.
        asked: Share of the parameters that was asked for; None where something else was.
        staying: Weights that were not open to decomposition, the largest first.
    """

    layers: tuple[LayerReport, ...]
    parameters_before: int
    parameters_after: int
    divergence: float = math.nan
    asked: float | None = None
    staying: tuple[StayingWeight, ...] = ()

    @property
    def factorized(self) -> tuple[LayerReport, ...]:
        """The rows of factorized layers."""
        return tuple(row for row in self.layers if row.decision == "factorized")

    @property
    def compression(self) -> float:
        """Parameters before, divided by parameters after."""
        return self.parameters_before / max(self.parameters_after, 1)

    @property
    def flops_before(self) -> int:
        """Operations of the listed layers before."""
        return sum(row.flops_before for row in self.layers)

    @property
    def flops_after(self) -> int:
        """Operations of the listed layers after."""
        return sum(row.flops_after for row in self.layers)

    @property
    def choices(self) -> Choices:
        """The choices for all layers, for ``decompose(model, choices=...)``."""
        return Choices({row.name: LayerChoice(row.method, row.ranks, row.reason) for row in self.layers})

    @property
    def uncovered(self) -> tuple[StayingWeight, ...]:
        """Weights of 1 % of the model and more that no layer kind covers, and that stay dense for it."""
        return tuple(weight for weight in self.staying if weight.reason == NO_KIND and self._counts(weight))

    def notes(self) -> list[str]:
        """The weights that no layer kind covers; where the model misses the share that was asked for, all that stay."""
        left = 1 / self.compression
        if self.asked is None or left < self.asked + LEAST_SHARE or not self.staying:
            return [self._stays(weight) for weight in self.uncovered]
        shown = [weight for weight in self.staying if self._counts(weight)]
        n_rest = sum(weight.parameters for weight in self.staying[len(shown) :])
        lines = [f"rank={self.asked:g} was requested, but {left:.1%} of the model remain, because these weights stay:"]
        lines += [self._stays(weight) for weight in shown]
        worth_a_word = n_rest >= LEAST_SHARE * self.parameters_before
        return lines + ([f"smaller ones ({self._share(n_rest)} together) stay"] if worth_a_word else [])

    def measured(self) -> list[str]:
        """Distance of the outputs from the dense model's, if it was measured."""
        return [] if math.isnan(self.divergence) else [f"outputs: {self.divergence:.3g} nats from dense"]

    def _counts(self, weight: StayingWeight) -> bool:
        return weight.parameters >= LEAST_SHARE * self.parameters_before

    def _stays(self, weight: StayingWeight) -> str:
        shape = " x ".join(map(str, weight.shape))
        return f"{weight.name} ({shape}, {self._share(weight.parameters)}) stays: {weight.reason}"

    def _share(self, n_parameters: int) -> str:
        return f"{n_parameters / max(self.parameters_before, 1):.1%} of the model"

    def _memory(self) -> str:
        known = [row.net_bytes for row in self.layers if row.net_bytes is not None]
        return _signed_bytes(sum(known)) if known else ""

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __str__(self) -> str:
        rows = [_cells(row) for row in self.layers]
        total = f"{self.parameters_before:,} -> {self.parameters_after:,}", f"{1 / self.compression:.1%}"
        rows.append(("whole model", "", "", "", *total, _ratio(self), "", self._memory(), "", "", "", ""))
        table = (_HEAD, *rows)
        shown = [c for c in range(len(_HEAD)) if any(row[c] for row in rows)]  # no column without entries
        text = _table([[row[c] for c in shown] for row in table])
        return "\n".join([text, *self.notes(), *self.measured()])


def layer_report(
    layer: Layer, choice: LayerChoice, new: FactorizedLayer | None, costs: CostModel | None = None
) -> LayerReport:
    """One layer's row, while the dense layer is at hand.

    Args:
        layer: The dense layer.
        choice: Its choice.
        new: Its replacement; None if it stays dense.
        costs: Cost model of its memory; None leaves that out.
    """
    n_before = _n_dense(layer)
    before, after = _flops(layer, new)
    net_bytes = None
    if new is not None and costs is not None and layer.calls and layer.geometry is not None:
        net_bytes = weigh(layer, METHODS[new.method].at(layer.geometry, new.ranks), costs).net_bytes
    return LayerReport(
        name=layer.name,
        kind=layer.kind,
        method=new.method if new else None,
        ranks=new.ranks if new else (),
        parameters_before=n_before,
        parameters_after=n_parameters(new) if new else n_before,
        reason=choice.reason,
        relative_error=_relative_error(layer, new),
        flops_before=before,
        flops_after=after,
        net_bytes=net_bytes,
    )


def report_of(model: nn.Module, parameters_before: int = 0, reason: str = "as in the checkpoint") -> Report:
    """The factorized layers that a model has, as a report, where their dense layers are not at hand.

    Args:
        model: With factorized layers, from a checkpoint for instance.
        parameters_before: All parameters of the dense model; 0 counts them from the layers' shapes.
        reason: Why the layers are as they are.
    """
    rows = []
    for name, layer in walk(model):
        if isinstance(layer, FactorizedLayer):
            before = layer.geometry.n_weights + (0 if layer.bias is None else layer.bias.numel())
            kind, after = layer.dense_class.__name__, n_parameters(layer)
            rows.append(LayerReport(name, kind, layer.method, layer.ranks, before, after, reason, math.nan))
    now, saved = n_parameters(model), sum(row.parameters_before - row.parameters_after for row in rows)
    return Report(tuple(rows), parameters_before or now + saved, now)


def n_parameters(model: nn.Module) -> int:
    """Entries of all parameters whose shape is known."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter))


def warn_of_losses(report: Report, last: Layer | None) -> None:
    """Name a last layer whose rank is below its number of outputs, and each layer whose error is large.

    Every compressed layer inside a network has a rank below its number of outputs; only the last layer's outputs are
    read by the user, class by class. A last layer that has more outputs than inputs, as over a vocabulary, cannot
    have the rank of its outputs anyway.

    Args:
        report: Of the decomposition.
        last: The model's last layer; None where it was not selected.
    """
    geometry = last.geometry if last is not None else None
    n_outputs = geometry.out_size if geometry is not None and geometry.out_size <= geometry.in_size else 0
    most = math.inf if report.divergence < _NEAR_NATS else MOST_ERROR
    name = last.name if last is not None else None
    texts = [_fault(row, n_outputs if row.name == name else 0, most) for row in report.factorized]
    found = [text for text in texts if text]
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    warnings.warn(
        f"heavily decomposed: {'; '.join(found[:_SHOWN])}{more}. Raise rank=, or leave them out with select=.",
        LossyLayerWarning,
        stacklevel=3,
    )


def _fault(row: LayerReport, n_outputs: int, most_error: float) -> str:
    if row.ranks and min(row.ranks) < n_outputs:
        return f"{row.name!r} gives {n_outputs} outputs through rank {min(row.ranks)}"
    if row.relative_error > most_error:
        return f"{row.name!r} loses {row.relative_error:.0%} of its weight's norm"
    return ""


def _ratio(row: LayerReport | Report) -> str:
    return f"{row.flops_after / row.flops_before:.1%}" if row.flops_before else ""


def _cells(row: LayerReport) -> tuple[str, ...]:
    saved, freed = (format_bytes(n) if n else "" for n in (row.saved_bytes, row.freed_bytes))
    planned = saved, freed, format_seconds(row.recompute_s) if freed else ""
    if row.method is None:
        return (
            row.name,
            row.kind,
            "",
            "",
            f"{row.parameters_before:,}",
            "",
            "",
            "",
            "",
            *planned,
            f"dense: {row.reason}",
        )
    error = "" if math.isnan(row.relative_error) else f"{row.relative_error:.4f}"
    memory = "" if row.net_bytes is None else _signed_bytes(row.net_bytes)
    ranks, kept = " x ".join(map(str, row.ranks)), f"{row.parameters_after / row.parameters_before:.1%}"
    sizes = f"{row.parameters_before:,} -> {row.parameters_after:,}"
    return row.name, row.kind, row.method, ranks, sizes, kept, _ratio(row), error, memory, *planned, row.reason


def _signed_bytes(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else '-'}{format_bytes(abs(n_bytes))}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = aligned(rows)
    rule = "-" * min(max(map(len, lines)), 120)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _n_dense(layer: Layer) -> int:
    if layer.geometry is None and not layer.owner:
        return n_parameters(layer.module)
    bias = getattr(layer.module, "bias", None)
    n_weights = layer.geometry.n_weights if layer.geometry else 0  # a shared weight counts where it is owned
    return n_weights + (0 if bias is None else bias.numel())


def _flops(layer: Layer, factorized: FactorizedLayer | None) -> tuple[int, int]:
    """Operations of one sample's forward; at a nominal size where the input's shape is not known."""
    geometry = layer.geometry
    if geometry is None:
        return 0, 0
    nominal = (1,) if geometry.lookup else (1, geometry.in_size, *(_NOMINAL_AXIS,) * geometry.n_axes)
    shapes = layer.calls or (nominal,)
    n_samples = max(samples(geometry, shapes[0])[0] if geometry.kernel else shapes[0][0], 1)
    found = METHODS[factorized.method].at(geometry, factorized.ranks) if factorized else None
    before = sum(factor.flops for shape in shapes for factor in factor_costs(geometry, None, shape))
    after = sum(factor.flops for shape in shapes for factor in factor_costs(geometry, found, shape))
    return before // n_samples, after // n_samples


@torch.no_grad()
def _relative_error(layer: Layer, factorized: FactorizedLayer | None) -> float:
    if factorized is None:
        return 0.0
    weight = weight_of(layer.module)
    if layer.module is factorized or weight.is_meta:
        return math.nan
    return float((weight - factorized.weight).norm() / weight.norm().clamp_min(1e-30))
