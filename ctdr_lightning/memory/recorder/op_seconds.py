"""Seconds without a device: a roofline model of a named GPU or of this machine's processor.

Williams et al., CACM 2009. An op takes the larger of its arithmetic time and its memory time, and never less than a
launch.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.tensors import tensors_in


def op_seconds(device: DeviceModel, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """How long one call takes on the device.

    Args:
        device: The device's sustained rates.
        func: The op.
        args: Its arguments; tensors may be fake.
        kwargs: Its keyword arguments.
        out: Its result: a tensor or several.
    """
    if traits(func).view:
        return 0.0
    outs = list(tensors_in(out if type(out) in (tuple, list) else (out,)))
    count = flop_registry.get(getattr(func, "_overloadpacket", func))  # a higher-order operator has no packet
    flops = count(*args, **kwargs, out_val=out) if count is not None else 0
    moved = sum(t.nbytes for t in (*tensors_in((*args, *kwargs.values())), *outs))
    half = bool(outs) and outs[0].element_size() <= 2
    rate = device.flops16_per_s if half else device.flops32_per_s
    return max(device.launch_s, flops / rate, moved / device.bytes_per_s)
