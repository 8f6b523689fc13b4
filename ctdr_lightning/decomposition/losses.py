"""Warns of layers that were cut so far that they hardly say anything."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.report import LayerReport, Report

# Half of a layer's energy lost. A weight's error says little where the outputs were measured: after a refit a digits
# CNN at a quarter has layers at .86 and outputs 2e-5 nats from dense. So it counts where nothing was measured, or where
# the outputs are this far: .05 nats were 1 to 2 points of accuracy on digits.
_MOST_ERROR = 0.7
_NEAR_NATS = 0.05
_SHOWN = 8


class LossyLayerWarning(UserWarning):
    """Layers whose rank is too low to carry their outputs, or whose error is large."""


def warn_of_losses(report: Report, layers: Sequence[Layer]) -> None:
    """Name a last layer whose rank is below its number of outputs, and each layer whose error is large.

    Every compressed layer inside a network has a rank below its number of outputs; only the last layer's outputs are
    what the user reads, class by class. A last layer that has more outputs than inputs, as over a vocabulary, cannot
    have the rank of its outputs anyway.

    Args:
        report: What was done.
        layers: The model's layers, in order.
    """
    last, geometry = layers[-1].name, layers[-1].geometry
    n_outputs = geometry.out_size if geometry is not None and geometry.out_size <= geometry.in_size else 0
    most = math.inf if report.divergence < _NEAR_NATS else _MOST_ERROR
    texts = [_fault(row, n_outputs if row.name == last else 0, most) for row in report.factorized]
    found = [text for text in texts if text]
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    warnings.warn(
        f"decomposed far: {'; '.join(found[:_SHOWN])}{more}. Raise rank=, or leave them out with select=.",
        LossyLayerWarning,
        stacklevel=3,
    )


def _fault(row: LayerReport, n_outputs: int, most_error: float) -> str:
    if row.ranks and min(row.ranks) < n_outputs:
        return f"{row.name!r} gives {n_outputs} outputs through rank {min(row.ranks)}"
    if row.relative_error > most_error:
        return f"{row.name!r} loses {row.relative_error:.0%} of its weight's norm"
    return ""
