"""The evaluation as Markdown, CSV, JSON and a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_recipes.evaluation.learned import Learned
from ctdr_recipes.evaluation.nets import FAMILIES, FULL
from ctdr_recipes.evaluation.predicted import Anatomy, Row
from ctdr_recipes.evaluation.techniques import BUDGET_SHARE, CTDR, DENSE, TECHNIQUES

MANY_TIMES = 2.5  # what the largest batch is to gain


@dataclass(frozen=True)
class Evaluation:
    """All that was found.

    Attributes:
        about: Machine, versions and the device that was assumed.
        rows: Predicted and measured.
        anatomies: Of the recorded steps at full size.
        learned: Accuracies.
    """

    about: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    anatomies: tuple[Anatomy, ...] = ()
    learned: tuple[Learned, ...] = ()

    def to_json(self) -> str:
        """As JSON, to be read by ``from_json``."""
        return json.dumps({"about": dict(self.about), **{n: _plain(getattr(self, n)) for n in _KINDS}}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """Read the output of ``to_json``."""
        data = json.loads(text)
        parts: dict[str, Any] = {n: tuple(kind(**row) for row in data[n]) for n, kind in _KINDS.items()}
        return cls(data["about"], **parts)


_KINDS: dict[str, type] = {"rows": Row, "anatomies": Anatomy, "learned": Learned}


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def about(found: Evaluation) -> str:
    """The machine, the versions, and what the predictions assume."""
    measures = found.learned or _rows(found, "measured")
    said = {name: value for name, value in found.about.items() if measures or name != "measurements"}
    return "".join(f"* {name}: {value}\n" for name, value in {**said, **_days(found)}.items())


def _days(found: Evaluation) -> dict[str, str]:
    """The measurements of each day."""
    named = [*((row.day, row.net) for row in _rows(found, "measured")), *((row.day, row.task) for row in found.learned)]
    by_day: dict[str, list[str]] = defaultdict(list)
    for day, name in named:
        by_day[day or "an unknown day"].append(name)
    return {f"measured on {day}": "; ".join(dict.fromkeys(names)) for day, names in by_day.items()}


def predicted(found: Evaluation) -> str:
    """Peaks and times at the published sizes, and the largest batches."""
    rows = _rows(found, "predicted")
    return "\n".join([_peaks(rows), *([_batches(rows)] if any(row.largest_batch for row in rows) else [])])


def predicted_verdicts(found: Evaluation) -> str:
    """A sentence a network, of the predictions."""
    return "".join(f"{line}\n" for line in verdicts(_rows(found, "predicted")))


def measured(found: Evaluation) -> str:
    """Peaks and times at small sizes."""
    return _peaks(_rows(found, "measured"))


def measured_verdicts(found: Evaluation) -> str:
    """A sentence a network, of the measurements."""
    return "".join(f"{line}\n" for line in verdicts(_rows(found, "measured")))


def accuracy(found: Evaluation) -> str:
    """Accuracies in percent."""
    return _accuracies(found.learned)


def anatomy(found: Evaluation) -> str:
    """Shares of saved bytes, floors."""
    return _anatomy(found.anatomies)


PARTS: dict[str, Callable[[Evaluation], str]] = {
    function.__name__: function
    for function in (about, predicted, predicted_verdicts, measured, measured_verdicts, accuracy, anatomy)
}
_TITLES = {
    "predicted": "Peak and time of a step at the published sizes (predicted)",
    "measured": "Peak and time of a training step at small sizes (measured)",
    "accuracy": "Accuracy in percent (measured)",
    "anatomy": "What a step saves (recorded at full size)",
}


def as_markdown(found: Evaluation) -> str:
    """All tables that there are, each marked as predicted or measured."""
    there = {
        "predicted": _rows(found, "predicted"), "measured": _rows(found, "measured"),
        "accuracy": found.learned, "anatomy": found.anatomies,
    }  # fmt: skip
    parts = [about(found)]
    for name in (name for name, data in there.items() if data):
        parts += [f"### {_TITLES[name]}\n", PARTS[name](found)]
        if f"{name}_verdicts" in PARTS:
            parts.append(PARTS[f"{name}_verdicts"](found))
    return "\n".join(parts)


def _rows(found: Evaluation, source: str) -> list[Row]:
    return [row for row in found.rows if row.source == source]


def by_net(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows by network, in the order of the recipe, then technique."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row.net][row.technique] = row
    return {net: found[net] for net in FULL if net in found}


def _peaks(rows: Sequence[Row]) -> str:
    head = ["network", "batch", "dense", *(f"{name}" for name in TECHNIQUES[1:])]
    lines = [head, ["---"] * len(head)]
    for net, of in by_net(rows).items():
        dense = of[DENSE]
        first = f"{format_bytes(dense.peak_bytes)}, {format_seconds(dense.seconds)}"
        lines.append([net, f"{dense.batch_size}", first, *(_against(of[name], dense) for name in TECHNIQUES[1:])])
    return _table(lines)


def _against(row: Row, dense: Row) -> str:
    return f"{row.peak_bytes / dense.peak_bytes:.2f}, x{row.seconds / dense.seconds:.2f}"


def _batches(rows: Sequence[Row]) -> str:
    head = ["largest batch in the dense peak", *TECHNIQUES]
    lines = [head, ["---"] * len(head)]
    found = by_net([row for row in rows if row.largest_batch])
    lines += [[net, *(_largest(of.get(t), of[DENSE]) for t in TECHNIQUES)] for net, of in found.items()]
    gains = [of[CTDR].largest_batch / of[DENSE].batch_size for of in found.values() if CTDR in of]
    many = sum(gain >= MANY_TIMES for gain in gains)
    told = f"CTDR's batch is at least {MANY_TIMES} times the dense one on {many} of {len(gains)} networks."
    return f"{_table(lines)}\n{told}\n"


def _largest(row: Row | None, dense: Row) -> str:
    return f"{row.largest_batch} (x{row.largest_batch / dense.batch_size:.1f})" if row else "not searched"


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence a network: whether CTDR keeps the promise, and which single technique it does not beat."""
    for net, of in by_net(rows).items():
        dense, ours = of[DENSE], of[CTDR]
        words = (
            f"{ours.peak_bytes / dense.peak_bytes:.0%} of the peak in {ours.seconds / dense.seconds:.2f} dense steps"
        )
        kept = ours.fits and ours.seconds <= dense.seconds
        promise = "kept" if kept else f"**not kept** ({_why_not(ours, dense)})"
        rivals = [row for row in of.values() if row.technique not in (DENSE, CTDR) and not _beats(ours, row)]
        told = [f"{row.technique} ({_against(row, dense)})" for row in rivals]
        beaten = f"**does not beat {' and '.join(told)}**" if told else "beats each single technique"
        yield f"* {net}: {words}; promise {promise}; {beaten}."


def _why_not(ours: Row, dense: Row) -> str:
    faults = [f"no plan reaches {BUDGET_SHARE:.0%}"] if not ours.fits else []
    return ", ".join([*faults, *(["slower than dense"] if ours.seconds > dense.seconds else [])])


def _beats(ours: Row, single: Row) -> bool:
    """Whether the peak is at least a tenth lower at any time, or the time no longer at no higher a peak.

    Decomposition alone keeps its short step, at a peak that nothing lowers; it is beaten by the peak.
    """
    return ours.peak_bytes < 0.9 * single.peak_bytes or (
        ours.peak_bytes <= 1.02 * single.peak_bytes and ours.seconds <= single.seconds
    )


def _accuracies(learned: Sequence[Learned]) -> str:
    head = ["task", "parameters", "dense", "decomposed", "fine-tuned", "epochs", "change"]
    lines = [head, ["---"] * len(head)]
    for row in learned:
        sizes = f"{row.parameters_before:,} -> {row.parameters_after:,}"
        change = f"{row.tuned - row.dense:+.2f}"
        lines.append(
            [row.task, sizes, f"{row.dense:.2f}", f"{row.raw:.2f}", f"{row.tuned:.2f}", str(row.epochs), change]
        )
    return _table(lines)


def _anatomy(found: Sequence[Anatomy]) -> str:
    head = ["network", "family", "variant", "saved", "made by", "static", "floor"]
    lines = [head, ["---"] * len(head)]
    family = {net: name for name, nets in FAMILIES.items() for net in nets}
    for row in sorted(found, key=lambda row: [*FULL].index(row.net)):
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in list(row.shares.items())[:4])
        lines.append(
            [row.net, family[row.net], row.variant, format_bytes(row.saved_bytes), shares, f"{row.static_share:.0%}",
             f"{row.floor_share:.0%}"]
        )  # fmt: skip
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
