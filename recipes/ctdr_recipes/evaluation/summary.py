"""Five sentences of the evaluation, made of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ctdr_recipes.evaluation.predicted import CLOSE
from ctdr_recipes.evaluation.rows import Largest, Row
from ctdr_recipes.evaluation.techniques import (
    BUDGET_SHARE,
    CHECKPOINTED,
    CTDR,
    DECOMPOSED,
    DENSE,
    EXACT,
    LIMITS,
    OFFLOADED,
    RECOMPUTED,
)
from ctdr_recipes.evaluation.verdicts import LOSES, TIES, WINS, by_net, compared, keeps_promise, tally


def takeaways(predicted: Sequence[Row], batches: Sequence[Largest], measured: Sequence[Row]) -> str:
    """Sentences as a list.

    Args:
        predicted: Rows at all limits.
        batches: The largest ones.
        measured: Rows at small sizes.
    """
    sentences = [*_of_predictions(predicted), *_of_batches(predicted, batches), *_of_measurements(measured)]
    return "".join(f"{i}. {sentence}\n" for i, sentence in enumerate(sentences, 1))


def _of_predictions(rows: Sequence[Row]) -> Iterator[str]:
    nets = {net: of for net, of in by_net(rows).items() if of.keys() >= {EXACT, CTDR}}
    if not nets:
        return
    exact, ranks = ([of[name] for of in nets.values() if of[name].fits] for name in (EXACT, CTDR))
    times = sorted(row.seconds / nets[row.net][DENSE].seconds for row in exact)
    spread = f", at x{times[0]:.2f} to x{times[-1]:.2f} of the time (median x{median(times):.2f})" if times else ""
    ours = f"Without a cut, CTDR keeps to {BUDGET_SHARE:.0%} of the dense peak"
    yield f"{ours} on {len(exact)} of {len(nets)} networks{spread}."
    kept = sum(keeps_promise(row, nets[row.net][DENSE]) for row in ranks)
    yield (
        f"With a quarter of each layer's parameters, it does so on {len(ranks)} of {len(nets)}, and on {kept} it is no "
        "slower than the dense step."
    )
    counted = {rival: tally(rows, EXACT, rival, LIMITS) for rival in (CHECKPOINTED, RECOMPUTED, OFFLOADED)}
    said = [f"{n[WINS]}/{n[TIES]}/{n[LOSES]} against {rival}" for rival, n in counted.items()]
    n_cells = sum(counted[OFFLOADED].values())
    yield f"Over {n_cells} pairs of network and limit, CTDR without a cut wins, ties and loses {', '.join(said)}."


def _of_batches(rows: Sequence[Row], batches: Sequence[Largest]) -> Iterator[str]:
    found = {(row.net, row.technique): row.batch_size for row in batches}
    dense = {net: of[DENSE].batch_size for net, of in by_net(rows).items()}
    nets = [net for net in dense if {(net, EXACT), (net, OFFLOADED)} <= found.keys()]
    if not nets:
        return
    ours, moved = ([found[net, name] / dense[net] for net in nets] for name in (EXACT, OFFLOADED))
    more = sum(b > (1 + CLOSE) * a for a, b in zip(ours, moved, strict=True))
    yield (
        f"Its largest batch in the dense peak is x{median(ours):.1f} the dense one in the median of {len(nets)} "
        f"networks; offloading's is x{median(moved):.1f}, and over {CLOSE:.0%} larger than CTDR's on {more}."
    )


def _of_measurements(rows: Sequence[Row]) -> Iterator[str]:
    nets = by_net(rows)
    if not nets:
        return
    kept = sum(keeps_promise(of[CTDR], of[DENSE]) for of in nets.values())
    alone = sum(compared(of[CTDR], of[DECOMPOSED]) == TIES and of[CTDR].fits for of in nets.values())
    yield (
        f"Measured on a processor at small sizes, the decomposed and planned step keeps to both limits on {kept} of "
        f"{len(nets)}; on {alone} of these decomposition alone does as well."
    )
