"""Pictures of the documents: decomposed layers, a card's memory, accuracy after a cut, batches by card, ranks by limit.

    python -m benchmarks.drawings                    # all, into docs/img
    python -m benchmarks.drawings card --folder out  # one of them

Layers are drawn as ``decompose`` returns them. The card's bytes come from a step on fake tensors and the allocator's
model. The others show committed figures.
"""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from benchmarks import ablation, accuracy_curve
from benchmarks.card_memory import Use, uses
from benchmarks.harness import Figures
from ctdr_lightning import decompose
from ctdr_lightning.basics.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"

# Okabe and Ito's colours, which colour-blind readers tell apart.
INK, FAINT, GREY = "#3c4043", "#e8eaed", "#9aa0a6"
BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"


class Drawn(NamedTuple):
    """One row of the picture of decomposed layers.

    Args:
        method: As ``decompose`` takes it; empty for the dense layer.
        ranks: The same.
        letters: Of the ranks, one for each tensor between two layers.
        dense: The layer that is decomposed.
    """

    method: str
    ranks: int | tuple[int, ...]
    letters: str
    dense: Callable[[], nn.Module]


def _convolution() -> nn.Module:
    return nn.Conv2d(64, 128, 3, padding=1, bias=False)


def _linear() -> nn.Module:
    return nn.Linear(768, 3072, bias=False)


ROWS = (
    Drawn("", 0, "", _convolution),
    Drawn("tucker", (16, 32), "a b", _convolution),
    Drawn("spatial", 16, "r", _convolution),
    Drawn("svd", 14, "r", _convolution),
    Drawn("cp", 48, "R R", _convolution),
    Drawn("cp4", 48, "R R R", _convolution),
    Drawn("tt", (16, 32, 32), "r1 r2 r3", _convolution),
    Drawn("", 0, "", _linear),
    Drawn("svd", 80, "r", _linear),
)


def chain(row: Drawn) -> list[nn.Module]:
    """The layers that run, in order: those of the factorized layer, or the dense one alone."""
    model = nn.Sequential(row.dense())
    if row.method:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random weights lose most of their norm
            decompose(model, rank=row.ranks, method=row.method, progress=False)
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def _widths(layers: Sequence[nn.Module]) -> list[int]:
    sizes = [
        (layer.in_channels, layer.out_channels)
        if isinstance(layer, nn.Conv2d)
        else (layer.in_features, layer.out_features)
        for layer in layers
    ]
    return [sizes[0][0], *(n_out for _, n_out in sizes)]


def _name(layer: nn.Module) -> str:
    if not isinstance(layer, nn.Conv2d):
        return "linear"
    kernel = " x ".join(map(str, layer.kernel_size))
    return f"depthwise\n{kernel}" if _is_depthwise(layer) else kernel


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups > 1


def draw_decompositions(path: Path) -> None:
    """A dense convolution, the layers that each method puts in its place, and the same of a linear layer."""
    torch.manual_seed(0)
    figure = _figure(8.6, 0.78 * len(ROWS))
    axes = figure.subplots()
    n_dense = 0
    for place, row in enumerate(ROWS):
        layers = chain(row)
        n_weights = sum(layer.weight.numel() for layer in layers)
        n_dense = n_dense if row.method else n_weights
        _draw_chain(axes, -place, layers, row)
        name = row.method or f"dense {'linear layer' if isinstance(layers[0], nn.Linear) else '3 x 3 convolution'}"
        axes.text(-0.15, -place, name, ha="right", va="center", color=INK, weight="bold")
        share = f" ({n_weights / n_dense:.0%})" if row.method else ""
        axes.text(4.15, -place, f"{n_weights:,}{share}", va="center", color=INK)
    axes.text(4.15, 0.62, "weights", color=INK, weight="bold")
    axes.text(2, 0.62, "layers from left to right, and the channels between them", ha="center", color=INK)
    axes.set(xlim=(-1.5, 5), ylim=(-len(ROWS) + 0.6, 0.8))
    axes.axis("off")
    _save(figure, path)


def _draw_chain(axes: Axes, middle: float, layers: Sequence[nn.Module], row: Drawn) -> None:
    """Bars as high as there are channels, and the layers between them."""
    widths, letters = _widths(layers), row.letters.split()
    places = [4 * i / len(layers) for i in range(len(widths))]
    halves = [0.29 * width / max(widths) for width in widths]
    for i, layer in enumerate(layers):
        half = torch.tensor(halves[i : i + 2]).numpy()
        colour = ORANGE if _is_depthwise(layer) else SKY if row.method else GREY
        axes.fill_between(places[i : i + 2], middle - half, middle + half, color=colour, alpha=0.35, linewidth=0)
        axes.text((places[i] + places[i + 1]) / 2, middle, _name(layer), ha="center", va="center", color=INK)
    for i, (x, half, width) in enumerate(zip(places, halves, widths, strict=True)):
        axes.plot([x, x], [middle - half, middle + half], color=BLUE, linewidth=3, solid_capstyle="butt")
        letter = f"{letters[i - 1]} = " if 0 < i <= len(letters) else ""
        axes.text(x, middle + 0.33, f"{letter}{width:,}", ha="center", color=BLUE, weight="bold")


PARTS = {
    "context": ("CUDA's context and cuBLAS", GREY),
    "weights": ("weights", BLUE),
    "gradients": ("gradients", SKY),
    "optimizer": ("Adam's moments", GREEN),
    "activations": ("activations and batch", ORANGE),
    "temporaries": ("temporaries", PINK),
    "allocator": ("allocator: rounding, fragments", FAINT),
}


def draw_card(path: Path) -> None:
    """The parts of a 24 GiB card at the peak of a step, without a plan and under a budget."""
    from matplotlib.patches import Patch

    shown = uses()
    card = shown[0].card
    figure = _figure(8.6, 3.7)
    axes = figure.subplots()
    for place, use in enumerate(shown):
        _draw_use(axes, 1 - place, use)
    for gib, text, side in (
        (card.memory_bytes / GIB, f"CUDA reports {card.memory_bytes / GIB:.1f} GiB", "left"),
        (24.0, "24 GiB by name", "right"),
    ):
        axes.axvline(gib, 0, 0.86, color=RED, linewidth=1.2, linestyle="--")
        axes.text(gib, 1.62 + 0.17 * (side == "right"), text, ha="right", color=RED)
    axes.set_yticks([1, 0], [use.name for use in shown])
    axes.set_xlabel("GiB at the peak of a step, predicted", color=INK)
    axes.set(ylim=(-0.75, 1.9), xlim=(0, None))
    _plain(axes, "x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, label=name) for name, colour in PARTS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=9)
    _save(figure, path)


def _draw_use(axes: Axes, place: float, use: Use) -> None:
    left = 0.0
    for part, (_, colour) in PARTS.items():
        gib = getattr(use, part) / GIB
        axes.barh(place, gib, 0.5, left, color=colour, edgecolor=INK, linewidth=0.4)
        if gib > 0.4:
            is_wide = gib > 0.8
            ink = "white" if is_wide and colour in (BLUE, GREEN) else "black"
            height = place if is_wide else place + 0.33
            axes.text(left + gib / 2, height, f"{gib:.1f}", ha="center", va="center", color=ink, fontsize=9)
        left += gib
    if use.budget_bytes:
        first, last = use.context / GIB, (use.context + use.budget_bytes) / GIB
        axes.annotate("", (first, place - 0.38), (last, place - 0.38), arrowprops={"arrowstyle": "<->", "color": INK})
        text = f"the budget, {use.budget_bytes / GIB:.1f} GiB: {use.budget_share:.0%} of the reported memory"
        axes.text((first + last) / 2, place - 0.58, text, ha="center", color=INK, fontsize=9)


def draw_accuracy(path: Path) -> None:
    """Accuracy after a cut: the median over the seeds, and from the worst to the best of them."""
    rows = Figures((DATA / "accuracy_curve.json").read_text(), accuracy_curve.BENCHMARK.parts).rows(accuracy_curve.Row)
    figure = _figure(8, 4.2)
    axes = figure.subplots()
    styles = (("o", BLUE), ("s", GREEN), ("D", PINK), ("^", RED))
    for (way, found), (marker, colour) in zip(accuracy_curve.by_way(rows).items(), styles, strict=True):
        every = list(zip(*map(accuracy_curve.curve, found), strict=True))
        at = range(len(every))
        axes.fill_between(at, list(map(min, every)), list(map(max, every)), color=colour, alpha=0.15, linewidth=0)
        axes.plot(at, accuracy_curve.medians(found), marker=marker, markersize=5, color=colour, label=way)
    axes.set_xticks(range(len(accuracy_curve.POINTS)), accuracy_curve.POINTS)
    axes.set_ylabel("accuracy on held-out digits (%)", color=INK)
    _plain(axes, "y")
    axes.legend(frameon=False, loc="lower right", labelcolor=INK)
    _save(figure, path)


def draw_cards(path: Path, data: Path = DATA / "cards.json") -> None:
    """The largest batch of each network on each card, as a multiple of the plain one.

    Args:
        path: Where the picture goes.
        data: JSON with ``rows``: ``network``, ``device``, ``plain_batch``, ``batch`` and, where known, ``time_ratio``.
    """
    rows: list[dict[str, Any]] = json.loads(data.read_text())["rows"]
    figure = _figure(8, 1 + 0.62 * len(rows))
    axes = figure.subplots()
    times = [row["batch"] / max(row["plain_batch"], 1) for row in rows]
    for place, (row, larger) in enumerate(zip(rows, times, strict=True)):
        plain = row["plain_batch"]
        axes.barh(place - 0.2, min(plain, 1), 0.36, color=GREY, label="" if place else "plain PyTorch")
        axes.barh(place + 0.2, larger, 0.36, color=BLUE, label="" if place else "CTDRCallback")
        axes.text(min(plain, 1), place - 0.2, f" {plain:,}" if plain else " does not fit", va="center", color=INK)
        cost = f", time x{row['time_ratio']:.2f}" if row.get("time_ratio") else ""
        axes.text(larger, place + 0.2, f" {row['batch']:,}{cost}", va="center", color=INK)
    axes.set_yticks(range(len(rows)), [f"{row['network']}\n{row['device']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(times))
    axes.set_xlabel("largest batch, as a multiple of the plain one (its size at the bar)", color=INK)
    _plain(axes, "x")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, labelcolor=INK)
    _save(figure, path)


def draw_surface(path: Path, data: Path = DATA / "ablation.json") -> None:
    """Time over shares of parameters and limits of memory, a panel a network and batch; grey where no plan fits.

    Args:
        path: Where the picture goes.
        data: JSON of the ablation.
    """
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    # half the dense step's time is green, twice as much orange
    colours, level = LinearSegmentedColormap.from_list("times", [GREEN, "white", ORANGE]), TwoSlopeNorm(1.0, 0.5, 2.0)
    figures = Figures(data.read_text(), ablation.BENCHMARK.parts)
    rows = [row for row in figures.rows(ablation.Cell) if row.part == ablation.SURFACE]
    nets, batches, shares, limits = (
        list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("net", "batch", "share", "limit")
    )
    figure = _figure(3 * len(nets), 0.6 + 2.1 * len(batches))
    panels = figure.subplots(len(batches), len(nets), squeeze=False, sharex=True, sharey=True)
    for row in rows:
        axes = panels[batches.index(row.batch)][nets.index(row.net)]
        colour = colours(level(row.slowdown)) if row.fits else FAINT
        place = limits.index(row.limit), shares.index(row.share)
        axes.barh(place[1], 1, 1, place[0] - 0.5, color=colour, edgecolor="white", linewidth=1)
        axes.text(*place, f"x{row.slowdown:.2f}" if row.fits else "-", ha="center", va="center", fontsize=8.5)
        axes.set_title(f"{row.net}, batch x{row.batch:g}", fontsize=10, color=INK)
    for axes in panels.flat:
        axes.set_xticks(range(len(limits)), [f"{limit:g}" for limit in limits])
        axes.set_yticks(range(len(shares)), [f"{share:g}" for share in shares])
        axes.tick_params(length=0, labelcolor=INK)
        axes.spines[:].set_visible(False)
    figure.supxlabel("limit, as a share of the dense peak at the network's own batch", fontsize=9.5, color=INK)
    figure.supylabel("share of parameters", fontsize=9.5, color=INK)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Axes, along: str) -> None:
    axes.grid(axis=along, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=INK)
    axes.tick_params(width=0.6, color=INK, labelcolor=INK)


def _save(figure: Figure, path: Path) -> None:
    """The same bytes for the same picture, and white paper for readers in dark mode."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


PICTURES: dict[str, Callable[[Path], None]] = {
    "decompositions": draw_decompositions,
    "card": draw_card,
    "accuracy": draw_accuracy,
    "cards": draw_cards,
    "surface": draw_surface,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw.

    Returns:
        0.
    """
    parser = ArgumentParser(prog="python -m benchmarks.drawings", description="Pictures of the documents.")
    parser.add_argument("pictures", nargs="*", choices=[*PICTURES, []], help="all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "img")
    options = parser.parse_args(arguments)
    for name in options.pictures or PICTURES:
        PICTURES[name](options.folder / f"{name}.svg")
        print(options.folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
