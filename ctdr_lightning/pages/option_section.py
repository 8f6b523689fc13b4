"""The options of the choice of ranks: a table, and their peaks against their times."""

from __future__ import annotations

from collections.abc import Sequence

from ctdr_lightning.joint.considered import Option
from ctdr_lightning.pages.charts import Axis, Dot, scatter
from ctdr_lightning.pages.markup import Amount, Markup, element, table
from ctdr_lightning.pages.memory_section import MEMORY
from ctdr_lightning.pages.page import section

_TIME = Axis("step in dense steps", lambda v: f"x{v:.2f}")
_OTHER, _CHOSEN = 0, 1  # colours


def option_section(options: Sequence[Option]) -> Markup | None:
    """The section; None where there was no choice.

    Args:
        options: The chosen one among them.
    """
    if not options:
        return None
    head = ["model", "parameters", "peak", "time", "loss (nats)", ""]
    reasons = [f"Chosen: {option.reason}." for option in options if option.reason]
    told = " ".join(["Predicted peaks. The loss is that of the outputs before any training.", *reasons])
    dots = [
        Dot(option.model, option.peak_bytes, option.slowdown, _CHOSEN if option.is_chosen else _OTHER)
        for option in options
        if option.slowdown
    ]
    picture = scatter(dots, MEMORY, _TIME, what="Time against the peak of each option") if len(dots) > 1 else None
    return section(
        "Options under the budget", element("p", told, class_="note"), table(head, map(_row, options)), picture
    )


def _row(option: Option) -> list[object]:
    _, model, parameters, peak, time, loss = option.cells()
    return [
        model,
        Amount(option.parameters, parameters),
        Amount(option.peak_bytes, peak),
        Amount(option.slowdown, time) if time else "no plan fits",
        Amount(option.loss, loss),
        "chosen" if option.is_chosen else "",
    ]
