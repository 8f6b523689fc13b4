"""The layers that plan a step and guard its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ctdr_lightning.memory import signature_of
from ctdr_lightning.memory.guide.step_guide import StepGuide
from ctdr_lightning.trainer.training_step.events import MadeLean, OutputMade, RunsWhole
from ctdr_lightning.trainer.training_step.layers import Backward, Chain, Layer, Step
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.optimizer.in_backward import StepInBackward


class Lean(Layer):
    """Runs the forward of a step without the outputs that it can do without, and with modules in tiles.

    Args:
        memory: Plans the steps.
    """

    def __init__(self, memory: MemoryStage) -> None:
        self._memory = memory

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run lean; make the outputs that outlive the forward, before the weights change."""
        planner, note = self._memory.planner, self._memory.note
        if step.module.automatic_optimization:  # a manual step may change weights before it uses outputs again
            planner.look_for_outputs(step.inputs)
        if planner.lean:
            note(MadeLean(planner.lean))
        with planner.lean_step.of(step.module) as heads:
            output = rest.forward(step)
            if heads is not None:
                heads.settle()
        for layer, asked_by in planner.outputs_made().items():
            if planner.lean:
                note(OutputMade(layer, asked_by))
        for module, reason in planner.lean_step.left_alone.items():
            note(RunsWhole(module, reason))
        return output


class Planned(Layer):
    """Tells the kind of each step, and has its plan made where that is due.

    Args:
        memory: Plans the steps.
    """

    def __init__(self, memory: MemoryStage) -> None:
        self._memory = memory

    def forward(self, step: Step, rest: Chain) -> Any:
        """Make the memory ready, before the retry takes hold of gradients."""
        alike = signature_of(step.inputs, step.module)
        lean, units = self._memory.planner.lean_key, self._memory.units.key

        def kind_of(adds: bool) -> Hashable:
            return step.extra, adds, lean, units, alike

        beside_bytes, adds = self._memory.make_ready(step.inputs, kind_of, step.later)
        return rest.forward(replace(step, kind=kind_of(adds), beside_bytes=step.beside_bytes + beside_bytes))

    def done(self) -> None:
        """Plan a step that was recorded, after the first one with another choice of units perhaps."""
        self._memory.choose_units()
        self._memory.plan_due()


class Guided(Layer):
    """Records a step or carries out its plan.

    Args:
        memory: Plans the steps.
        session: Guards the memory of each step.
    """

    def __init__(self, memory: MemoryStage, session: StepGuide) -> None:
        self._memory, self._session = memory, session

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run under the session."""
        self._memory.plan_due(step.kind)
        planned = self._session.plan_of(step.kind) is not None
        self._session.absent_bytes = 0 if planned else self._memory.planner.absent_bytes()
        gradients = [] if planned else [p.grad for p in step.module.parameters() if p.grad is not None]
        self._session.begin(step.kind, beside_bytes=step.beside_bytes, passing=gradients)
        del gradients  # the step may free them
        try:
            output = step.finish(rest.forward(step))
        except BaseException:
            self._session.abort()
            raise
        self._session.forward_done()
        return output

    def backward(self, loss: Tensor, rest: Backward) -> None:
        """A step is known by its graphs."""
        self._session.backward_begins(loss)
        rest(loss)

    def done(self) -> None:
        """A recorder leaves."""
        self._session.end()

    def leave(self) -> None:
        """Leave a step that is under way."""
        self._session.abort()


class Unguided(Layer):
    """Finishes the output of a step where no memory is planned."""

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run, and finish."""
        return step.finish(rest.forward(step))


class Taught(Layer):
    """Runs a step beside the teacher.

    Args:
        around: From the module and its step to the output, perhaps another loss.
    """

    def __init__(self, around: Callable[[nn.Module, Callable[[], Any]], Any]) -> None:
        self._around = around

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run with the teacher's loss."""
        return self._around(step.module, lambda: rest.forward(step))


class Updating(Layer):
    """Updates parameters inside the backward, where that is asked for.

    Args:
        in_backward: Does so.
        session: The updates are hidden from it; None where no memory is planned.
        begins: Told of the optimizer before each update.
    """

    def __init__(
        self, in_backward: StepInBackward, session: StepGuide | None, begins: Callable[[Any], None] | None
    ) -> None:
        self._in_backward, self._session, self._begins = in_backward, session, begins

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run; a step that is repeated begins again."""
        self._in_backward.step_begins()
        return rest.forward(step)

    def backward(self, loss: Tensor, rest: Backward) -> None:
        """Update each parameter as its gradient is ready."""
        unseen = self._session.unseen if self._session is not None else None
        with self._in_backward.backward(unseen, self._begins):
            rest(loss)
