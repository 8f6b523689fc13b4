"""Predicted and measured peaks and times: of plain steps foretold without a card, and of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from benchmarks.gpu_parts.cases import FULL, LARGE, MIXED, TINY, Case, Cost, card, cost, emptied, kernel_seconds, placed
from benchmarks.nets import Net
from benchmarks.steps import guided
from ctdr_lightning.basics.errors import CTDRError, first_line
from ctdr_lightning.memory import Budget, Plan, Prepared, Trace, plan, record, record_fake
from ctdr_lightning.memory.allocator.reserved import reserved_by
from ctdr_lightning.memory.recorder.gpu_workspace import cublas_bytes

SHARES = (0.6, 0.4)
PLAN_S = 1.0  # device time is short


@dataclass(frozen=True)
class Dense:
    """A plain step: foretold on fake tensors, recorded, and run. Bytes are with weights, gradients and the batch.

    Attributes:
        net: Its name.
        precision: As Lightning names it.
        fake_bytes: Peak foretold from the card's name.
        recorded_bytes: Peak of the recorded step, by the simulator.
        allocated_bytes: Measured peak.
        modelled_reserved_bytes: Reserved by the model of the allocator, from the recorded step.
        reserved_bytes: Measured.
        fake_s: Seconds foretold from the card's name.
        recorded_s: Sum of the recorded ops' seconds.
        kernels_s: Sum of the kernels' seconds by the profiler.
        seconds: Measured, steps back to back.
        host_s: Of the host for a step.
        n_ops: Of the recorded step.
        record_s: Of recording.
    """

    net: str
    precision: str
    fake_bytes: int
    recorded_bytes: int
    allocated_bytes: int
    modelled_reserved_bytes: int
    reserved_bytes: int
    fake_s: float
    recorded_s: float
    kernels_s: float
    seconds: float
    host_s: float
    n_ops: int
    record_s: float


@dataclass(frozen=True)
class Ops:
    """All ops of a kind in a step, recorded and foretold.

    Attributes:
        net: The net's name.
        precision: As Lightning names it.
        op: Name of the kind; the backward's ends in an asterisk.
        count: Recorded ones.
        foretold_count: Foretold ones.
        recorded_s: Seconds of all.
        foretold_s: The same, foretold.
        temp_bytes: The largest recorded workspace.
        foretold_temp_bytes: The same, foretold.
        out_bytes: Recorded bytes of all results.
        foretold_out_bytes: The same, foretold.
    """

    net: str
    precision: str
    op: str
    count: int
    foretold_count: int
    recorded_s: float
    foretold_s: float
    temp_bytes: int
    foretold_temp_bytes: int
    out_bytes: int
    foretold_out_bytes: int


@dataclass(frozen=True)
class Planned:
    """A plan of a step, and the step under it.

    Attributes:
        net: The net's name.
        precision: As Lightning names it.
        way: ``recorded`` or ``foretold``: the step that was planned; or a way without a plan.
        asked: Share of the plain peak above the weights.
        predicted_bytes: Peak of the plan.
        allocated_bytes: Measured.
        reserved_bytes: Measured.
        retries: Times that the allocator gave its segments back.
        predicted: Seconds of the plan over the plain step's, predicted.
        measured: The same, measured.
        plan_s: Seconds of planning.
        trouble: An error.
    """

    net: str
    precision: str
    way: str
    asked: float
    predicted_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    retries: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    plan_s: float = 0.0
    trouble: str = ""


def rows(small: bool = False) -> Iterator[Dense | Ops | Planned]:
    """Each large net in mixed precision, then the first two in full precision."""
    nets = TINY if small else LARGE
    for name, make in nets.items():
        yield from _of(name, make, MIXED if not small else FULL)
    for name in list(nets)[:2] if not small else ():
        yield from _of(name, nets[name], FULL)
        yield from _of(name, nets[name], "tf32")


def _of(name: str, make: Callable[[], Net], precision: str) -> Iterator[Dense | Ops | Planned]:
    try:
        with placed(make, precision) as case:
            foretold = _foretold(make, precision)
            dense, trace, measured = _dense(name, precision, case, foretold)
            yield dense
            if foretold is not None:
                yield from _ops(name, precision, trace, foretold)
            row = Planned(name, precision, "recorded", 0.0)
            yield from _plans(row, case, trace, SHARES, trace, measured)
            if foretold is not None:
                yield from _plans(replace(row, way="foretold"), case, foretold, SHARES[:1], trace, measured)
    except (RuntimeError, CTDRError) as error:
        yield Planned(name, precision, "", 0.0, trouble=first_line(error))


def _foretold(make: Callable[[], Net], precision: str) -> Trace | None:
    gpu = card()
    if gpu is None:
        return None
    net, inputs, forward = make()
    return record_fake(net.train(), inputs, forward, device=gpu, precision=precision)


def _dense(name: str, precision: str, case: Case, foretold: Trace | None) -> tuple[Dense, Trace, Cost]:
    case.plain()  # loads kernels, so that the recorded step is a usual one
    case.net.zero_grad(set_to_none=True)
    start = perf_counter()
    trace = record(case.step, standing=[*case.net.parameters(), *case.net.buffers()])
    record_s = perf_counter() - start
    measured = cost(case.net, case.plain)
    kernels_s = kernel_seconds(case.net, case.plain)
    gpu = card()
    fake_bytes, fake_s = 0, 0.0
    if foretold is not None and gpu is not None:
        fake_bytes, fake_s = _peak(foretold) + cublas_bytes(gpu), foretold.seconds
    dense = Dense(
        name, precision, fake_bytes, _peak(trace), measured.allocated_bytes, reserved_by(trace).reserved_bytes,
        measured.reserved_bytes, fake_s, trace.seconds, kernels_s, measured.seconds, measured.host_s, len(trace.ops),
        record_s,
    )  # fmt: skip
    return dense, trace, measured


def _ops(name: str, precision: str, recorded: Trace, foretold: Trace) -> Iterator[Ops]:
    found = [_by_op(trace) for trace in (recorded, foretold)]
    for op in sorted({*found[0], *found[1]}, key=lambda op: -found[0].get(op, (0, 0.0))[1]):
        here, there = (each.get(op, (0, 0.0, 0, 0)) for each in found)
        yield Ops(name, precision, op, *(n for pair in zip(here, there, strict=True) for n in pair))


def _by_op(trace: Trace) -> dict[str, tuple[int, float, int, int]]:
    """Count, seconds, largest workspace and bytes of results of each kind of op."""
    found: dict[str, tuple[int, float, int, int]] = {}
    for op in trace.ops:
        kind = op.name + "*" * op.backward
        count, seconds, temp, out = found.get(kind, (0, 0.0, 0, 0))
        made = sum(trace.value_bytes(v) for v in op.outputs if v >= 0)
        found[kind] = (count + 1, seconds + op.seconds, max(temp, op.temp_bytes), out + made)
    return found


def _peak(trace: Trace) -> int:
    return plan(trace, policy="keep").peak_bytes


def _plans(
    row: Planned, case: Case, of: Trace, shares: Sequence[float], trace: Trace, plain: Cost
) -> Iterator[Planned]:
    dense_bytes, step = _peak(trace), Prepared(of)
    for row in (replace(row, asked=share) for share in shares):
        limit = int(trace.resident_bytes + row.asked * (dense_bytes - trace.resident_bytes))
        try:
            start = perf_counter()
            made = plan(step, Budget(peak_bytes=limit, time_limit_s=PLAN_S))
            yield _run(row, case, made, plain, perf_counter() - start)
        except (CTDRError, RuntimeError, AssertionError) as error:
            yield replace(row, trouble=first_line(error))


def _run(row: Planned, case: Case, made: Plan, plain: Cost, plan_s: float) -> Planned:
    found = cost(case.net, guided(case.step, made))
    emptied()
    return replace(
        row,
        predicted_bytes=made.peak_bytes,
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        retries=found.retries,
        predicted=made.slowdown,
        measured=found.seconds / plain.seconds,
        plan_s=plan_s,
    )
