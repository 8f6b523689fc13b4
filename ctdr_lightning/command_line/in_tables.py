"""Tables of the command: the times of budgets where none is given, and a saved plan layer by layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from ctdr_lightning.basics.columns import aligned
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.memory import Plan, Trace, plan, simulate
from ctdr_lightning.memory.plans.plan import Decision
from ctdr_lightning.memory.policies import Budget

# Budgets between the least peak that was found and the plain one, that one included.
_N_BUDGETS = 5
# Seconds that a search may take: a fifth of the usual. ResNet-50 and GPT-2 at full size take 7 s in all, and the least
# peak is at most a sixth above the one found in the usual time.
_TIME_LIMIT_S = 1.0
_SMALLEST_BYTES = 1024  # a tensor of less is not worth a line


def budgets(step: Trace) -> str:
    """A table of the plain peak, four budgets below it, and the least peak that a quick search finds.

    Args:
        step: With all resident bytes.
    """
    plain = simulate(step)
    rows = [(plain.peak_bytes, plain.seconds, "no plan is needed")]
    least = plan(step, Budget(seconds=math.inf, time_limit_s=_TIME_LIMIT_S))
    between = plain.peak_bytes - least.peak_bytes
    shares = [least.peak_bytes + between * share // _N_BUDGETS for share in range(_N_BUDGETS - 1, 0, -1)]
    for n_bytes in track(shares if between else [], "plan budgets", total=len(shares)):
        with suppress(InfeasibleBudgetError):  # not found in so little time
            rows.append((n_bytes, plan(step, Budget(peak_bytes=n_bytes, time_limit_s=_TIME_LIMIT_S)).wall_seconds, ""))
    if between:
        rows.append((least.peak_bytes, least.wall_seconds, "the least that a quick search found"))
    shown = [
        (format_bytes(n_bytes), f"{n_bytes / plain.peak_bytes:.2f}", f"x{seconds / plain.seconds:.2f}", note)
        for n_bytes, seconds, note in rows
    ]
    return "\n".join(aligned([("budget", "of the plain peak", "step", ""), *shown]))


def layers(made: Plan, top: int | None) -> str:
    """A plan layer by layer, with totals, and the sentences of its largest tensors.

    Args:
        made: The plan.
        top: Number of layers and of tensors; None is all of at least 1 KiB.
    """
    told = made.explain().splitlines()
    head = told[: len(told) - len(made.decisions)]
    large = sorted((d for d in made.decisions if d.n_bytes >= _SMALLEST_BYTES), key=lambda d: -d.n_bytes)
    grouped: dict[str, list[Decision]] = defaultdict(list)
    for decision in large:
        grouped[decision.module or "the step itself"].append(decision)
    order = sorted(grouped, key=lambda name: -sum(d.n_bytes for d in grouped[name]))
    rows = [_row(name, grouped[name]) for name in order[:top]]
    table = aligned([("layer", "held", "recomputed", "for", "moved or smaller"), *rows, _row("all layers", large)])
    return "\n".join([*head, "", *table, "", *(d.sentence() for d in large[:top])])


def _row(name: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    def taken(kinds: tuple[str, ...]) -> str:
        n_bytes = sum(d.n_bytes for d in decisions if d.action.kind in kinds)
        return format_bytes(n_bytes) if n_bytes else "-"

    seconds = sum(d.seconds for d in decisions if d.action.kind == "recompute")
    again, spent = taken(("recompute",)), format_seconds(seconds) if seconds else "-"
    return name, taken(("keep",)), again, spent, taken(("offload", "compress"))
