"""Runs a step plainly and under the engine, and compares everything it leaves behind, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ctdr_lightning.memory import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action, Plan, Recorder, Tape, Trace, plan, record
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.values.live_bytes import PeakMeter

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind: the loss, gradients, buffers and the RNG's state, by name."""

    tensors: dict[str, Tensor]

    def differs_from(self, other: Outcome) -> list[str]:
        """Names of what is not bit-identical."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(n for n in names if not _same(self.tensors.get(n), other.tensors.get(n)))


def noise(*shape: int, seed: int) -> Tensor:
    """Normal numbers on the suite's device, the same on each."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def rng_state() -> Tensor:
    """Of the generator of the suite's device."""
    return torch.cuda.get_rng_state() if torch.get_default_device().type == "cuda" else torch.get_rng_state()


def _copy(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return np.array_equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> np.ndarray:
    """Its bytes; numpy compares them in a third of the time that torch takes."""
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()


class Bench:
    """One model and its step, to be run again and again from the same state.

    Args:
        model: Whose gradients and buffers count.
        step: From the model to a scalar loss.
        backward: What is done with the loss.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[nn.Module], Tensor], backward: Callable[[Tensor], None] | None = None
    ) -> None:
        self.model = model
        self.step = step
        self.backward = backward or Tensor.backward
        self._buffers = {n: b.clone() for n, b in model.named_buffers()}
        self._parameters = {n: p.detach().clone() for n, p in model.named_parameters()}

    def reset(self) -> None:
        """Back to the state at construction."""
        torch.manual_seed(7)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(self._parameters[name])

    def run(self, forward: AbstractContextManager[object] | None = None, *, around: bool = False) -> Outcome:
        """One step with ``forward`` entered for the forward, or around the whole step."""
        self.reset()
        with forward or nullcontext():
            loss = self.step(self.model)
            if around:
                self.backward(loss)
        if not around:
            self.backward(loss)
        return self.outcome(loss)

    def outcome(self, loss: Tensor) -> Outcome:
        found = {"loss": loss.detach().clone(), "rng": rng_state()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"grad of {name}"] = _copy(parameter.grad)
            found[f"parameter {name}"] = _copy(parameter)
        found |= {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}
        return Outcome(found)

    def record(self) -> Trace:
        """The trace of the step."""
        self.reset()

        def step() -> Tensor:
            return self.step(self.model)

        return record(step) if self.backward is Tensor.backward else self._record()

    def _record(self) -> Trace:
        recorder = Recorder()
        with recorder:
            self.backward(self.step(self.model))
        return recorder.trace()

    def peak_bytes(self) -> int:
        """True peak of the plain step, of what the step itself allocates."""
        self.reset()
        with PeakMeter() as meter:
            self.backward(self.step(self.model))
        return meter.live.peak


def random_actions(trace: Trace, seed: int) -> dict[int, Action]:
    """A random plan: a random share of what is saved is dropped, some of the unsaved is held or cached."""
    draw = random.Random(seed)
    share = draw.random()
    again = (RECOMPUTE, RECOMPUTE_EACH)
    actions = {v: draw.choice(again) for v in trace.saved if draw.random() < share}
    unsaved = sorted(trace.droppable - set(trace.saved))
    return actions | {v: draw.choice((KEEP, *again)) for v in unsaved if draw.random() < share / 2}


def everything_dropped(trace: Trace) -> dict[int, Action]:
    """The plan that recomputes whatever may be recomputed."""
    return {v: RECOMPUTE for v in trace.droppable if trace.values[v].saves}


def planned(trace: Trace, actions: dict[int, Action]) -> Plan:
    """A plan from actions."""
    return plan(trace, policy=lambda trace, budget: actions)


def plans(trace: Trace, seeds: int) -> Iterator[tuple[str, Plan]]:
    """The plans of the battery, by name."""
    yield "sqrt", plan(trace, policy="sqrt")
    yield "everything", planned(trace, everything_dropped(trace))
    for seed in range(seeds):
        yield f"random {seed}", planned(trace, random_actions(trace, seed))


def surprised(plan: Plan) -> Plan:
    """The same actions, but for a step that goes another way from the middle of what is replayed on."""
    dropped = [i for i, line in enumerate(plan.script) if line.replay] or [0]
    trace = plan.trace
    later = set(trace.forward_ops[dropped[len(dropped) // 2] :])
    ops = [replace(op, name="another.op") if i in later else op for i, op in enumerate(trace.ops)]
    return planned(replace(trace, ops=tuple(ops)), plan.actions)


def check(bench: Bench, seeds: int) -> None:
    """Every plan of the battery, online eviction at 60 % of the peak, and both with a step that leaves its plan halfway
    leave exactly what the plain step leaves.

    Raises:
        AssertionError: Naming the plan and what differs.
    """
    want = bench.run()
    trace = bench.record()
    assert not bench.run().differs_from(want), "the plain step itself is not deterministic"
    for name, made in plans(trace, seeds):
        tape = Tape(made)
        differs = bench.run(tape).differs_from(want)
        assert not differs, f"{name}: {differs}"
        assert not tape.diverged, f"{name}: {tape.diverged}"
    budget_bytes = int(0.6 * bench.peak_bytes())
    differs = bench.run(Recorder(evictor=Evictor(budget_bytes)), around=True).differs_from(want)
    assert not differs, f"online: {differs}"
    for evictor in (None, Evictor(budget_bytes)):
        tape = Tape(surprised(planned(trace, everything_dropped(trace))), evictor)
        differs = bench.run(tape).differs_from(want)
        assert not differs, f"diverged, {evictor}: {differs}"
        assert tape.diverged or tape.plan.keeps_all
