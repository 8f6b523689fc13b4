"""The evaluation as Markdown and JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_recipes.evaluation.learned import Learned
from ctdr_recipes.evaluation.nets import FAMILIES, FULL
from ctdr_recipes.evaluation.rows import Anatomy, Largest, Row
from ctdr_recipes.evaluation.summary import takeaways
from ctdr_recipes.evaluation.techniques import CTDR, DECOMPOSED, DENSE, LIMITS, TECHNIQUES
from ctdr_recipes.evaluation.verdicts import LOSES, OURS, TIES, WINS, by_net, compared, keeps_promise, rivals_of, tally


@dataclass(frozen=True)
class Evaluation:
    """All that was found.

    Attributes:
        about: Machine, versions and the device that was assumed.
        rows: Predicted and measured.
        batches: The largest ones, predicted.
        anatomies: Of the recorded steps at full size.
        learned: Accuracies.
    """

    about: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    batches: tuple[Largest, ...] = ()
    anatomies: tuple[Anatomy, ...] = ()
    learned: tuple[Learned, ...] = ()

    def to_json(self) -> str:
        """As JSON, to be read by ``from_json``."""
        parts = {name: [asdict(row) for row in getattr(self, name)] for name in _KINDS}
        return json.dumps({"about": dict(self.about), **parts}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """Read the output of ``to_json``."""
        data = json.loads(text)
        parts: dict[str, Any] = {n: tuple(kind(**row) for row in data[n]) for n, kind in _KINDS.items()}
        return cls(data["about"], **parts)

    def of(self, source: str) -> list[Row]:
        """The rows that were predicted, or those that were measured."""
        return [row for row in self.rows if row.source == source]


_KINDS: dict[str, type] = {"rows": Row, "batches": Largest, "anatomies": Anatomy, "learned": Learned}


def about(found: Evaluation) -> str:
    """The machine, the versions, and what the predictions assume."""
    measures = found.learned or found.of("measured")
    said = {name: value for name, value in found.about.items() if measures or name != "measurements"}
    return "".join(f"* {name}: {value}\n" for name, value in {**said, **_days(found)}.items())


def _days(found: Evaluation) -> dict[str, str]:
    """The measurements of each day."""
    named = [*((row.day, row.net) for row in found.of("measured")), *((row.day, row.task) for row in found.learned)]
    by_day: dict[str, list[str]] = defaultdict(list)
    for day, name in named:
        by_day[day or "an unknown day"].append(name)
    return {f"measured on {day}": "; ".join(dict.fromkeys(names)) for day, names in by_day.items()}


def summary(found: Evaluation) -> str:
    """Sentences for a reader without time."""
    return takeaways(found.of("predicted"), found.batches, found.of("measured"))


def predicted(found: Evaluation) -> str:
    """Peaks and times at the published sizes, under the limit of the promise."""
    return _peaks(found.of("predicted"))


def predicted_verdicts(found: Evaluation) -> str:
    """The promise and the comparisons, of the predictions."""
    return _verdicts(found.of("predicted"))


def sweep(found: Evaluation) -> str:
    """Times at all limits."""
    rows = found.of("predicted")
    known = _known(rows)
    lines = [["network", "limit", *known]]
    found_at = {limit: by_net(rows, limit) for limit in LIMITS}
    for net in (net for net in FULL if net in found_at[LIMITS[0]]):
        for limit in LIMITS:
            of = found_at[limit][net]
            lines.append([net, f"{limit:.2f}", *(_time(of.get(name), of[DENSE]) for name in known)])
    return _table(lines)


def scores(found: Evaluation) -> str:
    """Wins, ties and losses over all networks and limits."""
    rows = found.of("predicted")
    lines = [["", "against", *(f"at {limit:.2f}" for limit in LIMITS), "at all limits"]]
    for ours in OURS:
        for rival in rivals_of(ours, _known(rows)):
            counted = [tally(rows, ours, rival, limits) for limits in (*((limit,) for limit in LIMITS), LIMITS)]
            lines.append([ours, rival, *("/".join(str(n[word]) for word in (WINS, TIES, LOSES)) for n in counted)])
    return _table(lines)


def means(found: Evaluation) -> str:
    """The means of each technique's plan under the limit of the promise."""
    nets = _sorted(by_net(found.of("predicted")))
    known = [name for name in _known(found.of("predicted")) if name != DECOMPOSED]
    lines = [["network", *known], *([net, *(_words(of.get(name)) for name in known)] for net, of in nets.items())]
    return _table(lines)


def _words(row: Row | None) -> str:
    return "-" if row is None or not row.fits else row.means or "keeps all"


def batches(found: Evaluation) -> str:
    """The largest batches, with their time a sample."""
    dense = by_net(found.of("predicted"))
    by_technique: dict[str, dict[str, Largest]] = defaultdict(dict)
    for row in found.batches:
        by_technique[row.net][row.technique] = row
    known = [name for name in TECHNIQUES if any(name in of for of in by_technique.values())]
    lines = [["network", *known]]
    for net in (net for net in FULL if net in by_technique):
        of = by_technique[net]
        lines.append([net, *(_batch(of.get(name), dense[net][DENSE]) for name in known)])
    return _table(lines)


def _batch(row: Largest | None, dense: Row) -> str:
    if row is None:
        return "not searched"
    if not row.batch_size:
        return "-"
    a_sample = row.seconds / row.batch_size / (dense.seconds / dense.batch_size)
    return f"{row.batch_size} (x{row.batch_size / dense.batch_size:.1f}), x{a_sample:.2f}"


def measured(found: Evaluation) -> str:
    """Peaks and times at small sizes."""
    return _peaks(found.of("measured"))


def measured_verdicts(found: Evaluation) -> str:
    """The promise and the comparisons, of the measurements."""
    return _verdicts(found.of("measured"))


def accuracy(found: Evaluation) -> str:
    """Accuracies in percent."""
    lines = [["task", "parameters", "dense", "decomposed", "fine-tuned", "epochs", "change"]]
    for row in found.learned:
        sizes = f"{row.parameters_before:,} -> {row.parameters_after:,}"
        change = f"{row.tuned - row.dense:+.2f}"
        lines.append(
            [row.task, sizes, f"{row.dense:.2f}", f"{row.raw:.2f}", f"{row.tuned:.2f}", str(row.epochs), change]
        )
    return _table(lines)


def anatomy(found: Evaluation) -> str:
    """Shares of saved bytes, floors."""
    lines = [["network", "family", "variant", "saved", "made by", "static", "floor"]]
    family = {net: name for name, nets in FAMILIES.items() for net in nets}
    for row in sorted(found.anatomies, key=lambda row: [*FULL].index(row.net)):
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in list(row.shares.items())[:4])
        lines.append(
            [row.net, family[row.net], row.variant, format_bytes(row.saved_bytes), shares, f"{row.static_share:.0%}",
             f"{row.floor_share:.0%}"]
        )  # fmt: skip
    return _table(lines)


PARTS: dict[str, Callable[[Evaluation], str]] = {
    function.__name__: function
    for function in (
        about, summary, predicted, predicted_verdicts, sweep, scores, means, batches, measured, measured_verdicts,
        accuracy, anatomy,
    )
}  # fmt: skip
_TITLES = {
    "predicted": "Peak and time of a step at the published sizes (predicted)",
    "batches": "Largest batch in the dense step's peak (predicted)",
    "measured": "Peak and time of a training step at small sizes (measured)",
    "accuracy": "Accuracy in percent (measured)",
    "anatomy": "What a step saves (recorded at full size)",
}


def as_markdown(found: Evaluation) -> str:
    """All of it, one part under the other."""
    whole = [about(found)]
    there = {
        "predicted": found.of("predicted"), "batches": found.batches, "measured": found.of("measured"),
        "accuracy": found.learned, "anatomy": found.anatomies,
    }  # fmt: skip
    more = {"predicted": ("predicted_verdicts", "sweep", "scores"), "measured": ("measured_verdicts",)}
    for name in (name for name, rows in there.items() if rows):
        whole += [f"## {_TITLES[name]}\n", *(PARTS[part](found) for part in (name, *more.get(name, ())))]
    return "\n".join(whole)


def _known(rows: Sequence[Row]) -> list[str]:
    """The techniques that have rows, the dense step left out."""
    there = {row.technique for row in rows}
    return [name for name in TECHNIQUES[1:] if name in there]


def _sorted(nets: Mapping[str, dict[str, Row]]) -> dict[str, dict[str, Row]]:
    return {net: nets[net] for net in FULL if net in nets}


def _peaks(rows: Sequence[Row]) -> str:
    known = _known(rows)
    lines = [["network", "batch", "dense", *known]]
    for net, of in _sorted(by_net(rows)).items():
        dense = of[DENSE]
        first = f"{format_bytes(dense.peak_bytes)}, {format_seconds(dense.seconds)}"
        lines.append([net, f"{dense.batch_size}", first, *(_against(of.get(name), dense) for name in known)])
    return _table(lines)


def _against(row: Row | None, dense: Row) -> str:
    """Peak and time over the dense step's; in brackets where the peak is above the limit."""
    if row is None:
        return ""
    cell = f"{row.peak_bytes / dense.peak_bytes:.2f}, x{row.seconds / dense.seconds:.2f}"
    return cell if row.fits else f"- ({cell})"


def _time(row: Row | None, dense: Row) -> str:
    if row is None:
        return ""
    return f"x{row.seconds / dense.seconds:.2f}" if row.fits else "-"


def _verdicts(rows: Sequence[Row]) -> str:
    return "\n".join(_verdict(rows, ours) for ours in OURS if ours in _known(rows))


def _verdict(rows: Sequence[Row], ours: str) -> str:
    rivals = rivals_of(ours, _known(rows))
    promised = ours == CTDR
    lines = [[f"{ours} against", *rivals, *(["promise"] if promised else [])]]
    for net, of in _sorted(by_net(rows)).items():
        if not of.keys() >= {ours, *rivals}:  # a run that was stopped in the midst of a network
            continue
        words = [compared(of[ours], of[rival]) for rival in rivals]
        last = [_promise(of[ours], of[DENSE])] if promised else []
        lines.append([net, *(f"**{word}**" if word == LOSES else word for word in words), *last])
    return _table(lines)


def _promise(ours: Row, dense: Row) -> str:
    if keeps_promise(ours, dense):
        return f"kept, x{ours.seconds / dense.seconds:.2f}"
    return f"**slower**, x{ours.seconds / dense.seconds:.2f}" if ours.fits else "**no plan**"


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *others = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *others))
