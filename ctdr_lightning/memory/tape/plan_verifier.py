"""Verifies a guided step: dropped values come back unchanged, or the error says which values to pin."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.actions import first_wrong, unproven_sources
from ctdr_lightning.memory.tape.courier import Belled
from ctdr_lightning.memory.tape.verifier import NOT_REPEATABLE, Proof, Verifier, numeric_settings
from ctdr_lightning.memory.traces.trace import CAME_BACK_OTHERWISE
from ctdr_lightning.memory.values.value import Handle, Held, Value, root_of

Take = Callable[[Tensor], Handle | Held | Belled]
Give = Callable[[Any], Tensor]  # from the other's result


def verifier_of(plan: Plan, verify: str, settings: Hashable, *, at_once: bool) -> PlanVerifier | None:
    """The verifier of a step that begins; None where it is not to be verified.

    Args:
        plan: The step's plan; it remembers the settings under which it was verified.
        verify: One of ``VERIFY``.
        settings: Settings in addition to those of torch under which a step needs its own verification.
        at_once: As for `Verifier`.
    """
    proof = plan.once("proof", Proof)
    found = (settings, numeric_settings())
    if not proof.due(verify, found):
        return None
    return PlanVerifier(plan, lambda: proof.settings.add(found), at_once=at_once)


class PlanVerifier(Verifier):
    """Verifies one step under a plan.

    Args:
        plan: The plan.
        passed: As for `Verifier`.
        at_once: As for `Verifier`.
    """

    def __init__(self, plan: Plan, passed: Callable[[], None], *, at_once: bool) -> None:
        super().__init__(self._refuted, passed, at_once=at_once)
        self._plan = plan

    def around(self, take: Take, give: Give, diverged: Callable[[], bool]) -> tuple[Take, Give]:
        """Hooks for saved tensors that call others and verify the tensors that these save and give back.

        Args:
            take: Called to save a tensor.
            give: Called to have it back.
            diverged: Whether the step has left the plan, which says nothing of it from then on.
        """

        def pack(tensor: Tensor) -> Handle | Held | Belled:
            handle = take(tensor)
            value = _value_behind(handle)
            if value is not None and not diverged() and (value.node is not None or value.leaves):
                self.saved(value, tensor, self._identity(value))
            return handle

        def unpack(handle: Handle | Held | Belled) -> Tensor:
            tensor = give(handle)
            value = _value_behind(handle)
            if value is not None:
                self.returned(value, tensor)
            return tensor

        return pack, unpack

    def _identity(self, value: Value) -> int:
        """The id in the trace of a value, or of its base; -1 if the program made that before the step."""
        root = root_of(value)
        if root.node is None:
            return root.identity
        trace = self._plan.trace
        return trace.ops[trace.forward_ops[int(root.node.index)]].outputs[root.node.place_of(root)]

    def _refuted(self, wrong: set[int], right: set[int]) -> ReplayError:
        trace, actions, first = self._plan.trace, self._plan.timeline.actions, min(wrong)
        suspects = unproven_sources(trace, actions, wrong, right)
        op = trace.ops[trace.values[first].op].name if first >= 0 else "an operation"
        return ReplayError(
            f"{op} of {trace.module_of(first) if first >= 0 else 'the step'} was dropped and came back with other "
            f"contents: {NOT_REPEATABLE}.",
            "plan again with trace.with_pins(error.pins); a Session and a Trainer do so by themselves.",
            pins=dict.fromkeys(suspects, CAME_BACK_OTHERWISE),
            first_pins=unproven_sources(trace, actions, first_wrong(trace, actions, wrong, right), right),
        )


def _value_behind(handle: Handle | Held | Belled) -> Value | None:
    """The value behind a handle; None if the handle holds its tensor itself."""
    if type(handle) is Belled:
        handle = handle.handle
    return handle.value if isinstance(handle, Handle) else None
