"""Rank x budget x policy on one model: peak against time, with the lower bound, on fake tensors.

    ctdr recipes run pareto --model torchvision.models:resnet50 --input 64,3,224,224 --device a100
    ctdr recipes run pareto --model my_project:net --input 8,3,64,64 --ranks 1 0.25 --budgets 0.8 0.5 --policies auto

Nothing is trained and nothing decomposed: a rank leaves each layer that share of its parameters, and only shapes count.
``FOLDER`` gets ``pareto.md``, ``pareto.csv`` and ``pareto.png``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.basics.units import MIB, format_bytes, format_seconds
from ctdr_lightning.command_line.batches import Input, from_inputs
from ctdr_lightning.command_line.named import build_model
from ctdr_lightning.command_line.steps import step_of
from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import Trace, plan, record_fake, simulate
from ctdr_recipes.csv_text import csv_of
from ctdr_recipes.evaluation.techniques import shapes_at

_COLOURS = ("#9aa0a6", "#1a73e8", "#d93025", "#188038", "#9334e6", "#e8710a")
_MARKS = "os^Dvx*"


@dataclass(frozen=True)
class Point:
    """One plan.

    Attributes:
        rank: Share of each layer's parameters; 1 is the dense model.
        budget_share: The budget over the dense plain peak.
        policy: Who planned.
        peak_bytes: Predicted peak; the least that was found where nothing fits.
        seconds: Predicted seconds; 0 where nothing fits.
        bound_seconds: No plan of recomputation for this budget is faster; 0 where no bound is known.
        fits: Whether a plan fits the budget.
        best: Whether no other point has both a lower peak and less time.
    """

    rank: float
    budget_share: float
    policy: str
    peak_bytes: int
    seconds: float
    bound_seconds: float
    fits: bool
    best: bool = False


def sweep(
    traces: dict[float, Trace], budgets: Sequence[float], policies: Sequence[str], dense_bytes: int
) -> list[Point]:
    """Plan every combination.

    Args:
        traces: The step at each rank.
        budgets: Shares of the dense plain peak.
        policies: Names.
        dense_bytes: The dense plain peak.

    Returns:
        The points; those that no other beats are marked.
    """
    turns = [(rank, share, policy) for rank in traces for share in budgets for policy in policies]
    points = [
        _point(traces[rank], rank, share, policy, dense_bytes)
        for rank, share, policy in track(turns, "plans", total=len(turns))
    ]
    return [Point(**{**asdict(point), "best": point.fits and not _beaten(point, points)}) for point in points]


def _point(trace: Trace, rank: float, share: float, policy: str, dense_bytes: int) -> Point:
    try:
        made = plan(trace, int(share * dense_bytes), policy)
    except InfeasibleBudgetError as error:
        return Point(rank, share, policy, error.least_peak_bytes, 0.0, 0.0, False)
    return Point(rank, share, policy, made.peak_bytes, made.seconds, made.bound_seconds, True)


def _beaten(point: Point, points: Sequence[Point]) -> bool:
    def value(of: Point) -> tuple[int, float]:
        return of.peak_bytes, of.seconds

    return any(
        other.fits and value(other) != value(point)
        and other.peak_bytes <= point.peak_bytes and other.seconds <= point.seconds
        for other in points
    )  # fmt: skip


def as_table(points: Sequence[Point], dense_bytes: int, dense_s: float) -> str:
    """The points as Markdown."""
    lines = [
        "| rank | budget | policy | peak | time | dense steps | above the bound | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        head = f"| {point.rank:g} | {point.budget_share:.0%} | {point.policy} | {format_bytes(point.peak_bytes)}"
        if not point.fits:
            lines.append(f"{head} | does not fit | | | |")
            continue
        gap = f"{point.seconds / point.bound_seconds - 1:.1%}" if point.bound_seconds else ""
        best = "best" if point.best else ""
        time = f"{format_seconds(point.seconds)} | {point.seconds / dense_s:.2f}"
        lines.append(f"{head} | {time} | {gap} | {best} |")
    return "\n".join(
        [f"Dense, everything kept: {format_bytes(dense_bytes)}, {format_seconds(dense_s)}.", "", *lines, ""]
    )


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Peak against time: a colour a rank, a mark a policy, the lower bound as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    fitting = [point for point in points if point.fits]
    ranks, policies = (list(dict.fromkeys(getattr(p, name) for p in points)) for name in ("rank", "policy"))
    for rank, colour in zip(ranks, _COLOURS, strict=False):
        for policy, mark in zip(policies, _MARKS, strict=False):
            own = [p for p in fitting if (p.rank, p.policy) == (rank, policy)]
            places = [p.peak_bytes / MIB for p in own], [p.seconds * 1e3 for p in own]
            axes.plot(*places, mark, color=colour, label=f"rank {rank:g}, {policy}", markersize=6)
        bounds = sorted({(p.budget_share, p.peak_bytes, p.bound_seconds) for p in fitting if p.rank == rank})
        known = [(peak / MIB, seconds * 1e3) for _, peak, seconds in bounds if seconds]
        axes.plot([x for x, _ in known], [y for _, y in known], ":", color=colour, linewidth=1)
    axes.set(xlabel="peak of a step (MiB)", ylabel="time of a step (ms)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, title="dotted: lower bound")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, print the table and write it."""
    options = _parser().parse_args(arguments)
    traces = dict(_traces(options))
    dense = simulate(traces[1.0])
    points = sweep(traces, options.budgets, options.policies, dense.peak_bytes)
    table = as_table(points, dense.peak_bytes, dense.seconds)
    write_text(options.folder / "pareto.md", table)
    write_text(options.folder / "pareto.csv", csv_of(Point, points))
    draw(
        points,
        options.folder / "pareto.png",
        f"{options.model}, {options.input[0]}, {options.device or 'this processor'}",
    )
    print(f"{table}\n{options.folder}/pareto.md, pareto.csv, pareto.png")


def _traces(options: argparse.Namespace) -> Iterator[tuple[float, Trace]]:
    """The step at each rank; the dense one comes along, as all are compared with it."""
    model, batch = build_model(options.model).train(), from_inputs([Input.read(text) for text in options.input])
    for rank in dict.fromkeys([1.0, *options.ranks]):
        twin = model if rank == 1 else structure_of(model, shapes_at(model, rank))
        states = 2 * sum(p.numel() * p.element_size() for p in twin.parameters() if p.requires_grad)
        yield (
            rank,
            record_fake(twin, batch, step_of(twin), device=options.device, precision=options.precision).with_static(
                states
            ),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, metavar="MODULE:CALLABLE", help="what builds the model")
    parser.add_argument("--input", required=True, action="append", metavar="[NAME=]SHAPE[:DTYPE]", help="its batch")
    parser.add_argument("--device", help="GPU that the step is for, such as a100; this processor by default")
    parser.add_argument("--precision", help="such as bf16-mixed; what the model sets by default")
    parser.add_argument("--ranks", nargs="+", type=float, default=[1.0, 0.5, 0.25], help="shares; 1 is dense")
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 0.7, 0.5, 0.4, 0.3], help="of the dense peak")
    parser.add_argument("--policies", nargs="+", default=["auto", "capuchin", "sqrt"])
    parser.add_argument("--folder", type=Path, default=Path("outputs/pareto"))
    return parser


if __name__ == "__main__":
    main()
