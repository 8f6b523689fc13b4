"""Lets the tape sleep while modules run in which its plan has nothing to do: seeing an op costs even who does nothing.

A *region* is what runs between the beginning of one module's forward and that of the next. In a quiet region nothing is
replayed and nothing is written that a replay reads, so that whether its ops are seen makes no difference; the dispatch
mode leaves the stack, and comes back when a busy region begins. Where autograd saves something dropped in a quiet
region, the saved-tensor hooks alone are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

if TYPE_CHECKING:  # a plan knows its regions
    from ctdr_lightning.memory.plans.plan import ScriptLine

MODULES_AN_OP = 4  # to be told of so many modules costs as much as to see one op

_in_backward = torch._C._current_graph_task_id


class Regions:
    """The regions of a script: where each begins, and which are busy.

    Attributes:
        first: For each region the index of the first line that is not before it.
        busy: For each region whether the tape must see its ops.
        listens: For each region whether something dropped may be saved in it: before its first op if it is busy, else
            anywhere.
        worthwhile: Whether so many ops are in quiet regions that it pays to be told of every module.
        last: The region of the last line.
        n_training: How many of the modules whose forwards begin the regions up to ``last`` are in training mode.
    """

    def __init__(self, script: Sequence[ScriptLine], n_training: int = -1) -> None:
        self.n_training = n_training
        known = all(line.region >= 0 for line in script)
        count = 1 + max((line.region for line in script), default=-1) if known else 0
        self.busy = [False] * count
        self.first = [len(script)] * count
        for index in reversed(range(len(script) if known else 0)):
            line = script[index]
            self.busy[line.region] |= line.replay or line.writes
            self.first[line.region] = index
        for region in reversed(range(count - 1)):
            self.first[region] = min(self.first[region], self.first[region + 1])
        self.last = script[-1].region if known and script else 0
        self.listens = self._find_listening(script)
        n_unseen = sum(not self.busy[line.region] for line in script) if known else 0
        self.worthwhile = MODULES_AN_OP * n_unseen > count

    def _find_listening(self, script: Sequence[ScriptLine]) -> list[bool]:
        """What is saved between two ops is saved in the region of the first, of the second or between them."""
        listens = [False] * len(self.busy)
        regions = [line.region for line in script] if listens else []
        for line, region, following in zip(script, regions, [*regions[1:], len(listens) - 1], strict=False):
            for other in range(region, following + 1) if line.saves else ():
                listens[other] |= other > region or not self.busy[other]
        return listens


class Sleeper:
    """Takes a dispatch mode off the stack in quiet regions.

    Args:
        regions: Of the mode's script.
        switch: Puts the mode on the stack, or takes it off.
        wakes: Told the index of the next line when the mode is back.
        listen: Told whether something dropped may be saved, where the mode does not see it or has just come back.

    Attributes:
        awake: Whether the mode is on the stack.
        stays_awake: Set where the step differs from the script: from then on every op is seen.
    """

    def __init__(
        self,
        regions: Regions,
        switch: Callable[[bool], None],
        wakes: Callable[[int], None],
        listen: Callable[[bool], None],
    ) -> None:
        self._regions = regions
        self._switch, self._wakes, self._listen = switch, wakes, listen
        self._thread = threading.get_ident()
        self._below = _get_current_dispatch_mode()
        self._region = self._n_training = 0
        self._mode: TorchDispatchMode | None = None
        self.awake = True
        self.stays_awake = False

    def attach(self, mode: TorchDispatchMode) -> None:
        """Follow the forward from here; the mode is on the stack."""
        self._mode = mode
        self._hook = register_module_forward_pre_hook(self._begin)

    def detach(self) -> None:
        """Follow no longer."""
        self._hook.remove()
        self._mode = None

    def difference(self) -> str:
        """In which way other modules ran than those of the recorded step, in words; empty where none is known."""
        last, expected = self._regions.last, self._regions.n_training
        if self._region < last:
            return f"the step ran {self._region} modules, the plan expects {last}"
        if expected >= 0 and self._n_training != expected:
            return f"{self._n_training} of {last} modules were in training mode, the plan expects {expected}"
        return ""

    def _begin(self, module: nn.Module, args: Any) -> None:
        if is_compiling() or _in_backward() != -1 or threading.get_ident() != self._thread:
            return
        self._region += 1
        region, busy = self._region, self._regions.busy
        if region <= self._regions.last:
            self._n_training += module.training
        wanted = self.stays_awake or region >= len(busy) or busy[region]
        if wanted and self.awake:
            return
        if wanted is not self.awake:
            if _get_current_dispatch_mode() is not (self._mode if self.awake else self._below):
                return  # a mode of others lies above
            self.awake = wanted
            self._switch(wanted)
            if wanted and region < len(busy):
                self._wakes(self._regions.first[region])
        if region < len(busy):
            self._listen(self._regions.listens[region])
