"""A 7B Llama-like model that FSDP2 shards over 8 to 1,024 cards of a named kind: largest batches, and planning time.

Predicted from one rank's step (`sharded_step`), planned by ``auto`` for all memory that torch's allocator can use on
the card. Shards are fp32, with AdamW's state; a planned step takes twice the time of a plain one at most. Nothing was
measured on a card.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from benchmarks.harness import Benchmark, table
from benchmarks.sharded_step import SEVEN_B, WIRES, Model, Step, recorded, step_s
from ctdr_lightning.basics.devices import device_model
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.command_line.planned import MOST_TIME
from ctdr_lightning.memory import Plan, Trace, plan, simulate
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import flushes_within
from ctdr_lightning.memory.largest_batch import SHARE, largest
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.traces.foreseen import foreseen

G = 2**30
FLUSH_S = 0.2  # the most that the allocator takes to give its segments back: `flushes_within`


@dataclass(frozen=True)
class Row:
    """One kind and number of cards; tokens are those of one card a second.

    Attributes:
        card: Name of the kind.
        cards: Their number.
        budget_bytes: The card's memory for torch's allocator.
        stays_bytes: Shards of weights, gradients and AdamW's state, and buffers.
        plain_batch: The largest micro-batch without a plan; 0 where not even one sample fits.
        plain_tokens: In that batch.
        block_batch: The largest with torch's checkpoint around each block.
        block_tokens: In that batch.
        same_tokens: In the same batch under a plan; None where it has none.
        plan_batch: The largest for which a plan was found.
        plan_tokens: In that batch.
        plan_s: Processor time of planning it, on one thread.
        longest_s: The longest time of planning any batch of the search.
    """

    card: str
    cards: int
    budget_bytes: int
    stays_bytes: int
    plain_batch: int
    plain_tokens: float
    block_batch: int
    block_tokens: float
    same_tokens: float | None
    plan_batch: int
    plan_tokens: float
    plan_s: float
    longest_s: float

    @property
    def place(self) -> tuple[Any, ...]:
        """Its key among the figures."""
        return Row, self.card, self.cards


class Search:
    """The largest micro-batches of a kind and number of cards.

    Two batches are recorded, and all others foreseen from these, as `max_batch` does. Segments are expandable.

    Args:
        model: The sizes.
        card: The kind.
        cards: The number.
        most: The largest micro-batch to try.
    """

    def __init__(self, model: Model, card: str, cards: int, most: int = 512) -> None:
        self.model, self.cards, self.most = model, cards, most
        self.card, self.wires = device_model(card), WIRES[card]
        self.limit_bytes = self.card.usable_bytes
        self.recorded = cache(partial(self._recorded))
        self.made: dict[int, tuple[Plan | None, float]] = {}

    def _recorded(self, batch: int, checkpointed: bool = False) -> Step:
        return recorded(self.model, batch, self.cards, self.card, checkpointed)

    def account(self, batch: int, checkpointed: bool = False) -> BatchAccount:
        """A batch's account, foreseen from those of two and four samples."""
        known = [((n,), self.recorded(n, checkpointed).account.step) for n in (2, 4)]
        step = foreseen(known, (batch,))
        account = self.recorded(batch if step is None else 2, checkpointed).account
        return account if step is None else replace(account, step=step)

    def flushes(self, trace: Trace, actions: Actions | None = None) -> int | None:
        """Number of times that a step's allocator gives segments back; None where the card has no room for the step."""
        return flushes_within(trace, actions, self.limit_bytes, expandable=True)

    def fits(self, batch: int, checkpointed: bool) -> bool:
        """Whether a batch fits without a plan."""
        whole = self.account(batch, checkpointed).whole
        return simulate(whole).peak_bytes <= self.limit_bytes and self.flushes(whole) is not None

    def most_fitting(self, checkpointed: bool) -> int:
        """The largest batch that fits without a plan."""
        return largest(lambda batch: self.fits(batch, checkpointed), 0, self.most)

    def planned(self, batch: int) -> Plan | None:
        """The plan of a batch, unless it does not fit or takes over twice the plain step's time."""
        if batch not in self.made:
            whole, begin = self.account(batch).whole, time.process_time()
            try:
                made: Plan | None = plan(whole, self.limit_bytes)
            except InfeasibleBudgetError:
                made = None
            seconds = time.process_time() - begin
            slow = made is not None and made.wall_seconds > MOST_TIME * made.trace.seconds
            served = made is not None and self.flushes(made.trace, made.actions) is not None
            self.made[batch] = made if served and not slow else None, seconds
        return self.made[batch][0]

    def tokens(self, batch: int, checkpointed: bool = False, made: Plan | None = None) -> float:
        """Tokens of a card a second."""
        if not batch:
            return 0.0
        account = self.account(batch, checkpointed)
        again_s = made.wall_seconds - made.trace.seconds if made is not None else 0.0
        flushes = self.flushes(account.whole, made.actions if made is not None else None) or 0
        seconds = step_s(account.step, self.cards, self.wires, again_s) + flushes * FLUSH_S
        return batch * self.model.tokens / seconds

    def row(self) -> Row:
        """The figures."""
        plain, block = self.most_fitting(False), self.most_fitting(True)
        above = largest(lambda n: self.account(n).floor_bytes <= self.limit_bytes, plain, self.most)
        batch = largest(lambda n: self.planned(n) is not None, plain, above, max(block, plain + 1), SHARE)
        made, same = self.planned(batch) if batch else None, self.planned(block) if block else None
        return Row(
            self.card.name, self.cards, self.limit_bytes, self.recorded(2).stays_bytes,
            plain, self.tokens(plain), block, self.tokens(block, True),
            self.tokens(block, made=same) if same is not None else None, batch, self.tokens(batch, made=made),
            self.made[batch][1] if batch else 0.0, max((s for _, s in self.made.values()), default=0.0),
        )  # fmt: skip


@dataclass(frozen=True)
class Depth:
    """Planning of one number of layers.

    Attributes:
        layers: Their number.
        cards: Ranks.
        n_ops: Of the recorded step.
        record_s: Processor time of recording, on one thread.
        plan_s: The same of planning.
        slowdown: Time of the planned step over that of the plain one, without communication.
    """

    layers: int
    cards: int
    n_ops: int
    record_s: float
    plan_s: float
    slowdown: float

    @property
    def place(self) -> tuple[Any, ...]:
        """Its key among the figures."""
        return Depth, self.layers, self.cards


def deep(model: Model, cards: int, card: str = "h100", batch: int = 8, share: float = 0.35) -> Depth:
    """Record and plan, with a share of the bytes between the floor of every plan and the plain peak."""
    begin = time.process_time()
    account = recorded(model, batch, cards, device_model(card)).account
    record_s = time.process_time() - begin
    floor, whole = account.floor_bytes, account.whole
    limit = floor + int(share * (simulate(whole).peak_bytes - floor))
    begin = time.process_time()
    made = plan(whole, limit)
    plan_s = time.process_time() - begin
    return Depth(model.layers, cards, len(whole.ops), record_s, plan_s, made.slowdown)


CARDS, DEPTHS, RANKS = (8, 64, 256, 1024), (8, 16, 32, 64), 64
PARTS = ("rows", "depths")


def figures(
    *,
    parts: Sequence[str] = PARTS,
    kinds: Sequence[str] = tuple(WIRES),
    cards: Sequence[int] = CARDS,
    layers: int = SEVEN_B.layers,
    depths: Sequence[int] = DEPTHS,
) -> Iterator[Row | Depth]:
    """The largest batches, and the planning time of models of several depths and numbers of cards.

    Args:
        parts: Of the figures.
        kinds: Of cards.
        cards: Their numbers.
        layers: Of the model whose batches are searched for.
        depths: Numbers of layers that are planned for 64 cards.
    """
    model = replace(SEVEN_B, layers=layers)
    if "rows" in parts:
        for kind in kinds:
            for n in cards:
                yield Search(model, kind, n).row()
    if "depths" in parts:
        for n in depths:
            yield deep(replace(SEVEN_B, layers=n), RANKS)
        for n in cards:
            if n != RANKS:
                yield deep(model, n)


def _cell(batch: int, tokens: float) -> str:
    return f"{batch}: {tokens:,.0f}" if batch else "does not fit"


def _line(row: Row) -> str:
    same = "not found" if row.same_tokens is None else f"{row.same_tokens:,.0f}"
    return (
        f"{row.card}, {row.budget_bytes / G:.1f} GiB | {row.cards:,} | {row.stays_bytes / G:.2f} GiB | "
        f"{_cell(row.plain_batch, row.plain_tokens)} | {_cell(row.block_batch, row.block_tokens)} | {same} | "
        f"{_cell(row.plan_batch, row.plan_tokens)} | {row.plan_s:.1f} ({row.longest_s:.1f})"
    )


BATCHES = table(
    Row,
    "card, budget | cards | stays on a card | no plan | checkpoint a block | plan, that batch | plan, its largest "
    "batch | planning, s (longest)",
    _line,
)
PLANNING = table(
    Depth,
    "layers | cards | ops | recording, s | planning, s | time of the step",
    "{layers} | {cards:,} | {n_ops:,} | {record_s:.1f} | {plan_s:.1f} | {slowdown:x.3f}",
)
BENCHMARK = Benchmark(
    "sharded",
    figures,
    {"rows": Row, "depths": Depth},
    {"batches": BATCHES, "planning": PLANNING},
    {"parts": PARTS, "kinds": tuple(WIRES)},
    key=("place",),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
