"""Steps without memory: a module's copy on fake tensors, to be recorded like a real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.devices import DeviceModel, device_model
from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.nests import map_leaves
from ctdr_lightning.basics.torch_private import NEEDS_VALUES, FakeCopyMode
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.fake_values import ValuedFakes
from ctdr_lightning.memory.recorder.on_cpu import CpuFakes
from ctdr_lightning.memory.recorder.on_gpu import GPU, GpuFakes
from ctdr_lightning.memory.recorder.precision import Precision
from ctdr_lightning.memory.recorder.recorder import record
from ctdr_lightning.memory.traces.trace import ASSUMED, Trace
from ctdr_lightning.memory.values.op_seconds import behind_host

M = TypeVar("M", bound=nn.Module)


def record_fake(
    module: M,
    inputs: Any,
    step: Callable[[M, Any], Tensor],
    *,
    device: DeviceModel | CallSeconds | str | None = None,
    precision: str | None = None,
    reads_values: bool = False,
) -> Trace:
    """Record a step of a module without computing it and without its memory.

    Args:
        module: The module; it is copied, never touched. It may have been built on the meta device.
        inputs: Any nest of tensors that ``step`` needs; only shapes and dtypes matter, so that tensors on the meta
            device will do.
        step: From the module's copy and the fake inputs to a scalar loss.
        device: Device that the step is for: a model, measured calls, or a name from the table (``"h100"``); None is
            this processor. For a GPU module and inputs are on ``"cuda"``, and the step runs that GPU's kernels.
        precision: As Lightning names it: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, or
            ``"tf32"`` for 32-bit matrix products by tensor cores. None leaves precision to the step.
        reads_values: Whether the step may read values. Those that follow from the batch's integers and small tensors
            are computed, others are assumed, as if activations were 2; ``meta["assumed"]`` names the operators.
            Selections by values, such as ``x[mask]``, take all there is to select.

    Returns:
        The trace that a real step of these shapes would give, with modelled seconds. Workspaces are this processor's;
        a GPU's are modelled, and ``meta["workspaces"]`` says so.

    Raises:
        ConfigError: If the step reads values of tensors and may not, or returns no scalar tensor that requires grad;
            when the precision is not known or the GPU does not compute in it.

    Example:
        >>> trace = record_fake(nn.Linear(8, 4), torch.empty(2, 8, device="meta"), lambda net, x: net(x).sum())
        >>> trace.value_bytes(trace.ops[-1].outputs[0]) > 0
        True
    """
    model = device_model(device) if isinstance(device, str) else device
    gpu = model if isinstance(model, DeviceModel) and model.is_gpu else None
    asked = Precision.read(precision, gpu)
    mode = CpuFakes(reads_values=reads_values) if gpu is None else GpuFakes(gpu, reads_values=reads_values)
    twin, fakes = _faked(module, inputs, mode, gpu is not None, asked)
    try:
        kernels = mode.kernels() if isinstance(mode, GpuFakes) else nullcontext()
        with mode, mode.readings(), kernels, asked.settings(), torch.enable_grad():
            standing = (*twin.parameters(), *twin.buffers())
            found = record(lambda: asked.run(step, twin, fakes), device=model, standing=standing, root=twin)
    except NEEDS_VALUES as error:
        raise ConfigError(
            f"The step of {type(module).__name__} needs the values of tensors ({error.func}), which fake tensors do "
            "not have.",
            "Give reads_values=True, which assumes them where they are not known; or record a real step, "
            "record(lambda: ...).",
        ) from error
    found = found.with_note(ASSUMED, ", ".join(sorted(mode.assumed)))
    if gpu is None:
        return found
    fed = found.with_costs(behind_host(gpu, (op.seconds for op in found.ops)), {})
    return replace(fed, device=GPU.type)  # the first tensor may have been a constant


def _faked(module: M, inputs: Any, mode: ValuedFakes, on_card: bool, precision: Precision) -> tuple[M, Any]:
    """The module's copy and its inputs on fake tensors, on the GPU where they are for one."""

    def fake(tensor: Tensor) -> Tensor:
        dtype = precision.dtype_of(tensor)
        if not (tensor.is_meta or on_card or dtype is not tensor.dtype):
            return mode.from_tensor(tensor)
        return mode.new_like(tensor, dtype).requires_grad_(tensor.requires_grad)

    # A tensor that is not merely copied is given to the copy as if it had been copied already.
    own = [t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided]
    made_anew = [t for t in own if t.is_meta or on_card or precision.dtype_of(t) is not t.dtype]
    instead: dict[Any, Any] = {t: fake(t) for t in made_anew}
    instead |= {p: nn.Parameter(instead[p], p.requires_grad) for p in module.parameters() if p in instead}
    # The state of a generator, a tensor, cannot be faked.
    attributes = (value for each in module.modules() for value in vars(each).values())
    instead |= {g: copy.deepcopy(g) for g in attributes if isinstance(g, torch.Generator)}
    with FakeCopyMode(mode):
        return duplicate(module, instead), map_leaves(
            lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, inputs
        )
