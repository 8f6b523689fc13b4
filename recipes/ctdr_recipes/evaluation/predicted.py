"""Predictions at the published sizes: every step is recorded on fake tensors for a named GPU, and nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import nn

from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import Trace, record_fake, simulate
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.largest_batch import largest
from ctdr_lightning.memory.lean.choice import LeanChoice, choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_recipes.evaluation.blocks import Checkpoints, checkpoints_of
from ctdr_recipes.evaluation.nets import Net
from ctdr_recipes.evaluation.rows import Anatomy, Largest, Row
from ctdr_recipes.evaluation.shares import saved_shares
from ctdr_recipes.evaluation.techniques import (
    CHECKPOINTED,
    CTDR,
    DECOMPOSED,
    DENSE,
    EXACT,
    LIMITS,
    OFFLOADED,
    RECOMPUTED,
    USUAL_S,
    Outcome,
    fastest,
    movers,
    on_meta,
    shapes_at,
    with_link,
)

_ADAM_TENSORS = 2
CLOSE = 0.04  # of the batch: the next larger one that was tried does not fit
_MOST = 1 << 20  # samples
# Some six searches a technique, most of them near the least peak, where each takes all its time. For the same reason no
# tiles are tried there: to find none takes GPT-2 minutes a batch.
_BATCH_SEARCH_S = 0.5
# Of the floor: a first guess of the least peak of a plan of ``auto``, from which batches are looked for up and down.
_ABOVE_FLOOR = 1.1


@dataclass
class Variant:
    """One network, dense or decomposed, whose steps are recorded for a GPU.

    Attributes:
        model: On the meta device.
        net: Its batches and its step.
        device: A name from the device table.
        precision: As `record_fake` takes it.
        search_s: Time for each policy's search.
        tiles: Whether CTDR may run modules in tiles.
    """

    model: nn.Module
    net: Net
    device: str
    precision: str
    search_s: float = USUAL_S
    tiles: bool = True
    _plain: tuple[int, BatchAccount, Prepared, Prepared] | None = field(default=None, repr=False)

    @cached_property
    def parameters(self) -> int:
        """Of the network."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def checkpoints(self) -> list[Checkpoints]:
        """The ways to checkpoint it."""
        return checkpoints_of(self.model)

    @cached_property
    def checkpointed(self) -> list[tuple[Checkpoints, Prepared]]:
        """Its step at the network's own batch under each of these ways."""
        return [(way, Prepared(self.trace(self.net.size, checkpoints=way))) for way in self.checkpoints]

    def trace(self, size: int, lean: LeanStep | None = None, checkpoints: Checkpoints | None = None) -> Trace:
        """A step with Adam's state, recorded anew."""
        step = self.net.step
        for changed in (lean, checkpoints):
            step = changed.step(step) if changed is not None else step
        batch = self.net.batch(size, "meta")
        trace = record_fake(self.model, batch, step, device=self.device, precision=self.precision)
        return trace.with_static(_ADAM_TENSORS * sum(p.numel() * p.element_size() for p in self.model.parameters()))

    def account(self, size: int, lean: LeanStep) -> BatchAccount:
        """The same for the search of a leaner step."""
        return BatchAccount(self.trace(size, lean))

    def plain(self, size: int) -> tuple[BatchAccount, Prepared, Prepared]:
        """The plain step of a batch: its account, the step alone, and with the host's link; the last one is kept."""
        if self._plain is None or self._plain[0] != size:
            trace = self.trace(size)
            self._plain = size, BatchAccount(trace), Prepared(trace), Prepared(with_link(trace, self.device))
        return self._plain[1:]


Way = Callable[[Variant, int, int], Outcome]


def _kept(of: Variant, size: int, limit: int) -> Outcome:
    return fastest(of.plain(size)[1], limit, ())


def _checkpointed(of: Variant, size: int, limit: int) -> Outcome:
    """The fastest way that fits; of other batches than the network's own the one of least peak there alone."""
    if size == of.net.size:
        found = [(way, fastest(step, limit, ())) for way, step in of.checkpointed]
    else:
        way, _ = min(of.checkpointed, key=lambda made: made[1].plain_peak_bytes)
        found = [(way, fastest(of.trace(size, checkpoints=way), limit, ()))]
    way, best = min(found, key=lambda made: _first_that_fits(made[1]))
    return Outcome(best.plan, best.fits, way.words)


def _first_that_fits(outcome: Outcome) -> tuple[bool, float]:
    return not outcome.fits, outcome.plan.seconds if outcome.fits else float(outcome.plan.peak_bytes)


def _recomputed(of: Variant, size: int, limit: int) -> Outcome:
    return fastest(of.plain(size)[1], limit, ("auto",), of.search_s)


def _offloaded(of: Variant, size: int, limit: int) -> Outcome:
    return fastest(of.plain(size)[2], limit, movers(), of.search_s)


def _ctdr(of: Variant, size: int, limit: int) -> Outcome:
    """A plan of ``auto`` with the host's link, of the leaner step where the callback would take one."""
    lean = _lean(of, size, limit)
    step = of.plain(size)[2] if lean is None else Prepared(with_link(lean.account.standing, of.device))
    found = fastest(step, limit, ("auto",), of.search_s)
    words = [*([in_short(lean.step)] if lean is not None else []), *([found.means] if found.means else [])]
    return Outcome(found.plan, found.fits, "; ".join(words))


def _lean(of: Variant, size: int, limit: int) -> LeanChoice | None:
    return choose_lean(of.model, partial(of.account, size), limit, plain=of.plain(size)[0], tiles=of.tiles)


def in_short(step: LeanStep) -> str:
    """A leaner step in words."""
    parts = [f"{_number('output', len(step.names))} left out"] if step.names else []
    tiled = Counter(step.tiles.values()).items()
    return "; ".join([*parts, *(f"{_number('module', n)} in {tiles} tiles" for tiles, n in tiled)])


def _number(noun: str, n: int) -> str:
    return f"{n} {noun}{'s' * (n > 1)}"


WAYS: dict[str, Way] = {
    DENSE: _kept, DECOMPOSED: _kept, CHECKPOINTED: _checkpointed, RECOMPUTED: _recomputed, OFFLOADED: _offloaded,
    EXACT: _ctdr, CTDR: _ctdr,
}  # fmt: skip


def variants(net: Net, device: str, precision: str) -> dict[str, Variant]:
    """The dense network, and the one of a quarter of each layer's parameters.

    Args:
        net: At its published size.
        device: A name from the device table, such as ``"a100"``.
        precision: As Lightning names it, or ``"tf32"``.
    """
    dense = on_meta(net.build)
    models = {DENSE: dense, DECOMPOSED: structure_of(dense, shapes_at(dense))}
    return {name: Variant(model, net, device, precision) for name, model in models.items()}


def variant_of(technique: str) -> str:
    """The network that a technique trains: dense or decomposed."""
    return DECOMPOSED if technique in (DECOMPOSED, CTDR) else DENSE


def predict(name: str, net: Net, of: dict[str, Variant], technique: str) -> Iterator[Row]:
    """One technique on one network, a row for each limit.

    Args:
        name: Of the network.
        net: At its published size.
        of: Its variants.
        technique: A key of `WAYS`.
    """
    whole, trained = dense_peak_bytes(net, of), of[variant_of(technique)]
    for share in LIMITS:
        found = WAYS[technique](trained, net.size, int(share * whole))
        yield Row(
            name, technique, "predicted", net.size, trained.parameters, found.plan.peak_bytes, found.plan.seconds,
            found.fits, share, found.means,
        )  # fmt: skip


def dense_peak_bytes(net: Net, of: dict[str, Variant]) -> int:
    """The peak of the plain dense step."""
    return of[DENSE].plain(net.size)[1].plain_peak_bytes


def anatomies(name: str, net: Net, of: dict[str, Variant]) -> list[Anatomy]:
    """Shares, floor and peak of each variant."""
    return [anatomy(name, variant, trained.plain(net.size)[1].trace) for variant, trained in of.items()]


def largest_batch(name: str, net: Net, of: dict[str, Variant], technique: str) -> Largest:
    """The largest batch found for a technique within the dense step's peak.

    Args:
        name: Of the network.
        net: At its published size.
        of: Its variants.
        technique: A key of `WAYS`.
    """
    limit, trained = dense_peak_bytes(net, of), of[variant_of(technique)]
    trained = replace(trained, search_s=_BATCH_SEARCH_S, tiles=False)
    made: dict[int, Outcome] = {}

    def fits(size: int) -> bool:
        made[size] = WAYS[technique](trained, size, limit)
        return made[size].fits

    static = trained.plain(net.size)[1].trace.resident_bytes
    a_sample = (_least_bytes(technique, trained) - static) / net.size
    found = largest(fits, 0, _MOST, max(1, int((limit - static) / a_sample)), CLOSE)
    return Largest(name, technique, found, made[found].plan.seconds if found else 0.0)


def _least_bytes(technique: str, trained: Variant) -> float:
    """About the least peak of a technique's step."""
    plain = trained.plain(trained.net.size)[0]
    if technique in (RECOMPUTED, EXACT, CTDR):
        lean = _lean(trained, trained.net.size, 1) if technique != RECOMPUTED else None
        return _ABOVE_FLOOR * (plain if lean is None else lean.account).floor_bytes
    return WAYS[technique](trained, trained.net.size, 1).plan.peak_bytes


def anatomy(name: str, variant: str, trace: Trace) -> Anatomy:
    """Shares, floor and peak of a step, from its trace."""
    plain = simulate(trace)
    shares = saved_shares(trace)
    at_peak = Counter({op.name: 1 for op in trace.ops if op.tick == plain.peak_tick})
    return Anatomy(
        net=name,
        variant=variant,
        saved_bytes=sum(trace.value_bytes(v) for v in trace.saved),
        shares=shares,
        static_share=trace.resident_bytes / plain.peak_bytes,
        floor_share=floor_bytes(trace) / plain.peak_bytes,
        peak_op=next(iter(at_peak), "the start"),
    )
