"""What decomposition did to each layer: a table to read, choices to store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.uncovered import LEAST_SHARE, NO_KIND, StayingWeight
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import walk


@dataclass(frozen=True)
class LayerReport:
    """One layer, before and after.

    Args:
        name: Dotted name in the model.
        kind: Class of the dense layer.
        method: Method name; None where the layer stays dense.
        ranks: Ranks, input side first.
        parameters_before: Weights and bias of the dense layer.
        parameters_after: Weights and bias now.
        flops_before: Operations of one sample's forward, dense.
        flops_after: The same now.
        relative_error: ``||W - W'|| / ||W||`` of the weight.
        net_bytes: Change of a step's memory: activations added less weights, gradients and optimizer state saved; None
            where the input's shape is not known.
        decision: "factorized" or "dense".
        reason: Why.
    """

    name: str
    kind: str
    method: str | None
    ranks: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int
    relative_error: float
    net_bytes: int | None
    decision: str
    reason: str


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
        """What became of each layer, for ``decompose(model, choices=...)``."""
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
        lines = [f"rank={self.asked:g} is asked for, {left:.1%} of the model are left, because weights stay:"]
        lines += [self._stays(weight) for weight in shown]
        worth_a_word = n_rest >= LEAST_SHARE * self.parameters_before
        return lines + ([f"smaller ones ({self._share(n_rest)} together) stay"] if worth_a_word else [])

    def measured(self) -> list[str]:
        """How near the outputs are to the dense model's, where that was measured."""
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
        head = ("layer", "kind", "method", "ranks", "parameters", "kept", "FLOPs", "error", "memory", "decision")
        rows = [_cells(row) for row in self.layers]
        total = f"{self.parameters_before:,} -> {self.parameters_after:,}"
        rows.append(
            ("whole model", "", "", "", total, f"{1 / self.compression:.1%}", _ratio(self), "", self._memory(), "")
        )
        table = (head, *rows)
        shown = [column for column in range(len(head)) if any(row[column] for row in rows)]  # no column without entries
        text = _table([[row[column] for column in shown] for row in table])
        return "\n".join([text, *self.notes(), *self.measured()])


def report_of(model: nn.Module, parameters_before: int = 0) -> Report:
    """The factorized layers that a model has, as a report, where their dense layers are not at hand.

    Args:
        model: With factorized layers, from a checkpoint for instance.
        parameters_before: All parameters of the dense model; 0 counts them from the layers' shapes.
    """
    rows, saved = [], 0
    for name, layer in walk(model):
        if isinstance(layer, FactorizedLayer):
            after = sum(parameter.numel() for parameter in layer.parameters())
            before = layer.geometry.n_weights + (0 if layer.bias is None else layer.bias.numel())
            saved += before - after
            rows.append(
                LayerReport(
                    name, layer.dense_class.__name__, layer.method, layer.ranks, before, after, 0, 0, math.nan, None,
                    "factorized", "as in the checkpoint",
                )
            )  # fmt: skip
    now = sum(parameter.numel() for parameter in model.parameters())
    return Report(tuple(rows), parameters_before or now + saved, now)


def _ratio(row: LayerReport | Report) -> str:
    return f"{row.flops_after / row.flops_before:.1%}" if row.flops_before else ""


def _cells(row: LayerReport) -> tuple[str, ...]:
    if row.decision != "factorized":
        return row.name, row.kind, "", "", f"{row.parameters_before:,}", "", "", "", "", f"dense: {row.reason}"
    error = "" if math.isnan(row.relative_error) else f"{row.relative_error:.4f}"
    memory = "" if row.net_bytes is None else _signed_bytes(row.net_bytes)
    ranks = " x ".join(map(str, row.ranks))
    parameters = f"{row.parameters_before:,} -> {row.parameters_after:,}"
    kept = f"{row.parameters_after / row.parameters_before:.1%}"
    return row.name, row.kind, row.method or "", ranks, parameters, kept, _ratio(row), error, memory, row.reason


def _signed_bytes(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else '-'}{format_bytes(abs(n_bytes))}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-" * min(max(map(len, lines)), 120)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])
