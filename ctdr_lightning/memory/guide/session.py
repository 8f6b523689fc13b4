"""Steps over a whole run, each planned as soon as it was recorded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.memory.guide.step_guide import StepGuide, Tensors
from ctdr_lightning.memory.guide.step_kinds import Planner


class Session(StepGuide):
    """Runs steps under plans that it has made itself.

    Args:
        planner: From a trace to a plan; called once for each kind of step.
        options: As for `StepGuide`.
    """

    def __init__(self, planner: Planner, **options: Any) -> None:
        super().__init__(**options)
        self._planner = planner

    def begin(self, signature: Hashable, *, meter: bool = False, beside_bytes: int = 0, passing: Tensors = ()) -> None:
        """Before the forward, as for `StepGuide`."""
        self.abort()
        self.plan_with(self._planner, signature)
        super().begin(signature, meter=meter, beside_bytes=beside_bytes, passing=passing)

    def refute(self, error: ReplayError) -> None:
        """The last step ended in an error of verification: its kind is planned anew."""
        super().refute(error)
        self.plan_with(self._planner)

    def end(self) -> None:
        """After the backward: the plan for the steps to come is made. Twice is once."""
        super().end()
        self.plan_with(self._planner)

    def replan(self, planner: Planner) -> None:
        """Make the plans with another planner: the present kind's now, each other's before a step of it.

        Args:
            planner: From a trace to a plan.
        """
        self._planner = planner
        self.outdate()
        self.plan_with(planner)
