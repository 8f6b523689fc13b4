"""Warns of layers that were cut so far that they hardly say anything."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.report import LayerReport, Report

# Half of a layer's energy lost. Trained networks stand .5 to .6 in wide layers after a refit; at .7 fine-tuning is
# needed (a digits CNN at a sixteenth: 64 % before BatchNorm follows, 98 after).
_MOST_ERROR = 0.7
_SHOWN = 8


class LossyLayerWarning(UserWarning):
    """Layers whose rank is too low to carry their outputs, or whose error is large."""


def warn_of_losses(report: Report, layers: Sequence[Layer]) -> None:
    """Name each layer whose rank is below its number of outputs where these are the model's, or whose error is large.

    Every compressed layer inside a network has a rank below its number of outputs; only the last layer's outputs are
    what the user reads, class by class.

    Args:
        report: What was done.
        layers: The model's layers, in order.
    """
    last = layers[-1].name if layers else ""
    sizes = {layer.name: layer.geometry.out_size for layer in layers if layer.geometry is not None}
    found = [text for row in report.factorized if (text := _fault(row, sizes.get(row.name, 0), row.name == last))]
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    warnings.warn(
        f"decomposed far: {'; '.join(found[:_SHOWN])}{more}. Raise rank=, or leave them out with select=.",
        LossyLayerWarning,
        stacklevel=3,
    )


def _fault(row: LayerReport, n_outputs: int, is_last: bool) -> str:
    if is_last and row.ranks and min(row.ranks) < n_outputs:
        return f"{row.name!r} gives {n_outputs} outputs through rank {min(row.ranks)}"
    if row.relative_error > _MOST_ERROR:
        return f"{row.name!r} loses {row.relative_error:.0%} of its weight's norm"
    return ""
