"""The page on one run, or on one plan: memory, layers, moved and recomputed tensors, progress, warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ctdr_lightning.basics.units import GIB, format_bytes, format_seconds
from ctdr_lightning.memory import Plan, simulate
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.trace import LEAN
from ctdr_lightning.pages.charts import Axis, Curve, Format, line_chart
from ctdr_lightning.pages.layer_section import layer_section, owner_of
from ctdr_lightning.pages.markup import Markup, element, filled_columns, table
from ctdr_lightning.pages.memory_section import memory_section
from ctdr_lightning.pages.option_section import option_section
from ctdr_lightning.pages.page import facts, page, section
from ctdr_lightning.pages.run_record import RunRecord

_MOST_MOVES = 40


@dataclass(frozen=True)
class RunParts:
    """The parts of a page.

    Attributes:
        record: The run.
        plan: Its memory plan; None where nothing was planned.
        dense: The dense model's step, where it was recorded.
    """

    record: RunRecord
    plan: Plan | None = None
    dense: Timeline | None = None


def run_page(parts: RunParts) -> str:
    """One run as an HTML document.

    Example:
        >>> run_page(RunParts(RunRecord("mine"))).startswith("<!DOCTYPE html>")
        True
    """
    record, plan = parts.record, parts.plan
    names = [layer.name for layer in record.layers]
    owner = partial(owner_of, layers=names)
    sections: list[Markup | None] = [facts(_headline(parts))]
    if record.events:
        sections.append(section("Events", element("ul", *(element("li", text) for text in record.events))))
    sections.append(option_section(record.options))
    if plan is not None:
        sections.append(memory_section(timelines_of(parts), owner, plan.budget_bytes))
    sections.append(layer_section(record.layers, plan, _at_peaks(parts, owner)))
    if plan is not None:
        sections.append(_elsewhere(plan))
    sections += [_progress(record), _predictions(parts), _settings(record.settings)]
    return page(record.name, _lead(parts), [part for part in sections if part is not None])


def _at_peaks(parts: RunParts, owner: Callable[[str], str]) -> list[str]:
    """The layers whose tensors are alive at one of the peaks, so that each tensor leads somewhere."""
    lines = timelines_of(parts).values() if parts.plan is not None else ()
    return list(dict.fromkeys(owner(module) for line in lines for module, _, _ in line.alive_at_peak()))


def timelines_of(parts: RunParts) -> dict[str, Timeline]:
    """The steps to compare, by name: the dense one where it is known, the plain one, the planned one."""
    assert parts.plan is not None
    plain = simulate(parts.plan.trace)
    found = {"dense model": parts.dense} if parts.dense is not None else {}
    found["everything kept"] = plain
    if not parts.plan.keeps_all:
        found[f"plan ({parts.plan.policy})"] = parts.plan.timeline
    return found


def predicted_peak_bytes(parts: RunParts) -> float:
    """The plan's peak, or the run's prediction for a whole batch: an optimizer's step may take more."""
    logged = parts.record.highest("ctdr/predicted_peak_gib")
    return max((logged or 0.0) * GIB, parts.plan.peak_bytes if parts.plan is not None else 0.0)


def _lead(parts: RunParts) -> str:
    if parts.plan is None:
        return "Nothing was planned: no step was recorded, or it fits without a plan."
    lean = parts.plan.trace.meta.get(LEAN)
    return " ".join([parts.plan.in_brief, *([lean] if lean else [])])


def _headline(parts: RunParts) -> dict[str, str]:
    record, found = parts.record, {}
    if record.parameters_after:
        found["parameters"] = f"{record.parameters_after:,}"
    if record.parameters_before > record.parameters_after > 0:
        found["times fewer than dense"] = f"{record.parameters_before / record.parameters_after:.2f}"
    if parts.plan is not None:
        found["predicted peak of a step"] = format_bytes(predicted_peak_bytes(parts))
    measured = record.highest("ctdr/peak_memory_gib")
    if measured:
        found["measured peak"] = format_bytes(measured * GIB)
    speed = record.typical("ctdr/samples_per_s")
    if speed:
        found["samples/s, median"] = f"{speed:,.0f}"
    accuracy = next((name for name in record.metrics if "acc" in name), None)
    last = record.last(accuracy) if accuracy is not None else None
    if accuracy is not None and last is not None:
        found[f"{accuracy}, last"] = f"{last:.4f}"
    return found


def _elsewhere(plan: Plan) -> Markup:
    """Tensors that are moved, compressed or recomputed: the sums, and the largest tensors."""
    decisions = [d for d in plan.decisions if d.action.kind != "keep"]
    sums: dict[str, tuple[int, int]] = {}
    for d in plan.decisions:
        n, n_bytes = sums.get(d.action.kind, (0, 0))
        sums[d.action.kind] = n + 1, n_bytes + d.n_bytes
    text = "; ".join(f"{kind}: {n} tensors, {format_bytes(b)}" for kind, (n, b) in sorted(sums.items()))
    largest = sorted(decisions, key=lambda d: -d.n_bytes)[:_MOST_MOVES]
    moved = plan.timeline.transfers
    waits = (
        f"{format_bytes(moved.moved_bytes)} leave the device; the step waits {format_seconds(moved.waits_s)}."
        if moved.moves
        else None
    )
    sentences = element("ul", *(element("li", d.sentence()) for d in largest))
    more = element("details", element("summary", f"the largest {len(largest)} of {len(decisions)}"), sentences)
    return section(
        "Moved or recomputed", element("p", text or "No tensor is saved."), element("p", waits) if waits else None,
        more if decisions else None,
    )  # fmt: skip


def _progress(record: RunRecord) -> Markup | None:
    pictures = list(_charts(record))
    return section("Over the epochs", *pictures) if pictures else None


def _charts(record: RunRecord) -> Iterator[Markup]:
    epoch, step = (Axis(name, lambda v: f"{v:g}", from_zero=False, whole=True) for name in ("epoch", "step"))
    plain = Axis("", lambda v: f"{v:.4g}", from_zero=False)
    scores = [name for name in record.metrics if "acc" in name or "loss" in name or "f1" in name]
    for kind in ("acc", "f1", "loss"):
        names = [name for name in scores if kind in name]
        curves = [Curve(name, *record.series(name), colour=index + 1) for index, name in enumerate(names)]
        if any(curve.xs for curve in curves):
            yield line_chart(curves, epoch, Axis(kind, plain.show, False), what=f"{', '.join(names)} over the epochs")
    for name, label in (("ctdr/samples_per_s", "samples/s"), ("ctdr/step_time_s", "seconds a batch")):
        curve = Curve(label, *record.series(name, "step"), colour=1)
        if len(curve.xs) > 1:
            yield line_chart([curve], step, Axis(label, plain.show), what=f"{label} over the steps")


def _predictions(parts: RunParts) -> Markup | None:
    """Predictions next to measurements."""
    rows: Sequence[Sequence[object]] = list(_compared(parts))
    note = "A step is forward and backward. A measured time is a whole batch's: data, optimizer and logging included."
    if not rows:
        return None
    head, rows = filled_columns(("", "predicted", "measured", "measured / predicted"), rows)
    told = element("p", note, class_="note") if "measured" in head else None
    return section("Predicted and measured", table(head, rows), told)


def _compared(parts: RunParts) -> Iterator[tuple[str, str, str, str]]:
    record, plan = parts.record, parts.plan
    if plan is not None:
        plain = simulate(plan.trace)
        peak, taken = record.highest("ctdr/peak_memory_gib"), record.typical("ctdr/step_time_s")
        yield _beside("peak of a step", predicted_peak_bytes(parts), (peak or 0.0) * GIB, format_bytes)
        yield _beside("time of a step", plan.wall_seconds, taken or 0.0, format_seconds)
        yield _beside("peak with everything kept", plain.peak_bytes, 0.0, format_bytes)
        yield _beside("time with everything kept", plain.seconds, 0.0, format_seconds)
        if plan.bound_seconds:
            yield _beside("least time of any such plan", plan.bound_seconds, 0.0, format_seconds)
    dense = parts.dense.peak_bytes if parts.dense is not None else record.dense_peak_bytes
    if dense:
        yield _beside("peak of the dense step", dense, 0.0, format_bytes)


def _beside(name: str, predicted: float, measured: float, show: Format) -> tuple[str, str, str, str]:
    if not measured or not predicted:
        return name, show(predicted), "", ""
    return name, show(predicted), show(measured), f"{measured / predicted:.2f}"


def _settings(settings: Mapping[str, str]) -> Markup | None:
    return section("Asked for", table(("setting", "value"), list(settings.items()))) if settings else None
