"""Pictures of measured steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ctdr_lightning.basics.units import MIB
from ctdr_recipes.measure import MemoryUse

_COLOURS = ("#9aa0a6", "#1a73e8", "#d93025")
_INK = "#3c4043"


def draw_memory(uses: Mapping[str, MemoryUse], path: Path, title: str) -> None:
    """Draw live memory over a step, several models on one axis, each with its peak.

    Args:
        uses: What was measured, by the name in the legend; the first is the one to compare with.
        path: Where the picture goes; its ending says which format.
        title: Shown above the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for (name, use), colour in zip(uses.items(), _COLOURS, strict=False):
        times = [seconds * 1e3 for seconds in use.seconds]
        levels = [live / MIB for live in use.live_bytes]
        peak = use.peak_bytes / MIB
        axes.fill_between(times, levels, step="post", color=colour, alpha=0.18, linewidth=0)
        axes.step(times, levels, where="post", color=colour, linewidth=1.4, label=name)
        at = times[levels.index(max(levels))]
        axes.plot(at, peak, "o", color=colour, markersize=4)
        axes.annotate(f"{peak:.0f} MiB", (at, peak), (6, 3), textcoords="offset points", color=colour, weight="bold")
    highest = max(use.peak_bytes for use in uses.values()) / MIB
    axes.set_xlabel("time in the step (ms)", color=_INK)
    axes.set_ylabel("live memory (MiB)", color=_INK)
    axes.set(xlim=0, ylim=(0, 1.25 * highest))
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=_INK)
    axes.tick_params(width=0.6, color=_INK, labelcolor=_INK)
    axes.legend(frameon=False, loc="upper left", ncols=len(uses), labelcolor=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
