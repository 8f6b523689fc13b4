"""Lets the tape sleep while modules run in which its plan has nothing to do: seeing an op costs even who does nothing.

A *region* is what runs between the beginning of one module's forward and that of the next. In a quiet region nothing is
replayed and nothing is written that a replay reads, so that whether its ops are seen makes no difference; the dispatch
mode leaves the stack, and comes back when a busy region begins. Where autograd saves something dropped in a quiet
region, the saved-tensor hooks alone are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from ctdr_lightning.basics.torch_private import TorchDispatchMode, current_dispatch_mode, graph_task_id
from ctdr_lightning.memory.plans.regions import Regions

if TYPE_CHECKING:  # a plan knows its regions
    pass


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
        self._below = current_dispatch_mode()
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
        if is_compiling() or graph_task_id() != -1 or threading.get_ident() != self._thread:
            return
        self._region += 1
        region, busy = self._region, self._regions.busy
        if region <= self._regions.last:
            self._n_training += module.training
        wanted = self.stays_awake or region >= len(busy) or busy[region]
        if wanted and self.awake:
            return
        if wanted is not self.awake:
            if current_dispatch_mode() is not (self._mode if self.awake else self._below):
                return  # a mode of others lies above
            self.awake = wanted
            self._switch(wanted)
            if wanted and region < len(busy):
                self._wakes(self._regions.first[region])
        if region < len(busy):
            self._listen(self._regions.listens[region])
