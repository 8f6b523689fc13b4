"""The one place of a run that plans: from a recorded step to the plan of its batch, or to the error with its advice."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.nests import tensors_of
from ctdr_lightning.basics.progress_bar import doing, one_bar
from ctdr_lightning.joint.promise import promise
from ctdr_lightning.memory import Plan, Prepared, Trace, plan
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.lean.choice import LeanChoice, choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import in_words, kept_peak_bytes
from ctdr_lightning.memory.lean.tiles import found_tiles, tiles_in_words
from ctdr_lightning.memory.many_shapes import ManyShapes
from ctdr_lightning.memory.policies import Budget
from ctdr_lightning.memory.traces.foreseen import FORESEEN
from ctdr_lightning.memory.traces.machine import Link
from ctdr_lightning.memory.traces.trace import LEAN
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.advice import Adviser, optimizer_does_not_fit
from ctdr_lightning.trainer.training_step.bytes_beside import BytesBeside
from ctdr_lightning.trainer.training_step.optimizer.resident import adds_up, gradient_sizes, local_bytes, state_bytes
from ctdr_lightning.trainer.training_step.shared_plans import SharedPlans
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import LEAST_ASKED, LEAST_SAMPLES, batch_norm_of
from ctdr_lightning.trainer.training_step.sub_batches.checks import sub_batch_hindrance
from ctdr_lightning.trainer.training_step.sub_batches.parts import can_be_cut, n_samples
from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks, fake_steps


class BatchPlanner:
    """Plans batches as the options ask.

    Args:
        options: The callback's.
        beside: The bytes beside the steps.
        places: Places and codecs for saved tensors.
        budget_bytes: The budget; None for none.

    Attributes:
        shared: Plans of all processes.
        shapes: Plans of steps that differ in sizes alone.
        inputs: The arguments of a step without a plan; None where it has one.
        rest_peak_bytes: Bytes of the last batch that was planned, while its optimizer steps.
        n_too_large: How many parts of batches had no plan when they had run, though their number was chosen for one.
        lean_step: The layers whose outputs are left out of the steps, and the modules that run in tiles.
        lean: That they are, in words; empty where none are.
    """

    def __init__(self, options: CallbackOptions, beside: BytesBeside, places: Places, budget_bytes: int | None) -> None:
        self._options, self._beside, self._places = options, beside, places
        self.budget_bytes = budget_bytes
        self._attached: LightningModule | None = None
        self._links: list[Link] | None = None
        self.shared = SharedPlans()
        self.shapes = ManyShapes(plan, share=self.shared)
        self.inputs: Any = None
        self.rest_peak_bytes = self.n_planned = self.n_too_large = 0
        self._tightened = self._warned = False
        self.lean_step = LeanStep()
        self.lean = ""
        self._largest_bytes = self._largest_in_tiles_bytes = 0
        self._sizes_of_parts: set[int] = set()
        self._on_trial = False

    def attach(self, module: LightningModule) -> None:
        """Plan the steps of a model, which has its trainer."""
        self._attached = module

    def release(self) -> None:
        """Let go of the model and its batch."""
        self._attached = self.inputs = None

    @property
    def _module(self) -> LightningModule:
        assert self._attached is not None, "nothing is planned between two fits"
        return self._attached

    def __call__(self, trace: Trace) -> Plan | None:
        """The plan of a step: one for all processes that have this step, judged by the times of this one.

        None for a part of a batch that has no plan, where the next batch is to run in smaller ones.

        Results do not depend on plans, so that processes with other plans train alike.

        Raises:
            InfeasibleBudgetError: When nothing fits, and such a step is not run as small as it can be.
        """
        account, limit = self.account_of(trace), self.budget_bytes
        self.rest_peak_bytes = account.rest_bytes
        if self._on_trial:
            self._end_trial(account)
        tightest = self._tightest(account)
        if limit is not None and account.rest_bytes > limit:
            named = self._ends_the_run  # a warning names no change
            error = self._adviser(tightest).optimizer_error() if named else optimizer_does_not_fit(account, limit)
            self._refuse(error, trace)
        try:
            with one_bar(self._shown), doing("plan the step"):
                made = self._best(tightest)
                made = made if tightest is account else self._best(account)
        except InfeasibleBudgetError as error:
            if FORESEEN not in trace.meta and self._look_for_tiles():
                return plan(account.standing, policy="keep")  # of a kind of step that does not come again
            if FORESEEN not in trace.meta and self._grows_smaller(account):
                return None
            # another policy than the default one has its own hint: the default one
            tried = self._ends_the_run and limit is not None and self._options.policy == "auto"
            self._refuse(self._adviser(tightest).advised(error) if tried else error, trace)
            step = Prepared(account.standing)
            made = self.shared(step, "least", partial(_smallest, step, error.least_peak_bytes))
        self.n_planned += 1
        return made

    def _tightest(self, account: BatchAccount) -> BatchAccount:
        """The account that has to fit before a run's first batch.

        Later batches of an accumulation add to the gradients of the first one, and so do later parts of a batch, and
        all batches where gradients are filled with zeros.
        """
        adds = adds_up(self._module.trainer) or isinstance(self._options.sub_batches, int)
        first = self._ends_the_run and not self.n_planned and self.budget_bytes is not None
        judged = adds and first and self._module.automatic_optimization
        return account.adding(gradient_sizes(self._module)) if judged else account

    def account_of(self, trace: Trace) -> BatchAccount:
        """The account of a batch that runs whole, from its step."""
        return self._beside.account(self._on_machine(trace))

    def absent_bytes(self) -> int:
        """Bytes of optimizer state that plans count and no step has made yet; 0 where the step itself makes them."""
        inside = self._options.optimizer_step is not None or not self._module.automatic_optimization
        made_bytes = state_bytes(cast(Any, self._module.trainer).optimizers)
        return 0 if inside else max(self._beside.optimizer.state - made_bytes, 0)

    def tighten(self, budget_bytes: int) -> None:
        """Plan for less from now on, and refuse nothing: the user's own budget was larger."""
        self.budget_bytes, self._tightened = budget_bytes, True

    def _on_machine(self, trace: Trace) -> Trace:
        if self._links is None:
            self._links = self._places.links()
        noted = trace.with_note(LEAN, self.lean)
        return noted.with_machine(self._links, self._places.codec_costs(trace))

    def _best(self, account: BatchAccount) -> Plan:
        options, step = self._options, Prepared(account.standing)
        if self.budget_bytes is not None and options.policy == "auto":
            return self.shapes(step, self.budget_bytes)
        asked = options.policy, options.max_slowdown, self.budget_bytes, account.rest_bytes
        return self.shared(step, asked, partial(self._other_than_auto, step, account.rest_bytes))

    def _other_than_auto(self, step: Prepared, rest_bytes: int) -> Plan:
        """A plan of another policy, or of the default one without a budget."""
        options = self._options
        if self.budget_bytes is not None or options.policy != "auto":
            return plan(step, self.budget_bytes, options.policy)
        made = promise(step.trace, self._module, options.max_slowdown or 1.0)
        # a peak below that of the optimizer's step would cost time for nothing
        return plan(step, rest_bytes) if made.peak_bytes < rest_bytes else made

    @property
    def limits(self) -> Hashable:
        """A key of all but the batch that the number of sub-batches depends on."""
        return self.budget_bytes, self._beside.optimizer

    def fewest_sub_batches(self, inputs: Any, *, more_than: int = 0) -> int:
        """In how few sub-batches a batch fits the budget; where it never does, as many as there may be.

        Args:
            inputs: The arguments of the step, the batch first.
            more_than: A number whose parts had no plan when they ran. The next one is taken, and seen when it runs.

        Raises:
            ConfigError: When the step cannot be recorded on fake tensors.
        """
        samples, number = n_samples(inputs[0][0]), more_than + 1
        if not more_than:
            self.look_for_outputs(inputs)
            peaks = self._sub_batch_peaks(inputs)
            with one_bar(self._shown), doing("count sub-batches"):
                number = peaks.fewest() or peaks.most
        if number > 1:
            self._sizes_of_parts.update({samples // number, -(-samples // number)})
        return number

    def look_for_outputs(self, inputs: Any) -> None:
        """Decide which outputs to leave out, where a larger batch than any before does not fit without a plan.

        Args:
            inputs: The arguments of the step.
        """
        n_bytes = local_bytes(tensors_of(inputs))
        settled = self.lean_step.names or n_bytes <= self._largest_bytes
        if settled or self.budget_bytes is None or not self._options.rounding or not LazyHeads(self._module).names:
            return
        self._largest_bytes = n_bytes
        try:
            with one_bar(self._shown), doing("look for outputs to leave out"):
                found = self._lean_choice(inputs)
        except ConfigError:  # a step that needs values: what it does with the outputs is seen when it runs
            self.lean_step, self._largest_bytes = self._with_outputs_of(LazyHeads(self._module).names), 1 << 62
            self._on_trial = bool(self.lean_step.names)
            return
        if found is not None:
            self.lean_step, self.lean = found.step, str(found)

    def start_in_tiles(self, tiles: Mapping[str, int]) -> None:
        """Run modules in tiles from the first step on, as a choice of ranks found them to be needed.

        Args:
            tiles: From names of modules to their numbers of tiles.
        """
        self.lean_step, self.lean = LeanStep((), tiles), f"{tiles_in_words(tiles)}."

    @property
    def lean_key(self) -> Hashable:
        """A key of the modules in tiles, without which a step is of another kind; empty without tiles."""
        return tuple(self.lean_step.tiles.items())

    def _lean_choice(self, inputs: Any) -> LeanChoice | None:
        account = partial(self._fake_account, inputs)
        policy, tiles = self._options.policy, self._may_tile(inputs)
        return choose_lean(self._module, account, self.budget_bytes, policy=policy, tiles=tiles)

    def _may_tile(self, inputs: Any) -> bool:
        """Whether modules may run in tiles: batches in parts, where they may run so, take less time."""
        plain = self._options.sub_batches is None and self._module.automatic_optimization
        return plain and not self._may_cut(inputs)

    def _look_for_tiles(self) -> bool:
        """Look for modules to run in tiles, where a larger batch than any before has no plan. Returns whether any."""
        inputs, before = self.inputs, self.lean_step
        if inputs is None or before.tiles or self._tightened or not (self._options.rounding and self._may_tile(inputs)):
            return False
        n_bytes = local_bytes(tensors_of(inputs))
        if n_bytes <= self._largest_in_tiles_bytes:
            return False
        self._largest_in_tiles_bytes = n_bytes
        try:
            with one_bar(self._shown), doing("look for modules to run in tiles"):
                account = partial(self._fake_account, inputs)
                found = found_tiles(self._module, account, before, self.budget_bytes or 0, self._options.policy)
        except ConfigError:  # a step that needs values
            return False
        if found is not None:
            self.lean_step, self.lean = LeanStep(before.names, found.tiles), f"{self.lean} {found}".strip()
        return found is not None

    def _with_outputs_of(self, names: tuple[str, ...]) -> LeanStep:
        return LeanStep(names, self.lean_step.tiles)

    def outputs_made(self) -> dict[str, str]:
        """Outputs that the last forward made after all, and the functions that asked.

        Later steps make those at once whose loss was not taken in chunks. For the others less was made than in a plain
        step: a metric reads the output, but nothing of it is saved.
        """
        outcomes = self.lean_step.outcomes
        useless = {name for name, o in outcomes.items() if o.asked_by and not o.chunks}
        if useless:
            self.lean_step = self._with_outputs_of(tuple(n for n in self.lean_step.names or () if n not in useless))
        return {name: o.asked_by for name, o in outcomes.items() if o.asked_by}

    def _end_trial(self, account: BatchAccount) -> None:
        """A step without outputs was recorded: where it need not have been, they are made from now on."""
        self._on_trial, chunks = False, max((o.chunks for o in self.lean_step.outcomes.values()), default=0)
        needed = kept_peak_bytes(account) + self.lean_step.outputs_bytes > (self.budget_bytes or 0)
        if needed and self.lean_step.names and chunks:
            self.lean = f"{in_words(self.lean_step.names, chunks)}."
        else:
            self.lean_step = self._with_outputs_of(())

    def _fake_account(self, inputs: Any, lean_step: LeanStep) -> BatchAccount:
        module = self._module
        recorded = fake_steps(module.trainer, module, lean_step)
        return self._beside.account_of_part(self._on_machine(recorded(inputs)), module, inputs)

    def _sub_batch_peaks(self, inputs: Any, least_samples: int = LEAST_ASKED) -> SubBatchPeaks:
        assert self.budget_bytes is not None
        module = self._module
        recorded = fake_steps(module.trainer, module, self.lean_step)

        def account(inputs: Any) -> BatchAccount:
            return self._beside.account_of_part(self._on_machine(recorded(inputs)), module, inputs)

        sizes = gradient_sizes(module)
        least = least_samples if batch_norm_of(module) else 1
        return SubBatchPeaks(account, sizes, inputs, self.budget_bytes, self._options.policy, least)

    @property
    def _shown(self) -> bool:
        trainer: Any = self._module.trainer
        return self._options.verbose and trainer.is_global_zero

    def _adviser(self, account: BatchAccount) -> Adviser:
        assert self.budget_bytes is not None
        norms = self._options.batch_norm_in_parts is not False
        cut = self._sub_batch_peaks(self.inputs, LEAST_SAMPLES) if self._may_cut(self.inputs, norms=norms) else None
        return Adviser(
            self._module.trainer, self._module, self._options, account, self.budget_bytes, cut, self._lean_account
        )

    def _lean_account(self) -> BatchAccount | None:
        """The batch without outputs that the options keep; None where there are none to leave out."""
        if self._options.rounding or self.inputs is None:
            return None
        try:
            found = self._lean_choice(self.inputs)
        except ConfigError:
            return None
        return found.account if found is not None else None

    def _may_cut(self, inputs: Any, *, norms: bool = False) -> bool:
        """Whether a batch could run as sub-batches, and does not; ``norms``: each normalised by itself."""
        if inputs is None or self._options.cuts_hindrance("auto") or self._options.sub_batches is not None:
            return False
        by_batch = not norms and batch_norm_of(self._module)
        hindered = by_batch or sub_batch_hindrance(self._module.trainer, self._module)
        return not hindered and can_be_cut(inputs[0][0])

    def _grows_smaller(self, account: BatchAccount) -> bool:
        """Whether a step without a plan is of a part that can be smaller, as we chose the number; notes it."""
        helps = self.budget_bytes is not None and account.rest_bytes <= self.budget_bytes and not self._tightened
        known = helps and self._sizes_of_parts and self.inputs is not None
        samples = n_samples(self.inputs[0][0]) if known else 0
        least = LEAST_ASKED if known and batch_norm_of(self._module) else 1
        found = samples >= 2 * least and samples in self._sizes_of_parts
        self.n_too_large += found
        return found

    @property
    def _ends_the_run(self) -> bool:
        """Whether a batch that does not fit is an error, rather than run as small as it can be."""
        asked, trainer = self._options.over_budget, cast(Any, self._module.trainer)
        # a resumed run may meet its longest batch first; under manual optimization the first batch has taken steps
        begun = self.n_planned > 0 or trainer.fit_loop.total_batch_idx > 0
        return not self._tightened and (asked == "raise" or (asked == "auto" and not begun))

    def _refuse(self, error: InfeasibleBudgetError, step: Trace) -> None:
        """Raise the error, or warn once; a step that has not run yet is judged when it has."""
        if self._tightened or FORESEEN in step.meta:
            return
        if self._ends_the_run:
            raise error from None  # its cause is the same sentence without the advice
        if self.budget_bytes is not None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"CTDR: {error.problem} Such steps run with the smallest plan found. This warning is shown once. "
                'memory=Memory(over_budget="raise") ends the run instead.'
            )


def _smallest(step: Prepared, named_bytes: int) -> Plan:
    """The plan of the least peak at any time, or of one that a search for a budget has named, which may be less."""
    made = plan(step, Budget(seconds=math.inf))
    try:
        return plan(step, named_bytes) if named_bytes < made.peak_bytes else made
    except InfeasibleBudgetError:  # of a batch with more beside its step, or another policy's
        return made
