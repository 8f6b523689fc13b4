"""Every policy and torch's own ways to save memory, side by side: measured peak and time in one run on one thread.

Peaks are the profiler's allocation events above weights and inputs, new gradients included; times are thread time
divided by that of a plain step just before, medians over rounds in which all rows take turns, so that slow phases of
the machine cancel out. Freed memory stays with the process.
For each row of others ``auto`` is also given that row's measured peak as its budget, and the last lines tell whether it
was as small and as fast, or found no plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, thread_time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.harness import Benchmark, Figures, Table, table
from benchmarks.nets import NETS, net_rn18
from benchmarks.steps import Run, guided, keep_freed_memory, step_peak_bytes
from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory import POLICIES, Budget, Plan, Prepared, Trace, record, simulate
from ctdr_lightning.memory.traces.typical_seconds import steady

SHARES = (0.8, 0.7, 0.6, 0.54, 0.5, 0.45, 0.4)
TORCH_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
SEGMENTS = (2, 3, 4, 5, 6)
N_RECORDINGS = 7
SLACK = 1.02
MIB = 2**20


@dataclass
class Row:
    """One way to run a net's step; shares are of the plain peak and of the plain time."""

    net: str
    name: str
    asked: float | None
    peak_mib: float
    peak: float
    seconds: float
    predicted_peak: float | None = None
    predicted_seconds: float | None = None
    predicted_ops: float | None = None


@dataclass(frozen=True)
class Pair:
    """A rival on a net, and ``auto`` with the rival's measured peak for a budget, if it found a plan; as in `Row`."""

    net: str
    rival: str
    asked: float | None
    rival_peak: float
    rival_seconds: float
    peak: float | None
    seconds: float | None

    @property
    def dominated(self) -> bool:
        """Whether ``auto`` is as small, and as fast to two percent."""
        if self.peak is None or self.seconds is None:
            return False
        return self.peak <= self.rival_peak + 1e-9 and self.seconds <= self.rival_seconds * SLACK


@dataclass
class Way:
    """A step to be measured, with its plan if it has one."""

    name: str
    run: Run
    asked: float | None = None
    plan: Plan | None = None


def steady_trace(net: nn.Module, step: Callable[[], Tensor]) -> Trace:
    """A trace whose op times are medians of several recordings; the first, with cold caches, is left out."""
    traces = []
    for _ in range(N_RECORDINGS + 1):
        net.zero_grad(set_to_none=True)
        traces.append(record(step))
    return steady(traces[1:])


def of_torch(net: nn.Module, inputs: Tensor) -> Iterator[Way]:
    """Checkpoints by hand, for nets that are a sequence of blocks."""
    if not isinstance(net, nn.Sequential):
        return
    x = inputs.clone().requires_grad_()
    for segments in (n for n in SEGMENTS if n <= len(net)):
        run = partial(checkpoint_sequential, net, segments, x, use_reentrant=False)
        yield Way(f"checkpoint_sequential {segments}", lambda run=run: run().sum().backward())

    def per_block() -> None:
        y = x
        for block in net:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()

    yield Way("checkpoint per block", per_block)


def of_partitioner(net: nn.Module, inputs: Tensor, step_of: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[Way]:
    """``activation_memory_budget`` of torch's partitioner under ``torch.compile(backend="aot_eager")``."""
    import torch._functorch.config as config

    torch._dynamo.config.recompile_limit = 4 * len(TORCH_BUDGETS)
    eager = torch._dynamo.lookup_backend("aot_eager")
    for budget in TORCH_BUDGETS:

        def backend(graph: torch.fx.GraphModule, examples: list[Tensor], budget: float = budget) -> Run:
            with config.patch(activation_memory_budget=budget):
                return eager(graph, examples)

        compiled = torch.compile(net, backend=backend)
        step_of(compiled, inputs).backward()
        yield Way("activation_memory_budget", lambda c=compiled: step_of(c, inputs).backward(), budget)


def of_policies(
    prepared: Prepared,
    step: Callable[[], Tensor],
    dynamic_bytes: int,
    names: Iterable[str],
    shares: Sequence[float],
) -> Iterator[Way]:
    """Each policy that can do something here, at every share of the plain peak; a repeated plan is measured once."""
    for name in (name for name in names if name != "keep" and POLICIES[name].works_on(prepared.trace)):
        seen = []
        for share in shares:
            made = planned(prepared, int(share * dynamic_bytes), name)
            if made is not None and made.script not in seen:
                seen.append(made.script)
                yield Way(name, guided(step, made), share, made)


def planned(step: Prepared, peak_bytes: int, policy: str = "auto", **options: float) -> Plan | None:
    """A policy's plan for so many bytes above the weights; None where it finds none that fits.

    It is asked directly: for a policy that finds nothing, ``plan`` also makes ``auto``'s plan, to compare with.
    """
    limit = step.trace.resident_bytes + peak_bytes
    try:
        made = Plan(policy, POLICIES[policy](step, Budget(limit, **options)), limit)
    except CTDRError:
        return None  # nothing that fits, or no chain
    return made if made.peak_bytes <= limit else None


def measured(net: nn.Module, ways: list[Way], rounds: int) -> list[tuple[int, float]]:
    """Peak in bytes of each way, and its median time as a share of the plain step's, measured just before it."""
    peaks = [step_peak_bytes(net, way.run) for way in ways]
    shares: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, found in zip(ways, shares, strict=True):
            plain_s = seconds_of(net, ways[0].run)
            found.append(seconds_of(net, way.run) / plain_s)
    return [(peak, median(found)) for peak, found in zip(peaks, shares, strict=True)]


def seconds_of(net: nn.Module, run: Run) -> float:
    """Time of the second of two steps: the first finds the caches as another way has left them."""
    on_gpu = next(net.parameters()).is_cuda
    clock, wait = (perf_counter, torch.cuda.synchronize) if on_gpu else (thread_time, lambda: None)
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        wait()
        start = clock()
        run()
        wait()
        seconds = clock() - start
    return seconds


def row(net: str, way: Way, peak_bytes: int, seconds: float, plain_bytes: int, trace: Trace) -> Row:
    """The measured figures of one way, next to the predicted ones."""
    found = Row(net, way.name, way.asked, peak_bytes / MIB, peak_bytes / plain_bytes, seconds)
    if way.plan is not None:
        found.predicted_peak = (way.plan.peak_bytes - trace.resident_bytes) / plain_bytes
        found.predicted_seconds = way.plan.seconds / trace.seconds
        found.predicted_ops = simulate(replace(trace, python_s_per_replay=0.0), way.plan).seconds / trace.seconds
    return found


def compare(name: str, rounds: int, compiled: bool) -> tuple[list[Row], list[Pair]]:
    """Measure every way on one net, and ``auto`` with each rival's peak."""
    net, inputs, step_of = {**NETS, "RN18": net_rn18}[name]()
    step = partial(step_of, net, inputs)
    trace = steady_trace(net, step)
    plain = Way("plain", lambda: step().backward())
    dynamic_bytes = step_peak_bytes(net, plain.run)
    others = [*of_torch(net, inputs), *(of_partitioner(net, inputs, step_of) if compiled else ())]
    prepared = Prepared(trace)
    ours = list(of_policies(prepared, step, dynamic_bytes, POLICIES, SHARES))
    rivals = [*others, *(way for way in ours if way.name != "auto")]
    answers = [answer(prepared, step, step_peak_bytes(net, way.run), dynamic_bytes) for way in rivals]
    shown = [plain, *rivals, *(w for w in ours if w.name == "auto")]
    ways = [*shown, *(way for way in answers if way is not None)]
    found = measured(net, ways, rounds)
    rows = [row(name, way, *of, found[0][0], trace) for way, of in zip(ways, found, strict=True)]
    mine, theirs = iter(rows[len(shown) :]), rows[1 : 1 + len(rivals)]
    pairs = [pair(rival, way and next(mine)) for rival, way in zip(theirs, answers, strict=True)]
    return rows[: len(shown)], pairs


def pair(rival: Row, mine: Row | None) -> Pair:
    """A rival's row beside the one of ``auto``'s answer, if there is one."""
    found = (None, None) if mine is None else (mine.peak, mine.seconds)
    return Pair(rival.net, rival.name, rival.asked, rival.peak, rival.seconds, *found)


def answer(prepared: Prepared, step: Callable[[], Tensor], peak_bytes: int, dynamic_bytes: int) -> Way | None:
    """The plan of ``auto`` for a rival's measured peak; None if it finds none that fits."""
    made = planned(prepared, peak_bytes)
    return made and Way("auto", guided(step, made), peak_bytes / dynamic_bytes, made)


def rivals(pairs: Sequence[Pair]) -> str:
    """The number of rivals that ``auto`` equals on each net, and the names of the others."""
    lines = []
    for net in dict.fromkeys(pair.net for pair in pairs):
        of = [pair for pair in pairs if pair.net == net]
        ahead = [_ahead(pair) for pair in of if not pair.dominated]
        told = f"{net}: as small, and as fast to {SLACK - 1:.0%}, as {len(of) - len(ahead)} of {len(of)} rivals"
        lines.append(f"* {told}{'; ahead of it: ' if ahead else ''}{', '.join(ahead)}.\n")
    return "".join(lines)


def _ahead(pair: Pair) -> str:
    ours = "finds no plan" if pair.peak is None else f"{pair.peak:.3f}, x{pair.seconds:.3f}"
    asked = "" if pair.asked is None else f" {pair.asked:.2f}"
    return f"`{pair.rival}`{asked} ({pair.rival_peak:.3f}, x{pair.rival_seconds:.3f}; `auto` {ours})"


def figures(nets: Sequence[str] = ("R", "T"), *, rounds: int = 7, no_compile: bool = False) -> Iterator[Row | Pair]:
    """Every way on each net.

    Args:
        nets: Which.
        rounds: Behind each time.
        no_compile: Leave out activation_memory_budget.
    """
    keep_freed_memory()
    for name in nets:
        rows, pairs = compare(name, rounds, not no_compile)
        yield from (*rows, *pairs)


def _ways(net: str) -> Table:
    """Torch's ways, `rotor` and `auto` on a net."""
    hidden = {"plain", *POLICIES} - {"rotor", "auto"}
    head = f"{net} | asked | peak | time | simulated: peak | time | of the operations alone"
    line = "`{name}` | {asked:.2f} | {peak:.3f} | {seconds:x.3f} | {predicted_peak:.3f} | {predicted_seconds:x.3f}"
    shown = f"{line} | {{predicted_ops:x.3f}}"
    return table(Row, head, shown, lambda row: row.net == net and row.name not in hidden)


def _rivals(found: Figures) -> str:
    return f"{rivals(found.rows(Pair))}\n{found.run_on()}\n"


TABLES = {**{name: _ways(name) for name in (*NETS, "RN18")}, "rivals": _rivals}
BENCHMARK = Benchmark("policies", figures, {"ways": Row, "pairs": Pair}, TABLES, {"nets": (*NETS, "RN18")})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
