"""Takes the tape off the dispatch stack while modules run that the plan does not touch.

A dispatch mode costs about 9 us an op even when it does nothing. A *region* is the part of a forward between the start
of one module's forward and the start of the next. A region is quiet if the plan replays no op of it, and
no op of it writes to a tensor that a replay reads: there the mode leaves the stack, until a busy region starts. Where
autograd saves a dropped value in a quiet region, the saved-tensor hooks alone stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from ctdr_lightning.basics.torch_private import TorchDispatchMode, current_dispatch_mode, graph_task_id
from ctdr_lightning.memory.plans.regions import Regions
from ctdr_lightning.memory.tape.inference_blocks import InferenceBlocks


class Sleeper:
    """Takes a dispatch mode off the stack in quiet regions.

    Args:
        regions: Of the mode's script.
        switch: Puts the mode on the stack, or takes it off.
        wakes: Told the index of the next line when the mode is back.
        listen: Told whether something dropped may be saved, where the mode does not see it or has just come back;
            says whether the hooks are as it was told.

    Attributes:
        awake: Whether the mode is on the stack.
        stays_awake: Set where the step differs from the script: from then on every op is seen.
    """

    def __init__(
        self,
        regions: Regions,
        switch: Callable[[bool], None],
        wakes: Callable[[int], None],
        listen: Callable[[bool], bool],
    ) -> None:
        self._regions = regions
        self._switch, self._wakes, self._listen = switch, wakes, listen
        self._thread = threading.get_ident()
        self._below = current_dispatch_mode()
        self._region = self._n_training = 0
        self._mode: TorchDispatchMode | None = None
        self._blocks = InferenceBlocks()
        self._settled = False  # whether mode and hooks are as the last region needs them
        self.awake = True
        self.stays_awake = False

    def attach(self, mode: TorchDispatchMode) -> None:
        """Follow the forward from here; the mode is on the stack."""
        self._mode = mode
        self._blocks.__enter__()
        self._hook = register_module_forward_pre_hook(self._begin)

    def detach(self) -> None:
        """Follow no longer."""
        self._hook.remove()
        self._blocks.__exit__(None, None, None)
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
        if self._blocks.depth:  # begins no region: the block would undo a move of the mode
            return
        self._region = region = self._region + 1
        if region <= self._regions.last:
            self._n_training += module.training
        # This runs for each module with cold caches, 30 us on a slow machine, and most regions are as the one before.
        if not self._settled or region > self._regions.last or self._regions.differs[region]:
            self._turn(region)

    def _turn(self, region: int) -> None:
        """Put the mode and the hooks on or off the stack as a region needs them."""
        busy = self._regions.busy
        wanted = self.stays_awake or region >= len(busy) or busy[region]
        self._settled = wanted and self.awake
        if self._settled:
            return
        if wanted is not self.awake:
            if current_dispatch_mode() is not (self._mode if self.awake else self._below):
                return  # a mode of others lies above
            self.awake = wanted
            self._switch(wanted)
            if wanted and region < len(busy):
                self._wakes(self._regions.first[region])
        self._settled = region >= len(busy) or self._listen(self._regions.listens[region])
