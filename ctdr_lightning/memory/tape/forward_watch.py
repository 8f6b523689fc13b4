"""Notices, while a guided step runs, saves that the recorded step did not make and that its plan does not cover.

A warm-up under ``no_grad`` leaves a plan for a light step, and the whole step that comes after it has the same batch
and the same ops. Only its graph would show the difference, when memory is taken already. So the forwards of modules are
counted, for about 1 us each: more of them than were recorded, or one with gradients that had none, tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from ctdr_lightning.basics.torch_private import graph_task_id
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.tape.inference_blocks import InferenceBlocks


class ForwardWatch:
    """Follows the forwards of modules, and reports once if a step exceeds the recorded one.

    Args:
        recorded: For each forward of a module that the recorded step began, whether gradients were on; None where
            there is nothing to compare with, as this is the recorded step.
        beyond: Told the number of the first forward (from 1) that saves more than was recorded.

    Attributes:
        seen: For each forward that has begun, whether gradients were on.
        done: Set when the step's forward is over; later forwards are not part of it.
    """

    def __init__(self, recorded: Sequence[bool] | None, beyond: Callable[[int], None]) -> None:
        self.seen: list[bool] = []
        self.done = False
        self._recorded, self._beyond = recorded, beyond
        self._told = recorded is None
        self._thread = threading.get_ident()
        self._blocks = InferenceBlocks()

    def __enter__(self) -> ForwardWatch:
        self._blocks.__enter__()
        self._hook = register_module_forward_pre_hook(self._begins)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()
        self._blocks.__exit__(None, None, None)

    def _begins(self, module: nn.Module, args: Any) -> None:
        if self.done or graph_task_id() != -1 or self._blocks.depth or is_compiling():
            return
        if threading.get_ident() != self._thread:
            return
        self.seen.append(torch.is_grad_enabled())
        if self._told or not self.seen[-1]:
            return
        number, recorded = len(self.seen), self._recorded or ()
        if number > len(recorded) or not recorded[number - 1]:
            self._told = True
            self._beyond(number)


def reached_before(plan: Plan, number: int) -> int:
    """Bytes that a step has in memory by its plan when a forward of a module begins.

    Args:
        plan: Of the step.
        number: Of the forward, from 1; a larger one than the plan knows means the end of the step's forward.
    """
    trace = plan.trace
    regions = [trace.ops[index].region for index in trace.forward_ops]
    ticks = [trace.ops[index].tick for index in trace.forward_ops]
    if -1 in regions or not ticks:
        return plan.forward_peak_bytes
    at = next((tick for tick, region in zip(ticks, regions, strict=True) if region >= number), ticks[-1] + 1)
    return int(plan.timeline.bytes_at[at - 1]) if at else 0
