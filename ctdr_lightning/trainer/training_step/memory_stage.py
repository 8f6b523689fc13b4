"""The memory side of a run: a session that plans each kind of step, and the peaks to log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import OutOfMemoryError, Tensor
from torch.distributed.tensor import DTensor

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import GIB, format_bytes, parse_bytes
from ctdr_lightning.joint.promise import promise
from ctdr_lightning.memory import Plan, Session, Trace, plan, simulate
from ctdr_lightning.memory.many_shapes import ManyShapes
from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_lightning.trainer.modules import overrides
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.device import device_peaks, tensors_of

TIGHTER = 0.8


class MemoryStage:
    """Plans steps as the options ask, and knows what they take.

    Args:
        options: Budget and policy.
    """

    def __init__(self, options: CallbackOptions) -> None:
        self._options = options
        self._shapes = ManyShapes(plan)
        self.session: Session | None = None
        self._budget_bytes: int | None = None
        self._static_bytes = 0
        self._logged_events = 0
        self._shown_plan: Plan | None = None
        self._tightened = False
        self._module: LightningModule | None = None

    def prepare(self, trainer: Any, module: LightningModule) -> None:
        """Make the session, once the model is on its device; nothing where no memory is planned."""
        self._module = module
        if not self._options.plans_memory or self.session is not None:
            return
        device = trainer.strategy.root_device
        if self._options.memory_budget is not None:
            total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
            self._budget_bytes = parse_bytes(self._options.memory_budget, total_bytes=total)
        resident = local_bytes((*module.parameters(), *module.buffers()))
        self.session = Session(self._plan, budget_bytes=self._budget_bytes, static_bytes=resident, root=module)

    def _plan(self, trace: Trace) -> Plan:
        """The plan of this process alone: results do not depend on plans, and no process waits for another's."""
        return self._best(trace.with_static(self._static_bytes), self._budget_bytes)

    def _best(self, trace: Trace, budget_bytes: int | None) -> Plan:
        if budget_bytes is None and self._options.policy == "auto" and self._module is not None:
            return promise(trace, self._module, self._options.max_slowdown)
        try:
            if budget_bytes is not None and self._options.policy == "auto":
                return self._shapes(trace, budget_bytes)
            return plan(trace, budget_bytes, self._options.policy)
        except InfeasibleBudgetError as error:
            if not self._tightened or budget_bytes is None or error.least_peak_bytes <= budget_bytes:
                raise
            return self._best(trace, error.least_peak_bytes)  # the user's budget was larger: the least will have to do

    def tighten(self, message: str) -> None:
        """Make every plan again for less memory, after a step ran out of it.

        Args:
            message: What the failed step said.

        Raises:
            OutOfMemoryError: When nothing is known of what the step takes.
        """
        assert self.session is not None
        known = [n for n in (self._budget_bytes, self.session.reached_bytes) if n]
        if not known:
            raise OutOfMemoryError(f"The first step ran out of memory: {message}. HINT: give memory_budget.")
        self._tightened = True
        self._budget_bytes = self.session.budget_bytes = int(min(known) * TIGHTER)
        self.session.replan(self._plan)
        self.session.events.append(
            f"A step ran out of memory ({message}); it is tried again under {format_bytes(self._budget_bytes)}."
        )

    def drop_gradients(self, trainer: Any, module: LightningModule, batch_idx: int) -> None:
        """Free the last step's gradients before the forward; Lightning does so after it, before the backward."""
        first = batch_idx % trainer.accumulate_grad_batches == 0
        if self.session is None or not first or not module.automatic_optimization:
            return
        if not overrides(module, "optimizer_zero_grad"):
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def step_done(self, trainer: Any) -> None:
        """Plan anew when the optimizer's state has come to stand beside the step."""
        static_bytes = local_bytes(optimizer_tensors(trainer.optimizers))
        if self.session is None or static_bytes == self._static_bytes:
            return
        self._static_bytes = static_bytes
        self.session.replan(self._plan)

    def peaks(self, trainer: Any, module: LightningModule, batch: Any, step_bytes: int) -> dict[str, float]:
        """The true peak of the last interval, in GiB: from the allocator on a GPU, from counted storages elsewhere.

        Args:
            trainer: In training.
            module: The model.
            batch: The batch at hand.
            step_bytes: Measured peak of a step without what was in memory before it; 0 where none was measured.
        """
        device = trainer.strategy.root_device
        if device.type == "cuda":
            return device_peaks(device)
        if step_bytes == 0:
            return {}
        resident = local_bytes(resident_tensors(module, trainer.optimizers, batch))
        return {"ctdr/peak_memory_gib": (resident + step_bytes) / GIB}

    def predicted(self) -> dict[str, float]:
        """What the last plan predicts; the same names on every rank, whose loggers wait for each other."""
        if self.session is None:
            return {}
        self._shown_plan = self.session.plan or self._shown_plan
        shown = self._shown_plan
        peak_bytes, recompute_s = (shown.peak_bytes, shown.recompute_seconds) if shown is not None else (0, 0.0)
        return {"ctdr/predicted_peak_gib": peak_bytes / GIB, "ctdr/recompute_s": recompute_s}

    def new_events(self) -> list[str]:
        """What the session did since the last call, in words."""
        events = self.session.events if self.session is not None else []
        new, self._logged_events = events[self._logged_events :], len(events)
        return new

    def explain(self) -> str:
        """The last plan in words."""
        found = self.session.plan if self.session is not None else None
        return found.explain() if found is not None else "No plan yet."

    def picture(self) -> Any:
        """Memory over the planned step beside the plain one, a matplotlib figure; None without matplotlib or a plan."""
        session = self.session
        if session is None or session.trace is None or session.plan is None or find_spec("matplotlib") is None:
            return None
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = simulate(session.trace).plot(figure.subplots(), label="everything kept")
        simulate(session.trace, session.plan).plot(axes, label=f"plan ({session.plan.policy})")
        return figure

    def release(self) -> None:
        """Leave everything that is installed."""
        self._module = None
        if self.session is not None:
            self.session.abort()


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take on this device; of sharded ones, the own shard."""
    return storage_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors)


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """The state that optimizers keep."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def resident_tensors(module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batch: Any) -> Iterator[Tensor]:
    """Weights, buffers, optimizer state and batch: what a step finds in memory besides gradients."""
    yield from module.parameters()
    yield from module.buffers()
    yield from optimizer_tensors(optimizers)
    yield from tensors_of(batch)
