"""Steps without memory: a module's copy on fake tensors, to be recorded like a real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import NEEDS_VALUES, FakeCopyMode, FakeTensorMode, tree_map_only
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.recorder import record
from ctdr_lightning.memory.traces.trace import Trace

M = TypeVar("M", bound=nn.Module)


def record_fake(
    module: M, inputs: Any, step: Callable[[M, Any], Tensor], *, device: DeviceModel | CallSeconds | str | None = None
) -> Trace:
    """Record a step of a module without computing it and without its memory.

    Args:
        module: The module; it is copied, never touched. It may have been built on the meta device.
        inputs: Any nest of tensors that ``step`` needs; only shapes and dtypes matter, so that tensors on the meta
            device will do.
        step: From the module's copy and the fake inputs to a scalar loss.
        device: Device whose speed the ops are given: a model, measured calls, or a name from the table (``"h100"``);
            None is this processor.

    Returns:
        The trace that a real step of these shapes would give, with modelled seconds. Workspaces are this processor's;
        those of another device are not known and counted as 0, and ``meta["workspaces"]`` says so.

    Raises:
        ConfigError: When the step reads values of tensors, or returns no scalar tensor that requires grad.

    Example:
        >>> trace = record_fake(nn.Linear(8, 4), torch.empty(2, 8, device="meta"), lambda net, x: net(x).sum())
        >>> trace.value_bytes(trace.ops[-1].outputs[0]) > 0
        True
    """
    mode = FakeTensorMode()

    def fake(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return mode.from_tensor(tensor)
        with mode:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return found.requires_grad_(tensor.requires_grad)

    # A module that was built on the meta device: its tensors are given to the copy as if they had been copied already.
    copied = {id(t): fake(t) for t in (*module.parameters(), *module.buffers()) if t.is_meta}
    copied |= {id(p): nn.Parameter(copied[id(p)], p.requires_grad) for p in module.parameters() if p.is_meta}
    with FakeCopyMode(mode):
        twin = copy.deepcopy(module, copied)
    fakes = tree_map_only(Tensor, fake, inputs)
    try:
        with mode, torch.enable_grad():
            standing = (*twin.parameters(), *twin.buffers())
            return record(lambda: step(twin, fakes), device=device, standing=standing)
    except NEEDS_VALUES as error:
        raise ConfigError(
            f"The step of {type(module).__name__} needs the values of tensors ({error.func}), which fake tensors do "
            "not have.",
            "Record a real step, record(lambda: ...), or leave that part out of the step.",
        ) from error
