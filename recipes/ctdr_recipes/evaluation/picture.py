"""Peak against time, a panel a network: each technique next to the dense step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctdr_recipes.evaluation.predicted import Row
from ctdr_recipes.evaluation.tables import by_net
from ctdr_recipes.evaluation.techniques import BUDGET_SHARE, DENSE, TECHNIQUES

_COLOURS = dict(zip(TECHNIQUES, ("#9aa0a6", "#e8710a", "#1a73e8", "#9334e6", "#d93025"), strict=True))
_COLUMNS = 3


def draw_evaluation(rows: Sequence[Row], path: Path) -> None:
    """Draw the predicted rows; the measured ones where nothing was predicted.

    Args:
        rows: Any.
        path: Where the picture goes.
    """
    chosen = [row for row in rows if row.source == "predicted"] or list(rows)
    nets = by_net(chosen)
    if not nets:
        return
    from matplotlib.figure import Figure

    n_rows = -(-len(nets) // _COLUMNS)
    figure = Figure(figsize=(10, 2.9 * n_rows + 0.5), layout="constrained")
    panels = figure.subplots(n_rows, _COLUMNS, squeeze=False).flat
    for axes, (name, of) in zip(panels, nets.items(), strict=False):
        dense = of[DENSE]
        axes.axvline(BUDGET_SHARE, color="#dadce0", linewidth=1)
        axes.axhline(1, color="#dadce0", linewidth=1)
        for technique, row in of.items():
            place = row.peak_bytes / dense.peak_bytes, row.seconds / dense.seconds
            axes.plot(*place, "o", color=_COLOURS[technique], label=technique, markersize=7, clip_on=False)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(panels)[len(nets) :]:
        axes.set_visible(False)
    figure.supxlabel("peak of a step over the dense one's", fontsize=10)
    figure.supylabel("time over the dense step's", fontsize=10)
    handles = [figure.axes[0].plot([], [], "o", color=c, label=name)[0] for name, c in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(TECHNIQUES), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
