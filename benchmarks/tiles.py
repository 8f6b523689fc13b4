"""Least peaks with tiles and without outputs: predicted for an A100 at full size, and measured at small size.

Nothing runs of the first: steps are recorded on fake tensors. *Planned* is the floor of the unchanged step, below which
no plan goes. *Lean* is the smallest of the tried shares of the plain peak that a plan of the leaner step keeps, as the
callback would find it, with the time of that plan. *Decomposed* networks have a quarter of each layer's parameters, the
first and the last layer dense; shares and times are of the dense network's. Weights and gradients count; an optimizer
does not.

The measured ones run on this processor in one thread: their peaks by the profiler's allocation events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Benchmark, table
from benchmarks.steps import guided, in_turns, keep_freed_memory, step_peak_bytes
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import plan, record, record_fake
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.lean.choice import choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import kept_peak_bytes
from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_recipes.evaluation.nets import FULL
from ctdr_recipes.evaluation.techniques import on_meta, shapes_at

GIB, MIB = 2**30, 2**20
DEVICE = "a100"


@dataclass(frozen=True)
class Row:
    """One network at full size.

    Attributes:
        net: Its name.
        samples: Of the batch.
        way: Dense, or with decomposed layers; peaks and times are relative to the dense network's.
        plain_bytes: Predicted peak of the dense network's plain step.
        planned: The floor of the network's plans over that peak.
        lean: Smallest of the tried shares of that peak that the leaner step keeps; 1 where none is kept.
        tiles: Modules in tiles times tiles of each; empty where all run whole.
        outputs: Number of layers whose outputs are left out.
        slowdown: Predicted time of the plan at that share over the dense network's plain step.
    """

    net: str
    samples: int
    way: str
    plain_bytes: int
    planned: float
    lean: float
    tiles: str
    outputs: int
    slowdown: float


@dataclass(frozen=True)
class Longer:
    """A transformer with four times the tokens within the plain peak of the shorter step, predicted.

    Attributes:
        net: Its name.
        samples: Of the batch.
        way: Longer.
        tokens: Of a sample of the longer step.
        short_bytes: Peak of the plain step with a quarter of the tokens: the budget.
        plain_bytes: Of the plain longer step.
        planned: The floor of the longer step's plans, over the budget.
        peak: Of the planned lean step, over the budget.
        tiles: As for `Row`.
        outputs: As for `Row`.
        slowdown: Time of the planned lean step over the plain longer step's.
    """

    net: str
    samples: int
    way: str
    tokens: int
    short_bytes: int
    plain_bytes: int
    planned: float
    peak: float
    tiles: str
    outputs: int
    slowdown: float


@dataclass(frozen=True)
class Measured:
    """One network at small size under a budget.

    Attributes:
        net: Its name.
        samples: Of the batch.
        way: Measured.
        plain_bytes: Measured peak of the plain step.
        planned: The floor of its plans over that peak.
        tiles: As for `Row`.
        predicted: Of the planned step in tiles, over the plain peak.
        peak: Measured.
        slowdown: Its time over the plain step's.
        gradients: Their difference from the plain ones', relative to their norm.
    """

    net: str
    samples: int
    way: str
    plain_bytes: int
    planned: float
    tiles: str
    predicted: float
    peak: float
    slowdown: float
    gradients: float


def predicted(name: str, shares: Sequence[float], way: str = "dense") -> Row:
    """One network, dense or decomposed."""
    chosen = FULL[name]
    dense, batch = on_meta(chosen.build), chosen.batch(chosen.size, "meta")
    net = dense if way == "dense" else structure_of(dense, shapes_at(dense))

    def account(net: nn.Module, lean: LeanStep) -> BatchAccount:
        return BatchAccount(record_fake(net, batch, lean.step(chosen.step), device=DEVICE))

    of_dense = account(dense, LeanStep())
    plain = of_dense if net is dense else account(net, LeanStep())
    peak_bytes = kept_peak_bytes(of_dense)
    row = Row(name, chosen.size, way, peak_bytes, plain.floor_bytes / peak_bytes, 1.0, "", 0, 1.0)
    for share in sorted(shares, reverse=True):
        found = _kept(net, partial(account, net), plain, share, row)
        if found is None:
            break
        row = replace(found, slowdown=found.slowdown * plain.step.seconds / of_dense.step.seconds)
    return row


def _kept(
    net: nn.Module, account: Callable[[LeanStep], BatchAccount], plain: BatchAccount, share: float, row: Row
) -> Row | None:
    """The row at a share of the peak, with the time over the network's own plain one; None where it is not kept."""
    budget_bytes = int(share * row.plain_bytes)
    lean = choose_lean(net, account, budget_bytes, plain=plain)
    try:
        made = plan((lean.account if lean is not None else plain).standing, budget_bytes)
    except InfeasibleBudgetError:
        return None
    step = lean.step if lean is not None else LeanStep()
    slowdown = made.seconds / plain.step.seconds
    return replace(row, lean=share, tiles=_in_short(step), outputs=len(step.names or ()), slowdown=slowdown)


def longer(samples: int, tokens: int) -> Longer:
    """GPT-2 with so many tokens, in the plain peak of a quarter of them."""

    def of(length: int) -> tuple[nn.Module, Callable[[LeanStep], BatchAccount]]:
        net, ids = on_meta(partial(_gpt2, length)), torch.empty(samples, length, dtype=torch.long, device="meta")

        def account(lean: LeanStep) -> BatchAccount:
            step = lean.step(lambda net, ids: net(input_ids=ids, labels=ids).loss)
            return BatchAccount(record_fake(net, ids, step, device=DEVICE))

        return net, account

    budget_bytes = kept_peak_bytes(of(tokens // 4)[1](LeanStep()))
    net, account = of(tokens)
    plain = account(LeanStep())
    lean = choose_lean(net, account, budget_bytes, plain=plain)
    assert lean is not None, "the longer step fits plainly"
    made = plan(lean.account.standing, budget_bytes)
    planned, peak = plain.floor_bytes / budget_bytes, made.peak_bytes / budget_bytes
    step, slowdown = lean.step, made.seconds / plain.step.seconds
    return Longer(
        "GPT-2", samples, "longer", tokens, budget_bytes, kept_peak_bytes(plain), planned, peak, _in_short(step),
        len(step.names or ()), slowdown,
    )  # fmt: skip


def _gpt2(length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=length, use_cache=False, loss_type="ForCausalLMLoss"))


def _in_short(step: LeanStep) -> str:
    return f"{len(step.tiles)} x {max(step.tiles.values())}" if step.tiles else ""


def _small_head(name: str, width: int) -> nn.Module:
    """The convolutions of a network before a small linear layer, as weights and gradients would be most of its peak."""
    from torchvision.models import get_model

    return nn.Sequential(
        get_model(name, weights=None).features,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(width, 10),
    )


_BELOW_FLOOR = 0.9  # a budget of a share that a plan of the whole keeps would need no tiles
SMALL: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "LeNet": (FULL["LeNet"].build, 1024, (1, 28, 28)),
    "AlexNet's convolutions": (partial(_small_head, "alexnet", 256), 32, (3, 224, 224)),
    "VGG-16's convolutions": (partial(_small_head, "vgg16", 512), 8, (3, 224, 224)),
}


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def measured(name: str, share: float, rounds: int) -> Measured:
    """One network at small size."""
    torch.manual_seed(0)
    build, samples, sizes = SMALL[name]
    net, batch = build(), (torch.randn(samples, *sizes), torch.randint(10, (samples,)))

    def account(lean: LeanStep) -> BatchAccount:
        return BatchAccount(record_fake(net, batch, lean.step(_loss)))

    plain = account(LeanStep())
    standing = storage_bytes((*net.parameters(), *net.buffers(), *batch))
    peak_bytes = standing + step_peak_bytes(net, lambda: _loss(net, batch).backward())
    budget_bytes = int(min(share * peak_bytes, _BELOW_FLOOR * plain.floor_bytes))
    lean = choose_lean(net, account, budget_bytes, plain=plain)
    assert lean is not None, f"{name} does not fit {budget_bytes} bytes"
    step = lean.step.step(_loss)
    step(net, batch).backward()  # tries the modules
    net.zero_grad(set_to_none=True)
    made = plan(record(lambda: step(net, batch)), budget_bytes)
    run = guided(lambda: step(net, batch), made)
    found_bytes = standing + step_peak_bytes(net, run)
    wanted, found = (_gradients(net, each) for each in (lambda: _loss(net, batch).backward(), run))
    difference = float((found - wanted).norm() / wanted.norm())
    runs = [lambda: _gradients(net, lambda: _loss(net, batch).backward()), lambda: _gradients(net, run)]
    (_, plain_s), (_, lean_s) = in_turns(runs, rounds, warm_up=True)
    planned = plain.floor_bytes / peak_bytes
    foreseen, true = made.peak_bytes / peak_bytes, found_bytes / peak_bytes
    tiles, slowdown = _in_short(lean.step), lean_s / plain_s
    return Measured(name, samples, "measured", peak_bytes, planned, tiles, foreseen, true, slowdown, difference)


def _gradients(net: nn.Module, run: Callable[[], object]) -> Tensor:
    torch.manual_seed(1)
    net.zero_grad(set_to_none=True)
    run()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def figures(
    *,
    nets: Sequence[str] = tuple(FULL),
    decomposed: Sequence[str] = ("LeNet", "AlexNet", "VGG-16"),
    long: Sequence[int] = (8, 1),
    small: Sequence[str] = tuple(SMALL),
    shares: Sequence[float] = (0.6, 0.45, 0.3, 0.2),
    rounds: int = 5,
) -> Iterator[Row | Longer | Measured]:
    """Every network at the smallest share that it keeps, and the small ones at the second share.

    Args:
        nets: Names of those predicted at full size.
        decomposed: Of those predicted with decomposed layers.
        long: Numbers of samples of the transformer with four times the tokens.
        small: Of those measured.
        shares: Of the plain peak.
        rounds: Behind each measured time.
    """
    import_torchvision()
    for name in nets:
        yield predicted(name, shares)
    for name in decomposed:
        yield predicted(name, shares, "decomposed")
    for samples in long:
        yield longer(samples, 4096)
    keep_freed_memory()
    for name in small:
        yield measured(name, shares[1], rounds)


def _line(row: Row) -> str:
    kept = f"{row.lean:.2f} | {row.tiles or '-'} | {row.outputs or '-'} | x{row.slowdown:.2f}"
    none = "none of these | - | - | -"
    peak = f"{row.plain_bytes / GIB:.2f} GiB | {row.planned:.2f}"
    net = f"{row.net}, {row.way}, batch {row.samples}"
    return f"{net} | {peak} | {kept if row.lean < 1 else none}"


def _longer_line(row: Longer) -> str:
    peaks = f"{row.short_bytes / GIB:.2f} GiB | {row.plain_bytes / GIB:.2f} GiB | {row.planned:.2f} | {row.peak:.2f}"
    net = f"{row.net}, {row.samples} x {row.tokens} tokens"
    return f"{net} | {peaks} | {row.tiles or '-'} | {row.outputs or '-'} | x{row.slowdown:.2f}"


def _measured_line(row: Measured) -> str:
    peaks = f"{row.plain_bytes / MIB:.0f} MiB | {row.planned:.2f} | {row.predicted:.3f} | {row.peak:.3f}"
    return f"{row.net}, batch {row.samples} | {peaks} | {row.tiles} | x{row.slowdown:.2f} | {row.gradients:.0e}"


TABLE = table(Row, "network | peak | least planned | kept | modules x tiles | outputs left out | time", _line)
LONGER = table(
    Longer,
    "network | plain, a quarter of the tokens | plain | least planned, over the quarter's | lean and planned "
    "| modules x tiles | outputs left out | time",
    _longer_line,
)
MEASURED = table(
    Measured,
    "network | peak | least planned | predicted | measured | modules x tiles | time | gradients differ by",
    _measured_line,
)
BENCHMARK = Benchmark(
    "tiles",
    figures,
    {"rows": Row, "longer": Longer, "measured": Measured},
    {"table": TABLE, "longer": LONGER, "measured": MEASURED},
    key=("net", "way", "samples"),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
