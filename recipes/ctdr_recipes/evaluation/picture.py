"""Time against the limit of the peak, a panel a network: each technique's sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctdr_recipes.evaluation.nets import FULL
from ctdr_recipes.evaluation.rows import Row
from ctdr_recipes.evaluation.techniques import BUDGET_SHARE, DENSE, TECHNIQUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = dict(
    zip(TECHNIQUES, ("#9aa0a6", "#e8710a", "#12805c", "#1a73e8", "#9334e6", "#202124", "#d93025"), strict=True)
)
_MARKS = dict(zip(TECHNIQUES, "osv^DXo", strict=True))
_COLUMNS, _TIMES = 3, (0.5, 1, 2, 4, 8, 16)


def draw_evaluation(rows: Sequence[Row], path: Path) -> None:
    """Draw the predicted rows; the measured ones where nothing was predicted.

    Args:
        rows: Any.
        path: Where the picture goes.
    """
    chosen = [row for row in rows if row.source == "predicted"] or list(rows)
    nets = [net for net in FULL if any((row.net, row.technique) == (net, DENSE) for row in chosen)]
    if not nets:
        return
    from matplotlib.figure import Figure

    n_rows = -(-len(nets) // _COLUMNS)
    figure = Figure(figsize=(10, 3.0 * n_rows + 0.7), layout="constrained")
    panels = list(figure.subplots(n_rows, _COLUMNS, squeeze=False, sharey=True).flat)
    for axes, net in zip(panels, nets, strict=False):
        _draw(axes, [row for row in chosen if row.net == net])
        axes.set_title(net, loc="left", fontsize=10)
    for axes in panels[len(nets) :]:
        axes.set_visible(False)
    figure.supxlabel("limit: share of the dense step's peak (no mark: no plan fits)", fontsize=10)
    figure.supylabel("time over the dense step's", fontsize=10)
    named = [name for name in TECHNIQUES[1:] if any(row.technique == name and row.fits for row in chosen)]
    handles = [figure.axes[0].plot([], [], f"{_MARKS[n]}-", color=_COLOURS[n], label=n)[0] for n in named]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(named), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    """The panel of one network."""
    from matplotlib.ticker import NullLocator

    dense_s = next(row.seconds for row in rows if row.technique == DENSE)
    axes.axvline(BUDGET_SHARE, color="#dadce0", linewidth=1)
    axes.axhline(1, color="#dadce0", linewidth=1)
    for technique in TECHNIQUES[1:]:
        fitting = sorted((row.limit, row.seconds / dense_s) for row in rows if row.technique == technique and row.fits)
        limits, times = [limit for limit, _ in fitting], [time for _, time in fitting]
        axes.plot(limits, times, f"{_MARKS[technique]}-", color=_COLOURS[technique], markersize=5)
    axes.set_yscale("log")
    axes.set_yticks(_TIMES, [f"x{time:g}" for time in _TIMES])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted({row.limit for row in rows}))
    axes.invert_xaxis()
    axes.spines[["top", "right"]].set_visible(False)
