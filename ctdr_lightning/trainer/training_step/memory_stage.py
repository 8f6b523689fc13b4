"""The memory side of a run: a guide that records steps and carries out their plans, and the peaks to log."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import OutOfMemoryError

from ctdr_lightning.basics.gpu_memory import counts, free_cache, read_budget
from ctdr_lightning.basics.nests import tensors_of
from ctdr_lightning.memory import Plan, Trace
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import is_served
from ctdr_lightning.memory.compiled.backend import CompileBackend
from ctdr_lightning.memory.guide.events import Event
from ctdr_lightning.memory.guide.step_guide import StepGuide
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.strategies import settle_units
from ctdr_lightning.trainer.training_step import events
from ctdr_lightning.trainer.training_step.advice import optimizer_does_not_fit
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.bytes_beside import BytesBeside
from ctdr_lightning.trainer.training_step.device import allocated_peak_bytes
from ctdr_lightning.trainer.training_step.optimizer.resident import begins_sum, local_bytes
from ctdr_lightning.trainer.training_step.planning import BatchPlanner
from ctdr_lightning.trainer.training_step.surprises import freed_late
from ctdr_lightning.trainer.training_step.unit_weights import UnitWeights

# Each retry has a fifth less than the last: in the slow tests under a hard cap one retry is enough.
TIGHTER = 0.8


class MemoryStage:
    """Has steps planned by the options, and knows their memory.

    Args:
        options: Budget and policy.

    Attributes:
        session: The steps of the run; None without memory plans.
        beside: The bytes beside the steps.
        planner: Plans them.
        budget_bytes: The budget that was asked for; None for none.
        last_backend: Compiles the step of a compiled module; None for any other.
        units: Chooses the FSDP2 units whose weights stay gathered.
    """

    def __init__(self, options: CallbackOptions) -> None:
        self._options = options
        self.session: StepGuide | None = None
        self.beside = BytesBeside(options)
        self._places = Places()
        self._holders = self._places.holders()
        self.planner = BatchPlanner(options, self.beside, self._places, None)
        self.units = UnitWeights()
        self.budget_bytes: int | None = None
        self._last_plan: Plan | None = None
        self._collected = False
        self._stale_bytes = self._unplanned_bytes = self._n_planned = 0
        self._coming: Hashable = None
        self._tiles: Mapping[str, int] = {}
        self.last_backend: CompileBackend | None = None
        self._compiled_beside: Hashable = None
        self._said = ""
        self._module: LightningModule | None = None

    @property
    def rest_peak_bytes(self) -> int:
        """Bytes of the last batch that was planned, while its optimizer steps."""
        return self.planner.rest_peak_bytes

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the present kind of step, or else the last one that there was."""
        self._last_plan = (self.session.plan if self.session is not None else None) or self._last_plan
        return self._last_plan

    @property
    def offloads(self) -> bool:
        """Whether saved tensors may wait in other places."""
        return bool(self._places.offload)

    @property
    def most_pinned_bytes(self) -> int | None:
        """The most host memory that offloaded tensors had pinned; None if no tensor goes there."""
        return self._holders.most_pinned_bytes if "host" in self._places.offload else None

    def prepare(self, trainer: Any, module: LightningModule) -> None:
        """Make the session, once the model is on its device; nothing where no memory is planned."""
        self._module = module
        if not self._options.plans_memory:
            return
        if self.session is None:
            gather_s = settle_units(module)
            self._begin(trainer.strategy.root_device, module)
            if self.budget_bytes is not None:
                self.units.begin(trainer, module, gather_s)
        self.units.apply()
        self.planner.attach(module)
        new = self.beside.look_ahead(trainer, module)
        if new is not None:
            self._set_static(new)

    def _begin(self, device: torch.device, module: LightningModule) -> None:
        options, budget_bytes = self._options, None
        if options.memory_budget is not None:
            budget_bytes = read_budget(options.memory_budget, device)
        self.budget_bytes = budget_bytes
        self._places = options.places().on(device.type)
        self._holders = self._places.holders()
        self.planner = BatchPlanner(options, self.beside, self._places, budget_bytes)
        if self._tiles:
            self.planner.start_in_tiles(self._tiles)
        self.session = StepGuide(
            budget_bytes=budget_bytes,
            root=module,
            holders=self._holders,
            verify=options.verify,
            verify_at_once=options.optimizer_step is not None,
            zeros=self._places.drops_zeros,
        )

    def backend_of(self, module: LightningModule) -> CompileBackend | None:
        """The backend under which a compiled step keeps to the budget; None without a budget.

        It stays the same for as long as the bytes beside the step do, so that nothing is compiled twice.
        """
        if self._options.memory_budget is None:
            return None
        self.budget_bytes = read_budget(self._options.memory_budget, module.device)
        self.beside.look_ahead(module.trainer, module)
        standing_bytes = self.beside.static_bytes(module)
        beside = (self.budget_bytes, standing_bytes, self.beside.optimizer, self.beside.kept_bytes)
        if beside != self._compiled_beside:
            self._compiled_beside = beside
            account_of = partial(self._account_of_graph, module)
            self.last_backend = CompileBackend(self.budget_bytes, policy=self._options.policy, account_of=account_of)
        return self.last_backend

    def _account_of_graph(self, module: LightningModule, step: Trace, read_bytes: int) -> BatchAccount:
        """The account of a batch from one of its compiled graphs.

        Args:
            module: The model.
            step: The graph's forward and backward.
            read_bytes: Bytes of the weights and buffers that the graph reads.

        Raises:
            InfeasibleBudgetError: If the optimizer's step breaks the budget.
        """
        assert self.budget_bytes is not None
        unread_bytes = local_bytes((*module.parameters(), *module.buffers())) - read_bytes
        account = self.beside.account(step.with_static(max(unread_bytes, 0)))
        if account.rest_bytes > self.budget_bytes:
            raise optimizer_does_not_fit(account, self.budget_bytes)
        return account

    def start_in_tiles(self, tiles: Mapping[str, int]) -> None:
        """Run modules in tiles from the first step on.

        Args:
            tiles: From names of modules to their numbers of tiles.
        """
        self._tiles = tiles

    def _set_static(self, new: list[Event]) -> None:
        """Plan again with other bytes beside the steps, and note new events."""
        assert self._module is not None
        assert self.session is not None
        for event in new:
            self.note(event)
        self.session.static_bytes = self.beside.static_bytes(self._module)
        self._replan()

    def note(self, event: Event) -> None:
        """Add an event; twice is once."""
        if self.session is not None and event not in self.session.events:
            self.session.events.append(event)

    def plan_due(self, kind: Hashable = None) -> None:
        """Have a kind of step planned where its plan is due.

        Args:
            kind: Its signature; None for the present kind.
        """
        if self.session is None or self.units.waits:
            return
        before = self.planner.n_planned
        self.session.plan_with(self.planner, kind)
        if self.planner.n_planned > before:
            free_cache()  # plans are made for an allocator without the pieces that other steps left in it

    def choose_units(self) -> None:
        """After a backward: choose the FSDP2 units whose weights stay gathered, where that is not done yet."""
        session, module = self.session, self._module
        if session is None or module is None or not self.units.chooses:
            return
        account = self.planner.account_of(session.trace) if session.trace is not None else None
        found = self.units.settle(module.trainer, account, self.planner.budget_bytes or 0, self._options.policy)
        self.note(events.UnitsChosen(found))

    def _replan(self) -> None:
        assert self.session is not None
        self._unplanned_bytes = 0
        self.session.outdate()
        self.plan_due()

    def tighten(self, message: str) -> None:
        """Make every plan again for less memory, after a step ran out of it.

        Args:
            message: Error of the failed step.

        Raises:
            OutOfMemoryError: If nothing is known of the step's memory.
        """
        assert self.session is not None
        # bytes that the device really gave out before memory ran out: a plan may have been for far more
        trainer: Any = self._module.trainer if self._module is not None else None
        allocated = allocated_peak_bytes(trainer.strategy.root_device) if trainer is not None else 0
        known = [n for n in (self.planner.budget_bytes, self.session.reached_bytes, allocated) if n]
        if not known:
            raise OutOfMemoryError(f"The first step ran out of memory: {message}. HINT: give memory_budget.")
        budget_bytes = self.session.budget_bytes = int(min(known) * TIGHTER)
        self.planner.tighten(budget_bytes)
        self._replan()
        self.session.events.append(events.RanOutOfMemory(message, budget_bytes))

    def make_ready(self, inputs: Any, kind_of: Callable[[bool], Hashable], later: bool = False) -> tuple[int, bool]:
        """Before a step: free the last step's gradients where the plan needs their bytes.

        Lightning frees them after the forward, before the backward.

        Args:
            inputs: The arguments of the step.
            kind_of: The step's signature, from whether its backward adds to existing gradients.
            later: Whether it is a later part of a batch, so that gradients of earlier parts exist.

        Returns:
            Bytes of the batch and of the gradients that stay, and whether the backward will add to these.
        """
        module = self._module
        if module is None:
            return 0, False
        trainer: Any = module.trainer
        self.units.step_begins()
        gradients, batch = local_bytes(_gradients(module)), local_bytes(tensors_of(inputs))
        first = not later and module.automatic_optimization
        fresh = first and begins_sum(trainer)
        kind = kind_of(gradients > 0 and not fresh)
        self.planner.inputs = inputs if self.session is None or self.session.plan_of(kind) is None else None
        if not later:
            self._look_at_allocator(trainer.strategy.root_device, gradients + batch)
        self._coming = kind if fresh else None
        if self.make_room():
            gradients = local_bytes(_gradients(module))
        self._stale_bytes = gradients if fresh else 0
        return gradients + batch, gradients > 0 and not fresh

    def make_room(self) -> bool:
        """Free the last step's gradients where the plan of the coming step needs their bytes. Returns whether it did.

        To be asked again where the step is planned anew before its forward: the new plan may keep more.
        """
        module, kind = self._module, self._coming
        if module is None or kind is None or self.beside.kept_bytes:
            return False
        self.plan_due(kind)
        gradients = local_bytes(_gradients(module))
        if not gradients or not self._needs(gradients, kind):
            return False
        if self.session is not None and self.session.plan_of(kind) is not None:  # a recorded step has none to need them
            self.note(events.GradientsFreed(gradients))
        trainer: Any = module.trainer
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._stale_bytes = local_bytes(_gradients(module))
        return True

    def _look_at_allocator(self, device: torch.device, beside_bytes: int) -> None:
        """Plan again where a GPU's allocator holds so much more than is known that a plan breaks the budget."""
        if self.session is None or self.planner.budget_bytes is None or device.type != "cuda":
            return
        found = self.beside.unexplained_bytes(counts(device).requested - beside_bytes)
        if found and not self._collected:
            self._collected = True
            gc.collect()  # what is left of the copies that ranks were chosen on sits in cycles
            found = self.beside.unexplained_bytes(counts(device).requested - beside_bytes)
        if not found:
            return
        self.beside.held_bytes += found
        self._unplanned_bytes += found
        # A plan takes up to half a minute, so that a few bytes more a step, as of a list of losses, must not cost one.
        if not self._has_room_for(self._unplanned_bytes):
            self._set_static([])
        elif self._module is not None:
            self.session.static_bytes = self.beside.static_bytes(self._module)

    def _has_room_for(self, n_bytes: int) -> bool:
        """Whether all plans, and the optimizer's step, keep the budget with more bytes beside them.

        On a GPU the allocator's pieces count too, except for a plan that it does not serve anyway.
        """
        budget = self.planner.budget_bytes
        assert self.session is not None
        assert budget is not None
        plans = self.session.plans
        if max([self.rest_peak_bytes, *(plan.peak_bytes for plan in plans)]) > budget - n_bytes:
            return False
        return all(
            is_served(plan.trace, plan.actions, budget - n_bytes) or not is_served(plan.trace, plan.actions, budget)
            for plan in plans
        )

    def copies(self, n_bytes: int) -> bool:
        """Plan for the copies for a retry, which remain until the step's backward is over. Returns whether anew."""
        more = self.session is not None and self.beside.copies(n_bytes)
        if more:
            self._replan()
        return more

    def _needs(self, gradient_bytes: int, kind: Hashable) -> bool:
        """Whether this step's forward with the last step's gradients would take more than its plan allows."""
        found = self.session.plan_of(kind) if self.session is not None else None
        if found is None:
            return self.planner.budget_bytes is not None
        limit = self.planner.budget_bytes if self.planner.budget_bytes is not None else found.peak_bytes
        return found.forward_peak_bytes + gradient_bytes > limit

    def meters(self, trainer: Any) -> bool:
        """Whether to measure the next batch: the bytes after the backward, or a first plan, are not verified yet."""
        known = self.beside.rest_measured and self.beside.surprises.judged
        guarded = self.session is not None and self.planner.budget_bytes is not None
        return guarded and not known and trainer.strategy.root_device.type != "cuda"

    def step_done(self, trainer: Any, measured: BatchMeter | None) -> None:
        """An optimizer has stepped: plan again if its state, or its step, took more than predicted.

        Args:
            trainer: In training.
            measured: The batch, if it was measured.
        """
        if self.session is None or self._module is None:
            return
        new = self.beside.stepped(trainer, measured)
        if new is not None:
            self._set_static(new)

    def batch_done(self) -> None:
        """A batch is over: nothing of it is needed any more."""
        self.planner.inputs = None
        said = self.last_backend.summary() if self.last_backend is not None and self._options.verbose else ""
        if said != self._said:
            self._said = said
            rank_zero_info(f"CTDR: {said}")

    def was_usual(self) -> bool:
        """Whether the last batch was not recorded, and nothing was planned since the last call."""
        before, self._n_planned = self._n_planned, self.planner.n_planned
        recorded = self.session is not None and not self.session.guided
        return not recorded and before == self._n_planned

    def batch_measured(self, measured: BatchMeter) -> None:
        """Notice a batch that took more than its plan says, or more than the budget while it was recorded."""
        budget = self.planner.budget_bytes
        session, surprises = self.session, self.beside.surprises
        if session is None or budget is None or session.plan is None or self._module is None:
            return
        before, least = surprises.counted_bytes, budget if self._options.sub_batches is not None else 0
        # of sub-batches, of the last one alone; the last step's gradients may stay through the forward where they fit
        forward = session.plan.forward_peak_bytes + self._stale_bytes
        predicted = max(least, session.plan.peak_bytes, forward, self.rest_peak_bytes)
        late = freed_late(session.plan.trace)
        said = surprises.judge(measured.peak_bytes, predicted, late) if session.guided else ""
        if surprises.counted_bytes != before:
            self._set_static([])
        if said:
            session.record_anew(said)
        elif not session.guided and measured.peak_bytes > budget:
            session.events.append(events.RecordedOverBudget(measured.peak_bytes))

    def release(self) -> None:
        """Leave everything that is installed."""
        self._module = None
        self.units.release()
        self.planner.release()
        if self.session is not None:
            self.session.abort()
        self._holders.close()


def _gradients(module: LightningModule) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]
