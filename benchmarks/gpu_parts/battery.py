"""Bits that a step leaves under a plan and without one: nets, precisions, plans of all actions, streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu_parts.cases import SMALL, TINY, Case, device, differences, outcome, placed
from benchmarks.nets import Net
from benchmarks.steps import Run
from ctdr_lightning.basics.errors import CTDRError, first_line
from ctdr_lightning.memory import RECOMPUTE, RECOMPUTE_EACH, Plan, Recorder, Session, Tape, Trace, plan
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.policies import Budget
from ctdr_lightning.memory.simulator.actions import Actions, Compress, Offload
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "tf32", "bf16-true")
EXACT = [name for name in CODECS if CODECS[name].exact]
COSTS = [
    CodecCost(name, c.exact, c.needs, c.payload_bits, c.side_bits, c.drops_zeros)
    for name, c in ((name, CODECS[name]) for name in EXACT)
]
SHARE = 0.75  # of the bytes above the weights
LINKS = [Link(name, 2e10, 2e10, latency_s=1e-5) for name in ("host", "disk")]


@dataclass(frozen=True)
class Battery:
    """One plan of one net in one precision.

    Attributes:
        net: Its name.
        precision: As Lightning names it.
        way: The plan.
        tensors: Gradients, buffers and the generator's state.
        differing: Those that are not the plain step's to the bit.
        worst: Largest relative difference among them.
        noisy: Those in which two plain steps differ.
        noise: Largest relative difference between two plain steps.
        trouble: An error, or how the step differed from its plan.
    """

    net: str
    precision: str
    way: str
    tensors: int
    differing: int
    worst: float
    noisy: int
    noise: float
    trouble: str = ""

    @property
    def equal(self) -> bool:
        """Whether the step is the plain one, to the bit or to the plain step's own noise."""
        return not self.trouble and (not self.differing or (self.noisy > 0 and self.worst <= 10 * self.noise))


def _everything(trace: Trace) -> Actions:
    return {v: RECOMPUTE for v in trace.droppable if trace.values[v].saves}


def _mixed(trace: Trace, seed: int) -> Actions:
    """All kinds of actions, at random."""
    draw, facts = random.Random(seed), facts_of(trace)
    away = ("host", "disk") if trace.device == "cuda" else ("disk",)
    found: Actions = {}
    for v in trace.saved:
        kinds = [RECOMPUTE, RECOMPUTE_EACH] if v in trace.droppable else []
        if facts[v].movable:
            kinds += [Offload(draw.choice(away))]
            kinds += [Compress((codec,)) for codec in EXACT if CODECS[codec].needs in facts[v].kinds][:1]
        if kinds and draw.random() < 0.7:
            found[v] = draw.choice(kinds)
    return found


def _plans(trace: Trace, budget_bytes: int) -> dict[str, Callable[[], Plan]]:
    limit = Budget(trace.resident_bytes + budget_bytes, time_limit_s=1.0)
    return {
        "sqrt": partial(plan, trace, policy="sqrt"),
        "everything again": partial(plan, trace, policy=lambda *_: _everything(trace)),
        "all actions 0": partial(plan, trace, policy=lambda *_: _mixed(trace, 0)),
        "all actions 1": partial(plan, trace, policy=lambda *_: _mixed(trace, 1)),
        "auto": partial(plan, trace, limit),
    }


def _recorded(case: Case, recorder: Recorder) -> None:
    with recorder:
        case.plain()


def _guided(case: Case, choose: Callable[[], Plan]) -> None:
    with Tape(choose()) as tape:
        loss = case.step()
    loss.backward()
    if tape.diverged:
        raise RuntimeError(f"left its plan: {tape.diverged}")


def _on_a_stream(run: Run) -> None:
    """Run on a stream that is not the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def _in_session(case: Case, budget_bytes: int) -> None:
    """Two steps of a session under a budget; the second is under its plan."""
    session = Session(
        lambda trace: plan(trace, trace.resident_bytes + budget_bytes, "capuchin"), budget_bytes=budget_bytes
    )
    try:
        for _ in range(2):
            outcome(case, partial(_session_step, case, session))
    finally:
        session.abort()


def _session_step(case: Case, session: Session) -> None:
    session.begin("step")
    loss = case.step()
    session.forward_done()
    loss.backward()
    session.end()


def rows(small: bool = False) -> Iterator[Battery]:
    """Nets in precisions under plans."""
    nets = TINY if small else SMALL
    for precision in PRECISIONS if not small else PRECISIONS[:1]:
        # The first two precisions on all nets, the others on a net of convolutions and one of products.
        chosen = nets if precision in PRECISIONS[:2] else ("ResNet-50", "GPT-2")
        for name, make in ((name, nets[name]) for name in chosen):
            yield from _of(name, make, precision)


def _of(name: str, make: Callable[[], Net], precision: str) -> Iterator[Battery]:
    try:
        with placed(make, precision) as case:
            case.plain()  # loads kernels
            want = outcome(case, case.plain)
            noisy, noise = differences(outcome(case, case.plain), want)
            row = Battery(name, precision, "", len(want), 0, 0.0, noisy, noise)
            for way, run in _ways(case):
                yield _judged(case, replace(row, way=way), run, want)
    except (RuntimeError, CTDRError) as error:
        yield Battery(name, precision, "", 0, 0, 0.0, 0, 0.0, first_line(error))


def _ways(case: Case) -> Iterator[tuple[str, Run]]:
    """Ways to run a step, each to be run once before the next is asked for."""
    recorder = Recorder()
    yield "recorded", partial(_recorded, case, recorder)
    trace = recorder.trace().with_machine(LINKS, COSTS)
    budget = int(SHARE * (plan(trace, policy="keep").peak_bytes - trace.resident_bytes))
    yield "recorded under a budget", partial(_recorded, case, Recorder(evictor=Evictor(budget)))
    for way, choose in _plans(trace, budget).items():
        yield way, partial(_guided, case, choose)
    if device().type == "cuda":
        yield "sqrt on a stream", partial(_on_a_stream, partial(_guided, case, partial(plan, trace, policy="sqrt")))
    yield f"session at {SHARE}", partial(_in_session, case, budget)


def _judged(case: Case, row: Battery, run: Run, want: dict[str, torch.Tensor]) -> Battery:
    try:
        found = outcome(case, run)
        differing, worst = differences(found, want)
        return replace(row, differing=differing, worst=worst)
    except Exception as error:
        return replace(row, trouble=first_line(error))
