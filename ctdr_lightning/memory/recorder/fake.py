"""Steps without memory: a module's copy on fake tensors, to be recorded like a real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import FakeCopyMode, FakeTensorMode, tree_map_only
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.recorder import record
from ctdr_lightning.memory.traces.trace import Trace

M = TypeVar("M", bound=nn.Module)


def record_fake(
    module: M, inputs: Any, step: Callable[[M, Any], Tensor], *, device: DeviceModel | CallSeconds | str | None = None
) -> Trace:
    """Record a step of a module without computing it and without its memory.

    Args:
        module: The module; it is copied, never touched.
        inputs: Any nest of tensors that ``step`` needs; only shapes and dtypes matter.
        step: From the module's copy and the fake inputs to a scalar loss.
        device: Device whose speed the ops are given: a model, measured calls, or a name from the table (``"h100"``);
            None is this processor.

    Returns:
        The trace that a real step of these shapes would give, with modelled seconds.
    """
    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        twin = copy.deepcopy(module)
    fakes = tree_map_only(Tensor, mode.from_tensor, inputs)
    with mode, torch.enable_grad():
        return record(lambda: step(twin, fakes), device=device)
