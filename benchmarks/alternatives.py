"""The callback's ways to save memory beside others: measured peak, time, gradients, and the change of the user's code.

One thread. A step is forward, backward and Adam's update, all ways at the same samples a step, from the same weights.
Peaks are true ones by the profiler, with weights, gradients, the optimizer's state and the batch; times are medians of
thread time over rounds in which all ways of a net take turns. CTDR's rows run the functions of the callback's parts:
``record``, ``plan`` and ``Tape``, with ``decompose`` for ``rank=0.25``.

The 8-bit optimizer is measured where bitsandbytes can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.harness import Benchmark, Figures, table
from benchmarks.nets import Attention, UNet
from benchmarks.steps import AdamStep, in_turns, keep_freed_memory
from ctdr_lightning import Tape, decompose, plan, record
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.torch_compiler import aot_config
from ctdr_lightning.joint.promise import promise
from ctdr_lightning.memory import Trace

Batch = tuple[Tensor, ...]
MIB = 2**20
WORDS, PARTS, LORA_RANK, SETTING = 256, 4, 8, 0.5
TIE = 0.05  # a plan that keeps everything was measured at 0.95 to 1.00 of the plain step
_ROUNDINGS = 10  # sums in another order differ by about as much as single precision from double
# The usual choice of selective checkpointing: results of products are kept, all cheaper operations run again.
KEPT = [
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]  # fmt: skip
PLAIN, BLOCKS, SELECTIVE, LORA = "plain", "checkpoint of each block", "selective checkpoint", f"LoRA, rank {LORA_RANK}"
COMPILED, EIGHT_BITS, SPLIT = "torch.compile", "8-bit Adam", f"{PARTS} smaller batches"
EXACT, CUT = "CTDR, `rank=None`, at the peak of the {}", "CTDR, `rank=0.25`, no budget"
_NOTHING_SAVED = 0.995  # of the plain peak
SHARE_OF_LORA = 0.8
ON_LORA = f"CTDR, `rank=None`, on LoRA at {SHARE_OF_LORA} of its peak"
# By the beginning of a way's name, the longest first.
CHANGES = {
    "CTDR, `rank=None`, on": "those of LoRA, and one callback",
    "CTDR, `rank=None`": "one callback",
    "CTDR, `rank=0.25`": "one callback; then fine-tuning",
    BLOCKS: "each block's call",
    SELECTIVE: "each block's call; a list of operators",
    f"{COMPILED}, setting": "one line; a private setting of torch",
    COMPILED: "one line",
    SPLIT: "the loader's batch, one argument of `Trainer`",
    EIGHT_BITS: "the optimizer",
    "LoRA": "linear layers; checkpoints hold adapters",
}


@dataclass(frozen=True)
class Row:
    """One way to train one net.

    Attributes:
        net: Its name.
        way: The name of the way.
        plain_bytes: True peak of the plain step.
        peak: True peak over it.
        slowdown: Time over the plain step's.
        gradients: Relative difference of all gradients from the plain step's; None where other parameters are trained.
        rounding: The same of the plain step's own gradients from those in double precision.
        weights: Whether the weights after two steps equal the plain ones to the bit.
        buffers: Whether the buffers do.
        setup_s: Seconds before the first update: compilation, recording and planning, decomposition.
    """

    net: str
    way: str
    plain_bytes: int
    peak: float
    slowdown: float
    gradients: float | None
    rounding: float
    weights: bool
    buffers: bool
    setup_s: float

    @property
    def training(self) -> str:
        """The gradients and the training that follows from them, beside the plain step's."""
        if self.gradients is None or self.gradients > _ROUNDINGS * self.rounding:
            return "other training"
        if self.gradients:
            return "equal up to rounding"
        if not self.weights:
            return "bit-equal, but other updates"
        return "bit-equal" if self.buffers else "bit-equal, but other running averages"

    @property
    def exact(self) -> bool:
        """Whether the training is the plain one, up to rounding."""
        return self.training in ("equal up to rounding", "bit-equal")


@dataclass
class Way(AdamStep):
    """A net trained in one way, perhaps with the gradients of smaller batches added up."""

    parts: int = 1

    def backward(self) -> None:
        """Forward and backward of all parts."""
        self.optimizer.zero_grad(set_to_none=True)
        for part in zip(*(entry.chunk(self.parts) for entry in self.batch), strict=True):
            with nullcontext() if self.plan is None else Tape(self.plan) as tape:
                loss = self.loss(self.model, part)
            assert tape is None or not tape.diverged, tape.diverged
            loss.backward(torch.full_like(loss, 1 / self.parts))

    def step(self) -> None:
        """The same and the optimizer's step."""
        self.backward()
        self.optimizer.step()


class GPT(nn.Module):
    """Blocks of attention between an embedding of bytes and a linear layer."""

    def __init__(self, blocks: int, width: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(Attention(width, width // 64) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Shape in ``(N, T)``, out ``(N, 256, T)``."""
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def gpt(blocks: int, width: int, samples: int, tokens: int) -> tuple[nn.Module, Batch]:
    """A GPT with its batch."""
    ids = torch.randint(WORDS, (samples, tokens))
    return GPT(blocks, width, tokens), (ids, ids.roll(-1, 1))


def unet(width: int, samples: int, size: int) -> tuple[nn.Module, Batch]:
    """A U-Net that labels pixels, with its batch."""
    return UNet(width, 3), (torch.randn(samples, 3, size, size), torch.randint(2, (samples, size, size)))


NETS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "GPT": partial(gpt, 4, 192, 8, 256),
    "GPT, mostly weights": partial(gpt, 4, 512, 4, 64),
    "U-Net": partial(unet, 16, 8, 96),
}


def blocks_of(net: Any) -> list[nn.Module]:
    """The parts that a person would put into checkpoints."""
    return [*net.blocks] if isinstance(net, GPT) else [*net.downs, *net.ups]


def loss(net: nn.Module, batch: Batch) -> Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(net(batch[0]), batch[1])


class Adapted(nn.Module):
    """A frozen linear layer and the product of two small trained ones (Hu et al., 2021)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(..., in)``, out ``(..., out)``."""
        return self.layer(x) + self.up(self.down(x))


def lora(way: Way) -> None:
    """Freeze the net and adapt the linear layers of its blocks."""
    way.model.requires_grad_(False)
    for block in blocks_of(way.model):
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    way.optimizer = _adam(way.model)


def _adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-5)


def checkpointed(way: Way, **options: Any) -> None:
    """Put each block into torch's checkpoint."""
    for block in blocks_of(way.model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


def compiled(way: Way, **settings: float) -> None:
    """Compile a whole step by inductor, its loss included, under settings of torch's partitioner."""

    def engine(graph: Any, inputs: Any) -> Any:  # another function each time, or dynamo would take the graph it has
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    way.loss = torch.compile(way.loss, backend=engine, fullgraph=True)
    with aot_config.patch(**settings), fresh_cache():
        way.backward()


def split(way: Way) -> None:
    """Make the batch of smaller ones."""
    way.parts = PARTS


def eight_bits(way: Way) -> None:
    """Exchange the optimizer."""
    from bitsandbytes.optim import Adam8bit

    way.optimizer = Adam8bit(way.model.parameters(), 1e-5)


def recomputed(way: Way, budget_bytes: int, *, on: Callable[[Way], None] = lambda way: None) -> None:
    """Plan another way's step for a budget, the optimizer's state included; the least plan where none fits."""
    on(way)
    trace = _trace(way)
    try:
        way.plan = plan(trace, budget_bytes)
    except InfeasibleBudgetError as error:
        way.plan = plan(trace, error.least_peak_bytes)


def _trace(way: Way) -> Trace:
    way.backward()  # the first step of a process is slower
    way.optimizer.zero_grad(set_to_none=True)
    trained = [p.nbytes for p in way.model.parameters() if p.requires_grad]
    return record(lambda: way.loss(way.model, way.batch)).with_static(2 * sum(trained))


def quarter(way: Way) -> None:
    """Decompose to a quarter, with the least peak in no more than the dense step's time."""
    decompose(way.model, 0.25, progress=False)
    way.optimizer = _adam(way.model)
    way.plan = promise(_trace(way), way.model)


WAYS: dict[str, Callable[[Way], None]] = {
    PLAIN: lambda way: None,
    BLOCKS: checkpointed,
    SELECTIVE: partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, KEPT)),
    COMPILED: compiled,
    f"{COMPILED}, setting {SETTING}": partial(compiled, activation_memory_budget=SETTING),
    SPLIT: split,
    EIGHT_BITS: eight_bits,
    LORA: lora,
}


@dataclass
class _Found:
    """A prepared way with its peak, and the state of its net after three steps."""

    way: Way
    setup_s: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    peak_bytes: int


def _found(net: nn.Module, batch: Batch, name: str, prepare: Callable[[Way], None]) -> _Found:
    way = Way(name, deepcopy(net), batch, loss)
    start_s = perf_counter()
    prepare(way)
    setup_s = perf_counter() - start_s
    for buffer, begun in zip(way.model.buffers(), net.buffers(), strict=True):
        buffer.copy_(begun)
    way.backward()
    gradients = {name: p.grad.clone() for name, p in way.model.named_parameters() if p.grad is not None}
    way.step()
    way.step()
    state = [deepcopy(dict(way.model.named_parameters())), deepcopy(dict(way.model.named_buffers()))]
    return _Found(way, setup_s, gradients, *state, way.peak_bytes())


@torch.no_grad()
def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float | None:
    """Of all together relative to their norm; None where there are others."""
    if found.keys() != wanted.keys():
        return None
    if not wanted:
        return 0.0
    ours, theirs = (torch.cat([of[name].flatten() for name in wanted]) for of in (found, wanted))
    return float((ours - theirs).norm() / theirs.norm())


def _in_double(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    exact = deepcopy(net).double()
    loss(exact, tuple(entry.double() if entry.is_floating_point() else entry for entry in batch)).backward()
    return {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}


def measured(name: str, rounds: int) -> Iterator[Row]:
    """Every way to train one net."""
    torch.manual_seed(0)
    net, batch = NETS[name]()
    has_linear = any(isinstance(layer, nn.Linear) for layer in net.modules())
    absent = {EIGHT_BITS: not find_spec("bitsandbytes"), LORA: not has_linear}
    found = {way: _found(net, batch, way, prepare) for way, prepare in WAYS.items() if not absent.get(way)}
    peaks = {way: of.peak_bytes for way, of in found.items()}
    ours = {EXACT.format(other): partial(recomputed, budget_bytes=peaks[other]) for other in (BLOCKS, SELECTIVE)}
    if has_linear:
        ours[ON_LORA] = partial(recomputed, budget_bytes=int(SHARE_OF_LORA * peaks[LORA]), on=lora)
    found |= {way: _found(net, batch, way, prepare) for way, prepare in {**ours, CUT: quarter}.items()}
    times = [thread_s for _, thread_s in in_turns([of.way.step for of in found.values()], rounds, warm_up=True)]
    plain, rounding = found[PLAIN], _difference(_in_double(net, batch), found[PLAIN].gradients)
    for (way, of), seconds in zip(found.items(), times, strict=True):
        yield Row(
            name, way, plain.peak_bytes, of.peak_bytes / plain.peak_bytes, seconds / times[0],
            _difference(of.gradients, plain.gradients), rounding, _difference(of.weights, plain.weights) == 0,
            _difference(of.buffers, plain.buffers) == 0, of.setup_s,
        )  # fmt: skip


def figures(*, nets: Sequence[str] = tuple(NETS), rounds: int = 9) -> Iterator[Row]:
    """Every way on every net.

    Args:
        nets: Their names.
        rounds: Behind each time.
    """
    keep_freed_memory()
    for name in nets:
        torch._dynamo.reset()
        yield from measured(name, rounds)


def _line(row: Row) -> str:
    change = next((text for name, text in CHANGES.items() if row.way.startswith(name)), "")
    training = "" if row.way == PLAIN else row.training
    return f"{row.net}: {row.way} | {row.peak:.2f} | x{row.slowdown:.2f} | {training} | {change} | {row.setup_s:.0f} s"


def _verdict(ours: Row, theirs: Row) -> str:
    if theirs.peak > _NOTHING_SAVED:
        return f"x{ours.slowdown:.2f} against x{theirs.slowdown:.2f} of the {theirs.way}, which saves nothing here"
    if ours.peak > theirs.peak:
        return f"no plan reaches the {theirs.peak:.2f} of the {theirs.way}, the least {ours.peak:.2f}"
    ratio = ours.slowdown / theirs.slowdown
    outcome = "a tie" if abs(ratio - 1) <= TIE else "CTDR is faster" if ratio < 1 else f"the {theirs.way} is faster"
    return f"x{ours.slowdown:.2f} against x{theirs.slowdown:.2f} of the {theirs.way}, {outcome}"


def _note(rows: Sequence[Row]) -> str:
    """The outcomes on one net."""
    by_way = {row.way: row for row in rows}
    pairs = [_verdict(by_way[EXACT.format(other)], by_way[other]) for other in (BLOCKS, SELECTIVE)]
    small, least = (min(of, key=lambda row: row.peak) for of in ([row for row in rows if row.exact], rows))
    fast = min(rows, key=lambda row: row.slowdown)
    return (
        f"* {rows[0].net}, {rows[0].plain_bytes / MIB:.0f} MiB. Time of CTDR at equal peaks: {'; '.join(pairs)}.\n"
        f"  Smallest peak: {least.way} ({least.peak:.2f}); with the plain training: {small.way} ({small.peak:.2f}).\n"
        f"  Shortest step: {fast.way} (x{fast.slowdown:.2f}).\n"
    )


def _notes(found: Figures) -> str:
    rows = found.rows(Row)
    names = dict.fromkeys(row.net for row in rows)
    return "".join(_note([row for row in rows if row.net == name]) for name in names)


HEAD = "net: way | peak | time | gradients and training | changes in your code | set up in"
BENCHMARK = Benchmark(
    "alternatives",
    figures,
    {"rows": Row},
    {"table": table(Row, HEAD, _line), "outcomes": _notes},
    choices={"nets": NETS},
    key=("net", "way"),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
