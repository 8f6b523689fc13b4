"""One row per layer: its decomposition, and the actions for the tensors that it makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.decomposition import LayerReport
from ctdr_lightning.memory.plans.plan import Decision, Plan
from ctdr_lightning.pages.markup import Amount, Markup, anchor, element, filled_columns, foldable, table
from ctdr_lightning.pages.page import section

_HEAD = (
    "layer", "kind", "method", "ranks", "parameters", "kept", "error", "held", "recomputed", "for",
    "moved or smaller", "why",
)  # fmt: skip


def owner_of(path: str, layers: Iterable[str]) -> str:
    """The layer that a module belongs to: itself, unless it is a part of a listed one.

    Example:
        >>> owner_of("net.fc.stages.0", ["net.fc"]), owner_of("net.relu", ["net.fc"])
        ('net.fc', 'net.relu')
    """
    return next((name for name in layers if path == name or path.startswith(f"{name}.")), path)


def layer_section(layers: Sequence[LayerReport], plan: Plan | None, others: Iterable[str] = ()) -> Markup | None:
    """The table; None where nothing is known of any layer.

    Args:
        layers: The decomposed layers.
        plan: Actions for the tensors that autograd saves.
        others: Further layers that get a row, because they hold tensors at the peak.
    """
    names = [layer.name for layer in layers]
    grouped: dict[str, list[Decision]] = defaultdict(list)
    for decision in plan.decisions if plan is not None else ():
        grouped[owner_of(decision.module, names)].append(decision)
    known = {layer.name: layer for layer in layers}
    order = list(dict.fromkeys([*names, *grouped, *others]))
    if not order:
        return None
    head, rows = filled_columns(_HEAD, [_row(name, known.get(name), grouped.get(name, [])) for name in order])
    note = "A click on a column's name sorts by it. Bytes: tensors that autograd saves in the layer's forward."
    return section("Layers", element("p", note, class_="note"), table(head, rows, ids=[anchor(n) for n in order]))


def _row(name: str, layer: LayerReport | None, decisions: Sequence[Decision]) -> tuple[object, ...]:
    what: tuple[object, ...] = ("", "", "", "", "", "")
    if layer is not None:
        before, after = layer.parameters_before, layer.parameters_after
        share = Amount(after / max(before, 1), f"{after / max(before, 1):.1%}") if layer.method else ""
        shown = f"{before:,} -> {after:,}" if layer.method else f"{before:,}"
        error = Amount(layer.relative_error, f"{layer.relative_error:.4f}") if layer.method else ""
        ranks = "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}".join(map(str, layer.ranks))
        what = (foldable(layer.kind), layer.method or "dense", ranks, Amount(before, shown), share, error)
    again = [d for d in decisions if d.action.kind == "recompute"]
    away = [d for d in decisions if d.action.kind in ("offload", "compress")]
    held = [d for d in decisions if d.action.kind == "keep"]
    seconds = sum(d.seconds for d in again)
    spent = Amount(seconds, format_seconds(seconds)) if again else ""
    return (
        _named(name, decisions),
        *what,
        _bytes(held),
        _bytes(again),
        spent,
        _bytes(away),
        layer.reason if layer else "",
    )


def _bytes(decisions: Sequence[Decision]) -> object:
    n_bytes = sum(d.n_bytes for d in decisions)
    return Amount(n_bytes, format_bytes(n_bytes)) if decisions else ""


def _named(name: str, decisions: Sequence[Decision]) -> object:
    """The name, followed by the action for each of its tensors, if there is any."""
    name = name or "the step itself"
    if not decisions:
        return name
    told = element("ul", *(element("li", d.sentence()) for d in sorted(decisions, key=lambda d: -d.n_bytes)))
    return element("details", element("summary", name), told)
