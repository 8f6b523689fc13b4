"""The memory side of a run: a session that plans each kind of step, and the peaks to log."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import OutOfMemoryError

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import doing, one_bar
from ctdr_lightning.basics.units import MIB, format_bytes, parse_bytes
from ctdr_lightning.joint.promise import promise
from ctdr_lightning.memory import Plan, Session, Trace, plan
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.many_shapes import ManyShapes
from ctdr_lightning.memory.policies import Budget
from ctdr_lightning.memory.traces.machine import Link
from ctdr_lightning.trainer.modules import overrides
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.batch_needs import BatchNeeds, forward_ticks
from ctdr_lightning.trainer.training_step.batch_parts import n_samples
from ctdr_lightning.trainer.training_step.device import allocated_peak_bytes, tensors_of
from ctdr_lightning.trainer.training_step.gradient_readers import gradient_reader
from ctdr_lightning.trainer.training_step.optimizer_bytes import OptimizerBytes, predict
from ctdr_lightning.trainer.training_step.remedies import Remedies, optimizer_does_not_fit
from ctdr_lightning.trainer.training_step.resident import local_bytes, state_bytes
from ctdr_lightning.trainer.training_step.snapshot import OPTIMIZERS, Snapshot
from ctdr_lightning.trainer.training_step.sub_batch_checks import batch_norm_of, sub_batch_hindrance
from ctdr_lightning.trainer.training_step.sub_batch_peaks import SubBatchPeaks, fake_steps

# Each retry has a fifth less than the last: in the slow tests under a hard cap one retry is enough.
TIGHTER = 0.8
# Grad norms, counters and the like: what is less is not worth planning anew.
_NEGLIGIBLE_BYTES = MIB


class MemoryStage:
    """Plans steps as the options ask, and knows what they take.

    Args:
        options: Budget and policy.

    Attributes:
        session: The steps of the run; None where no memory is planned.
        rest_peak_bytes: What the last step that was planned takes after its backward, while the optimizer steps.
    """

    def __init__(self, options: CallbackOptions) -> None:
        self._options = options
        self._shapes = ManyShapes(plan)
        self.session: Session | None = None
        self._budget_bytes: int | None = None
        self._optimizer = OptimizerBytes(0, 0)
        self._optimizers_seen: Any = None
        self._state_bytes = 0
        self._rest_measured = False
        self._kept_bytes = 0
        self._copied_bytes = 0
        self._said: set[str] = set()
        self._n_planned = 0
        self.rest_peak_bytes = 0
        self._last_plan: Plan | None = None
        self._tightened = False
        self._module: LightningModule | None = None
        self._places = Places()
        self._links: list[Link] | None = None
        self._holders = self._places.holders()
        self._inputs: Any = None

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the present kind of step, or else the last one that there was."""
        self._last_plan = (self.session.plan if self.session is not None else None) or self._last_plan
        return self._last_plan

    @property
    def offloads(self) -> bool:
        """Whether saved tensors may wait in other places."""
        return bool(self._places.offload)

    def prepare(self, trainer: Any, module: LightningModule) -> None:
        """Make the session, once the model is on its device; nothing where no memory is planned."""
        self._module = module
        if not self._options.plans_memory:
            return
        if self.session is None:
            device = trainer.strategy.root_device
            if self._options.memory_budget is not None:
                total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
                self._budget_bytes = parse_bytes(self._options.memory_budget, total_bytes=total)
            self._places = self._options.places().on(device.type)
            self._holders = self._places.holders()
            self.session = Session(self._plan, budget_bytes=self._budget_bytes, root=module, holders=self._holders)
        sizes = [(id(o), [len(group["params"]) for group in o.param_groups]) for o in trainer.optimizers]
        if sizes != self._optimizers_seen:
            self._optimizers_seen, self._rest_measured = sizes, False
            self._look_ahead(trainer, module)

    def _look_ahead(self, trainer: Any, module: LightningModule) -> None:
        """What the optimizers will take, before they take it."""
        assert self.session is not None
        self._state_bytes = state_bytes(trainer.optimizers)
        found = predict(trainer.optimizers) or OptimizerBytes(0, 0)
        self._optimizer = replace(found, state=max(found.state, self._state_bytes))
        reader = gradient_reader(module, trainer.callbacks) if self._options.keep_gradients is None else ""
        if reader:
            self.say(f"{reader} reads gradients before the backward: those of the last step are kept until then")
        keeps = self._options.keep_gradients or bool(reader) or overrides(module, "optimizer_zero_grad")
        trained = (p for p in module.parameters() if p.requires_grad)
        self._kept_bytes = local_bytes(trained) if keeps and module.automatic_optimization else 0
        self._set_static(module)

    def _set_static(self, module: LightningModule) -> None:
        assert self.session is not None
        self.session.static_bytes = local_bytes((*module.parameters(), *module.buffers())) + self._optimizer.state
        self.session.replan(self._plan)

    def say(self, event: str) -> None:
        """Add an event, in words without a full stop; twice is once."""
        if self.session is not None and event not in self._said:
            self._said.add(event)
            self.session.events.append(f"{event}.")

    def _plan(self, trace: Trace) -> Plan:
        """The plan of this process alone: results do not depend on plans, and no process waits for another's."""
        needs = self._batch_needs(trace, self._kept_bytes, self._copied_bytes)
        self.rest_peak_bytes = needs.rest_bytes
        if self._budget_bytes is not None and needs.rest_bytes > self._budget_bytes:
            self._refuse(self._too_large(needs))
        try:
            with one_bar(self._shown), doing("plan the step"):
                made = self._best(needs.standing)
        except InfeasibleBudgetError as error:
            self._refuse(self._with_remedy(error, needs))
            made = plan(needs.standing, Budget(seconds=math.inf))  # the least peak at any time
        self._n_planned += 1
        return made

    def _batch_needs(self, trace: Trace, kept_bytes: int, copied_bytes: int) -> BatchNeeds:
        if self._links is None:
            self._links = self._places.links()
        trace = trace.with_machine(self._links, self._places.codec_costs(trace))
        return BatchNeeds(trace, self._optimizer, self._steps_in_backward, kept_bytes, copied_bytes)

    @property
    def limits(self) -> Hashable:
        """What the number of sub-batches hangs on besides the batch."""
        return self._budget_bytes, self._optimizer

    def fewest_sub_batches(self, inputs: Any) -> int:
        """In how few sub-batches a batch fits the budget; where it never does, as many as it has samples.

        Args:
            inputs: The arguments of the step, the batch first.

        Raises:
            ConfigError: When that cannot be told.
        """
        with one_bar(self._shown), doing("count sub-batches"):
            return self._sub_batch_peaks(inputs).fewest() or n_samples(inputs[0][0])

    def _sub_batch_peaks(self, inputs: Any) -> SubBatchPeaks:
        assert self._module is not None
        assert self._budget_bytes is not None
        trainer: Any = self._module.trainer

        def needs_of(trace: Trace, inputs: Any) -> BatchNeeds:
            return self._batch_needs(trace, 0, self._copies_of(inputs))

        recorded = fake_steps(trainer, self._module)
        sizes = [p.nbytes for p in self._module.parameters() if p.requires_grad]
        return SubBatchPeaks(recorded, sizes, inputs, needs_of, self._budget_bytes, self._options.policy)

    def _copies_of(self, inputs: Any) -> int:
        """Bytes of the copies that will stand beside a step, with the room that `copies` gives them."""
        if not self._options.retry_on_oom or self._module is None:
            return 0
        roots = {"module": self._module, "batch": inputs, OPTIMIZERS: self._module.trainer.optimizers}
        n_bytes = Snapshot(roots, set()).copied_bytes
        return n_bytes + n_bytes // 8

    @property
    def _shown(self) -> bool:
        """Whether the user is told what is done."""
        trainer: Any = self._module.trainer if self._module is not None else None
        return self._options.verbose and trainer is not None and trainer.is_global_zero

    @property
    def _steps_in_backward(self) -> bool:
        return self._options.optimizer_step is not None

    def _best(self, trace: Trace) -> Plan:
        if self._budget_bytes is not None and self._options.policy == "auto":
            return self._shapes(trace, self._budget_bytes)
        if self._budget_bytes is not None or self._options.policy != "auto" or self._module is None:
            return plan(trace, self._budget_bytes, self._options.policy)
        made = promise(trace, self._module, self._options.max_slowdown)
        # to go below what the optimizer's step takes anyway would cost time for nothing
        return plan(trace, self.rest_peak_bytes) if made.peak_bytes < self.rest_peak_bytes else made

    def _too_large(self, needs: BatchNeeds) -> InfeasibleBudgetError:
        assert self._budget_bytes is not None
        if not self._ends_the_run:  # a warning names no remedy
            return optimizer_does_not_fit(needs, self._budget_bytes)
        # the budget that the error names has to do for forward and backward too
        least_bytes = self._least_bytes(needs.standing)
        return optimizer_does_not_fit(needs, self._budget_bytes, least_bytes, self._remedies(needs))

    def _with_remedy(self, error: InfeasibleBudgetError, needs: BatchNeeds) -> InfeasibleBudgetError:
        """The error of a budget; another policy than the default one has its own hint: the default one."""
        tried = self._ends_the_run and self._budget_bytes is not None and self._options.policy == "auto"
        return error.but_first(self._remedies(needs).nearest(error.least_peak_bytes)) if tried else error

    def _remedies(self, needs: BatchNeeds) -> Remedies:
        assert self._module is not None
        assert self._budget_bytes is not None
        cut = self._sub_batch_peaks(self._inputs) if self._may_cut(self._module) else None
        return Remedies(self._module.trainer, self._module, self._options, needs, self._budget_bytes, cut)

    def _may_cut(self, module: LightningModule) -> bool:
        """Whether the batch of the present step could run as sub-batches, and does not."""
        if self._inputs is None or self._options.cuts_hindrance("auto") or self._options.sub_batches is not None:
            return False
        return not (batch_norm_of(module) or sub_batch_hindrance(module.trainer, module))

    def _least_bytes(self, trace: Trace) -> int:
        """The least peak of forward and backward; where they fit beside the optimizer's step, that one's."""
        try:
            return plan(trace, self.rest_peak_bytes, self._options.policy).peak_bytes
        except InfeasibleBudgetError as error:
            return error.least_peak_bytes

    @property
    def _ends_the_run(self) -> bool:
        """Whether what does not fit is an error, rather than run as small as it can be."""
        asked = self._options.over_budget
        return not self._tightened and (asked == "raise" or (asked == "auto" and self._n_planned == 0))

    def _refuse(self, error: InfeasibleBudgetError) -> None:
        """Raise the error, or warn once that what does not fit is run as small as it can be."""
        if self._tightened:
            return  # the user's own budget was larger
        if self._ends_the_run:
            raise error
        if self._budget_bytes is not None and "over" not in self._said:
            self._said.add("over")
            rank_zero_warn(
                f"CTDR: {error.problem} Such steps are run as small as they can be; this is said once. "
                'CTDRCallback(over_budget="raise") ends the run instead.'
            )

    def tighten(self, message: str) -> None:
        """Make every plan again for less memory, after a step ran out of it.

        Args:
            message: What the failed step said.

        Raises:
            OutOfMemoryError: When nothing is known of what the step takes.
        """
        assert self.session is not None
        known = [n for n in (self._budget_bytes, self.session.reached_bytes, self._allocated_bytes()) if n]
        if not known:
            raise OutOfMemoryError(f"The first step ran out of memory: {message}. HINT: give memory_budget.")
        self._tightened = True
        self._budget_bytes = self.session.budget_bytes = int(min(known) * TIGHTER)
        self.session.replan(self._plan)
        self.session.events.append(
            f"A step ran out of memory ({message}); it is tried again under {format_bytes(self._budget_bytes)}."
        )

    def _allocated_bytes(self) -> int:
        """What the device really gave out before memory ran out: a plan may have been for far more."""
        if self._module is None:
            return 0
        trainer: Any = self._module.trainer
        return allocated_peak_bytes(trainer.strategy.root_device)

    def make_ready(self, inputs: Any, kind_of: Callable[[bool], Hashable], later: bool = False) -> tuple[int, bool]:
        """Before a step: free the last step's gradients where the plan needs their bytes.

        Lightning frees them after the forward, before the backward.

        Args:
            inputs: The arguments of the step.
            kind_of: The step's signature, from whether its backward adds to gradients that stand.
            later: Whether it is a later part of a batch, so that the gradients of the parts before stand.

        Returns:
            Bytes of the batch and of the gradients that stay, and whether the backward will add to these.
        """
        module = self._module
        if module is None:
            return 0, False
        trainer: Any = module.trainer
        gradients = local_bytes(p.grad for p in module.parameters() if p.grad is not None)
        fresh = (
            not later
            and module.automatic_optimization
            and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        )
        if gradients and fresh and not self._kept_bytes and self._needs(gradients, kind_of(False)):
            self.say(
                f"The gradients of the last step ({format_bytes(gradients)}) are freed before the forward, as the plan "
                "needs their bytes; keep_gradients=True keeps them"
            )
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)
            gradients = local_bytes(p.grad for p in module.parameters() if p.grad is not None)
        adds = gradients > 0 and not fresh
        planned = self.session is None or self.session.plan_of(kind_of(adds)) is not None
        self._inputs = None if planned else inputs
        return gradients + local_bytes(tensors_of(inputs)), adds

    def copies(self, n_bytes: int) -> None:
        """Before a step: so many bytes of copies stand beside it, until its backward is over; plan for them.

        Args:
            n_bytes: Size of the copies that put a failed step back.
        """
        if self.session is None or n_bytes <= self._copied_bytes:
            return
        # batches of many sizes have copies of many sizes: an eighth of room, or each new length would plan all anew
        self._copied_bytes = n_bytes + n_bytes // 8
        self.session.replan(self._plan)

    def _needs(self, gradient_bytes: int, kind: Hashable) -> bool:
        """Whether this step's forward with the last step's gradients beside it would take more than its plan allows."""
        found = self.session.plan_of(kind) if self.session is not None else None
        if found is None:
            return self._budget_bytes is not None
        limit = self._budget_bytes if self._budget_bytes is not None else found.peak_bytes
        forward = found.timeline.bytes_at[: forward_ticks(found.trace)]
        return int(forward.max(initial=0)) + gradient_bytes > limit

    def meters(self, trainer: Any) -> bool:
        """Whether the coming batch is to be measured, as it is not known yet what follows the backward."""
        guarded = self.session is not None and self._budget_bytes is not None
        return guarded and not self._rest_measured and trainer.strategy.root_device.type != "cuda"

    def step_done(self, trainer: Any, measured: BatchMeter | None) -> None:
        """An optimizer has stepped: plan anew where its state, or what its step took, is more than was predicted.

        Args:
            trainer: In training.
            measured: The batch, where it was measured.
        """
        if self.session is None or self._module is None:
            return
        before, self._state_bytes = self._state_bytes, state_bytes(trainer.optimizers)
        found = replace(self._optimizer, state=max(self._optimizer.state, self._state_bytes))
        if measured is not None:
            self._rest_measured = True
            temporary = measured.rest_bytes - max(self._state_bytes - before, 0)
            if temporary > found.temporary + _NEGLIGIBLE_BYTES:
                self.say(f"After the backward a batch takes {format_bytes(temporary)} more for a while")
                found = replace(found, temporary=temporary)
        if found != self._optimizer:
            self._optimizer = found
            self._set_static(self._module)

    def batch_done(self) -> None:
        """A batch is over: nothing of it is needed any more."""
        self._inputs = None

    def batch_measured(self, measured: BatchMeter) -> None:
        """Notice a batch that took more than the budget and than its plan says."""
        if self.session is None or self._budget_bytes is None or self.session.plan is None or not self.session.guided:
            return
        if measured.peak_bytes > max(self._budget_bytes, self.session.plan.peak_bytes, self.rest_peak_bytes):
            self.session.record_anew(f"the batch took {format_bytes(measured.peak_bytes)}")

    def release(self) -> None:
        """Leave everything that is installed."""
        self._module = self._inputs = None
        if self.session is not None:
            self.session.abort()
        self._holders.close()
