"""Memory over the step, with and without the plan, and who holds the peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.pages.charts import Axis, Curve, line_chart, stacked_bar
from ctdr_lightning.pages.markup import Markup, anchor, element, table
from ctdr_lightning.pages.page import section

# Together the largest 60 were 90 % of the peak or more on the nets of the tests; the rest are one grey part.
_MOST_PARTS = 60
_MOST_ROWS = 12
RowOf = Callable[[str], str]
MILLI = 1e3
TIME = Axis("time in the step (ms)", lambda value: f"{value:g}")
MEMORY = Axis("memory", format_bytes, binary=True)


def memory_section(timelines: Mapping[str, Timeline], row_of: RowOf, budget_bytes: int | None = None) -> Markup:
    """Curves over the step, and a bar for the peak of each.

    Args:
        timelines: By the name in the legend; the last one is the step that is carried out.
        row_of: From a module's path to the layer whose row tells of it.
        budget_bytes: The budget, where there is one.
    """
    curves = [curve_of(name, line, index) for index, (name, line) in enumerate(timelines.items())]
    lines = [("budget", float(budget_bytes))] if budget_bytes else []
    picture = line_chart(curves, TIME, MEMORY, lines=lines, what=f"Live memory over the step: {_spoken(timelines)}")
    note = "Predicted, tick by tick. The pointer shows the numbers."
    highest = max(line.peak_bytes for line in timelines.values())
    bars = [_peak(name, line, highest, row_of) for name, line in timelines.items()]
    return section("Memory over the step", element("p", note, class_="note"), picture, *bars)


def curve_of(name: str, line: Timeline, colour: int) -> Curve:
    """A timeline's live bytes over its milliseconds."""
    starts = line.transfers.starts_s[: len(line.bytes_at)] * MILLI
    xs, ys = [*map(float, starts), line.seconds * MILLI], [*map(float, line.bytes_at), float(line.trace.resident_bytes)]
    return Curve(name, xs, ys, steps=True, colour=colour)


def _spoken(timelines: Mapping[str, Timeline]) -> str:
    return ", ".join(f"{name} at most {format_bytes(line.peak_bytes)}" for name, line in timelines.items())


def _peak(name: str, line: Timeline, highest: int, row_of: RowOf) -> Markup:
    """The tensors at the peak: a part of the bar each, and the largest as a table."""
    alive = line.alive_at_peak()
    parts = [(f"{module}, {_op(op)}: {format_bytes(n)}", float(n), anchor(row_of(module))) for module, op, n in alive]
    rest = parts[_MOST_PARTS:]
    shown = [*parts[:_MOST_PARTS]]
    if rest:
        n_bytes = sum(size for _, size, _ in rest)
        shown.append((f"{len(rest)} smaller tensors: {format_bytes(n_bytes)}", n_bytes, ""))
    resident = float(line.trace.resident_bytes)
    shown.append((f"weights, inputs, gradients kept, optimizer: {format_bytes(resident)}", resident, ""))
    other = line.peak_bytes - sum(size for _, size, _ in shown)
    if other > 0:
        shown.append((f"replays and workspaces: {format_bytes(other)}", float(other), ""))
    when = format_seconds(float(line.transfers.starts_s[line.peak_tick])) if len(line.bytes_at) else "the start"
    said = f"{name}: {format_bytes(line.peak_bytes)} at {when}"
    bar = stacked_bar(shown, float(highest), what=f"Tensors at the peak. {said}")
    return element("div", element("p", element("b", said), ", each part a tensor"), bar, _largest(alive, row_of))


def _largest(alive: Sequence[tuple[str, str, int]], row_of: RowOf) -> Markup:
    rows = [
        (format_bytes(n), _op(op), element("a", module, href=f"#{anchor(row_of(module))}"))
        for module, op, n in alive[:_MOST_ROWS]
    ]
    return element(
        "details", element("summary", f"the largest {len(rows)} of {len(alive)} tensors"),
        table(("bytes", "operation", "layer"), rows),
    )  # fmt: skip


def _op(name: str) -> str:
    """An operation's name without its namespace and overload."""
    return name.removeprefix("aten.").rpartition(".")[0] or name
