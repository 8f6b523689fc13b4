"""Every policy and torch's own ways to save memory, side by side: measured peak and time in one run on one thread.

``python -m benchmarks.policies [R T ...] [--rounds 7] [--folder FOLDER]``. Peaks are the profiler's allocation events
above weights and inputs, new gradients included; times are thread time divided by that of a plain step just before,
medians over rounds in which all rows take turns, so that slow phases of the machine cancel out. Freed memory stays with
the process.
For each row of others ``auto`` is also given that row's measured peak as its budget, and the last lines tell whether it
was as small and as fast, or found no plan.

``FOLDER/policies.json`` keeps the figures; `benchmarks.documents` makes tables of a committed copy of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.figures import markdown, measured_on, rows_of, write_figures
from benchmarks.nets import NETS, net_rn18
from benchmarks.peak import keep_freed_memory, step_peak_bytes
from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory import POLICIES, Budget, Plan, Prepared, Tape, Trace, record, simulate
from ctdr_lightning.memory.traces.typical_seconds import steady

SHARES = (0.8, 0.7, 0.6, 0.54, 0.5, 0.45, 0.4)
TORCH_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
SEGMENTS = (2, 3, 4, 5, 6)
N_RECORDINGS = 7
SLACK = 1.02
MIB = 2**20
Run = Callable[[], None]


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
    """What is measured: a step, and where one was made its plan."""

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


def guided(step: Callable[[], Tensor], made: Plan) -> Run:
    def run() -> None:
        with Tape(made) as tape:
            loss = step()
        assert not tape.diverged, tape.diverged
        loss.backward()

    return run


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


def of_policies(prepared: Prepared, step: Callable[[], Tensor], dynamic_bytes: int) -> Iterator[Way]:
    """Each policy that can do something here, at every share of the plain peak; a repeated plan is measured once."""
    for name in (name for name in POLICIES if name != "keep" and POLICIES[name].works_on(prepared.trace)):
        seen = []
        for share in SHARES:
            made = planned(prepared, int(share * dynamic_bytes), name)
            if made is not None and made.script not in seen:
                seen.append(made.script)
                yield Way(name, guided(step, made), share, made)


def planned(prepared: Prepared, peak_bytes: int, policy: str = "auto") -> Plan | None:
    """A policy's plan for so many bytes above the weights; None where it finds none that fits.

    It is asked directly: ``plan`` makes ``auto``'s plan besides for each that finds nothing, to compare with.
    """
    limit = prepared.trace.resident_bytes + peak_bytes
    try:
        made = Plan(policy, POLICIES[policy](prepared, Budget(peak_bytes=limit)), limit)
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
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        start = thread_time()
        run()
        seconds = thread_time() - start
    return seconds


def row(net: str, way: Way, peak_bytes: int, seconds: float, plain_bytes: int, trace: Trace) -> Row:
    """What was measured of one way, beside what was predicted."""
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
    ours = list(of_policies(prepared, step, dynamic_bytes))
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
    """What ``auto`` does with a rival's measured peak; None where it finds no plan that fits it."""
    made = planned(prepared, peak_bytes)
    return made and Way("auto", guided(step, made), peak_bytes / dynamic_bytes, made)


def table(text: str, part: str) -> str:
    """Of a ``policies.json`` torch's ways, `rotor` and `auto` on the net ``part``, or the ``rivals`` in words."""
    if part == "rivals":
        return f"{rivals(rows_of(text, 'pairs', Pair))}\n{measured_on(text)}\n"
    hidden = {"plain", *POLICIES} - {"rotor", "auto"}
    rows = [row for row in rows_of(text, "ways", Row) if row.net == part and row.name not in hidden]
    head = [part, "asked", "peak", "time", "simulated: peak", "time", "of the operations alone"]
    return markdown(text, [head, *map(_cells, rows)])


def _cells(row: Row) -> list[str]:
    asked = "" if row.asked is None else f"{row.asked:.2f}"
    shown = [] if row.predicted_peak is None else [f"{row.predicted_peak:.3f}"]
    shown += [f"x{s:.3f}" for s in (row.predicted_seconds, row.predicted_ops) if s is not None]
    return [f"`{row.name}`", asked, f"{row.peak:.3f}", f"x{row.seconds:.3f}", *(shown or [""] * 3)]


def rivals(pairs: Sequence[Pair]) -> str:
    """How many rivals ``auto`` equals on each net, and those that it does not."""
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


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nets", nargs="*", default=["R", "T"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true", help="leave out activation_memory_budget")
    parser.add_argument("--folder", type=Path, default=Path("outputs/policies"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    path, ways, pairs = options.folder / "policies.json", [], []
    for name in options.nets:
        rows, answered = compare(name, options.rounds, not options.no_compile)
        ways += rows
        pairs += answered
        write_figures(path, ways=ways, pairs=pairs)
        print(table(path.read_text(), name), flush=True)
    print(table(path.read_text(), "rivals"))


if __name__ == "__main__":
    main()
