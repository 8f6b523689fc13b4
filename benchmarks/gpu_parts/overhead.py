"""The cost of the engine where nothing is saved, and torch's own ways to save memory beside plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._functorch import config as aot_config
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_parts.cases import FULL, MIXED, TINY, Case, cost, device, outcome, placed, words
from benchmarks.nets import Net, vision
from benchmarks.steps import Run, guided
from ctdr_lightning.basics.errors import CTDRError, first_line
from ctdr_lightning.memory import Budget, Session, Trace, plan, record

NETS: dict[str, Callable[[], Net]] = {
    "GPT-2 small, batch 1": partial(words, 12, 768, 1, 1024),
    "GPT-2 small, batch 8": partial(words, 12, 768, 8, 1024),
    "ResNet-50, batch 8": partial(vision, "resnet50", 8, 224),
    "ResNet-50, batch 64": partial(vision, "resnet50", 64, 224),
}


@dataclass(frozen=True)
class Overhead:
    """One way to run a step, over the plain one.

    Attributes:
        net: The net and its batch.
        way: The way.
        seconds: Of a step.
        slowdown: Over the plain step.
        host_us_per_op: Microseconds of the host beyond the plain step's, an op of the forward.
        peak: Allocated at the peak over the plain step's.
        trouble: An error.
    """

    net: str
    way: str
    seconds: float = 0.0
    slowdown: float = 0.0
    host_us_per_op: float = 0.0
    peak: float = 0.0
    trouble: str = ""


def rows(small: bool = False) -> Iterator[Overhead]:
    """Ways on each net."""
    for name, make in (TINY if small else NETS).items():
        with placed(make, FULL if small else MIXED) as case:
            yield from _of(name, case, small)


def _of(name: str, case: Case, small: bool) -> Iterator[Overhead]:
    case.plain()
    case.net.zero_grad(set_to_none=True)
    trace = record(case.step)
    n_ops = sum(not op.backward for op in trace.ops)
    plain = cost(case.net, case.plain)
    yield Overhead(name, "plain", plain.seconds, 1.0, 0.0, 1.0)
    for way, run in _ways(case, trace, small):
        try:
            found = cost(case.net, run())
        except (RuntimeError, CTDRError, AssertionError) as error:
            yield Overhead(name, way, trouble=first_line(error))
            continue
        plain = cost(case.net, case.plain, warm_up=1)  # beside the way: clocks and other load drift
        host_us = 1e6 * (found.host_s - plain.host_s) / n_ops
        yield Overhead(
            name, way, found.seconds, found.seconds / plain.seconds, host_us,
            found.allocated_bytes / plain.allocated_bytes,
        )  # fmt: skip


def _ways(case: Case, trace: Trace, small: bool) -> Iterator[tuple[str, Callable[[], Run]]]:
    yield "a session, nothing planned", lambda: _session(case, None)
    yield "tape, everything kept", lambda: guided(case.step, plan(trace, policy="keep"))
    yield "tape, sqrt", lambda: guided(case.step, plan(trace, policy="sqrt"))
    dense = plan(trace, policy="keep").peak_bytes
    for share in (0.7, 0.5):
        limit = int(trace.resident_bytes + share * (dense - trace.resident_bytes))
        yield f"auto at {share}", lambda limit=limit: guided(case.step, plan(trace, Budget(limit, time_limit_s=1.0)))
    if device().type == "cuda":
        yield "plain, captured", lambda: _captured(case, case.plain)
        yield "tape, sqrt, captured", lambda: _captured(case, guided(case.step, plan(trace, policy="sqrt")))
    if hasattr(case.net, "blocks"):
        yield "torch's checkpoint of each block", lambda: _checkpointed(case)
    if not small:
        yield "torch.compile", lambda: _compiled(case, 1.0)
        yield "torch.compile, setting 0.5", lambda: _compiled(case, 0.5)


def _session(case: Case, budget_bytes: int | None) -> Callable[[], None]:
    session = Session(lambda trace: plan(trace, policy="keep"), budget_bytes=budget_bytes, root=case.net)

    def run() -> None:
        session.begin("step")
        loss = case.step()
        session.forward_done()
        loss.backward()
        session.end()

    return run


def _captured(case: Case, run: Run) -> Run:
    """The step as a CUDA graph: replayed without any Python; gradients stay where they are."""
    want = outcome(case, case.plain)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            case.net.zero_grad(set_to_none=True)
            run()
    torch.cuda.current_stream().wait_stream(beside)
    case.net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    grads = {name: p.grad for name, p in case.net.named_parameters() if p.grad is not None}
    torch.manual_seed(7)
    graph.replay()
    other = [name for name, grad in grads.items() if not torch.equal(grad, want[name])]
    if other:
        raise RuntimeError(f"{len(other)} of {len(grads)} gradients are not the plain ones to the bit")

    def replayed(graph: torch.cuda.CUDAGraph = graph, grads: dict[str, Tensor] = grads) -> None:
        graph.replay()

    return replayed


def _checkpointed(case: Case) -> Callable[[], None]:
    blocks = case.net.blocks

    class Again(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    def run() -> None:
        case.net.blocks = nn.ModuleList(map(Again, blocks))
        try:
            case.plain()
        finally:
            case.net.blocks = blocks

    return run


def _compiled(case: Case, budget: float) -> Callable[[], None]:
    torch._dynamo.reset()
    compiled = torch.compile(case.net)

    def run() -> None:
        with aot_config.patch(activation_memory_budget=budget):
            case.precision.run(case.forward, compiled, case.inputs).backward()

    return run
