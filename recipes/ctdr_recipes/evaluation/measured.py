"""Measurements at sizes that two cores hold: true peaks and times of whole training steps, in turns on one thread."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import Plan, Tape, Trace, record, simulate
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_recipes.evaluation.nets import Net
from ctdr_recipes.evaluation.rows import Row
from ctdr_recipes.evaluation.techniques import (
    BUDGET_SHARE,
    CTDR,
    DECOMPOSED,
    DENSE,
    OFFLOADED,
    PLANNERS,
    RECOMPUTED,
    shapes_at,
)
from ctdr_recipes.measure import measure_memory, measure_seconds, one_thread, training_tensors

MEASURED = (DENSE, DECOMPOSED, RECOMPUTED, OFFLOADED, CTDR)


@dataclass(frozen=True)
class Case:
    """A network that trains: forward, backward and Adam's step on one batch, under a plan where there is one."""

    model: nn.Module
    net: Net
    batch: Tensor
    optimizer: torch.optim.Optimizer
    holders: Holders

    @classmethod
    def of(cls, model: nn.Module, net: Net, batch: Tensor, holders: Holders) -> Case:
        """A network whose gradients and optimizer's state are there already."""
        case = cls(model, net, batch, torch.optim.AdamW(model.parameters(), lr=1e-4), holders)
        case.step(None)
        return case

    def step(self, plan: Plan | None) -> None:
        """One training step."""
        self.optimizer.zero_grad(set_to_none=True)
        tape = Tape(plan, holders=self.holders) if plan is not None and not plan.keeps_all else nullcontext()
        with tape:
            loss = self.net.step(self.model, self.batch)
        loss.backward()
        self.optimizer.step()

    def remaining(self) -> list[Tensor]:
        """The tensors in memory between two steps."""
        return [*training_tensors(self.model, self.optimizer), self.batch]

    def trace(self) -> Trace:
        """The recorded step, with the optimizer's state."""
        self.optimizer.zero_grad(set_to_none=True)
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return record(lambda: self.net.step(self.model, self.batch)).with_static(storage_bytes(states))


def measure(name: str, net: Net, rounds: int = 5) -> list[Row]:
    """All techniques on one network.

    Args:
        name: Of the network.
        net: At its small size.
        rounds: How often each step is timed.

    Returns:
        A row for each technique.
    """
    torch.manual_seed(0)
    dense = net.build().train()
    small = structure_of(dense, shapes_at(dense))
    batch = net.batch(net.size, "cpu")
    with one_thread(), tempfile.TemporaryDirectory() as folder, closing(_holders(folder)) as holders:
        cases = {variant: Case.of(m, net, batch, holders) for variant, m in ((DENSE, dense), (DECOMPOSED, small))}
        traces = {variant: case.trace() for variant, case in cases.items()}
        limit = int(BUDGET_SHARE * simulate(traces[DENSE]).peak_bytes)
        steps: dict[str, Callable[[], None]] = {}
        rows: dict[str, Row] = {}
        timed_as: dict[str, str] = {}  # a plan that keeps everything is the plain step: one clock for both
        for technique in MEASURED:
            variant = DECOMPOSED if technique in (DECOMPOSED, CTDR) else DENSE
            trace = traces[variant]
            if technique == OFFLOADED:
                trace = Places.read("disk", folder, None).equip(trace)
            found = PLANNERS[technique](trace, limit)
            case = cases[variant]
            timed_as[technique] = variant if found.plan.keeps_all else technique
            step = steps[timed_as[technique]] = _runner(case, found.plan)
            peak = measure_memory(step, case.remaining).peak_bytes + _staging(trace, found.plan)
            size = sum(p.numel() for p in case.model.parameters())
            day = date.today().isoformat()
            fits = peak <= BUDGET_SHARE * rows[DENSE].peak_bytes if rows else False
            rows[technique] = Row(name, technique, "measured", net.size, size, peak, 0.0, fits, day=day)
        seconds = measure_seconds(steps, rounds)
    return [replace(row, seconds=seconds[timed_as[technique]]) for technique, row in rows.items()]


def _runner(case: Case, plan: Plan) -> Callable[[], None]:
    return lambda: case.step(plan)


def _holders(folder: str) -> Holders:
    return Holders(HolderOptions(folder=Path(folder)))


def _staging(trace: Trace, plan: Plan) -> int:
    """Buffers of the links that a plan uses: torch does not allocate them, so that its profiler does not see them."""
    used = {getattr(action, "to", None) for action in plan.away.values()}
    return sum(link.device_bytes for link in trace.links if link.to in used)
