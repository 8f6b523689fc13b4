"""Sharded training (FSDP2): the strategy of ``trainer=fsdp``, and the modules of a network that become its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ctdr_lightning.basics.errors import ConfigError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# A unit's weights are gathered as a whole, and the next unit's meanwhile: a quarter of a network of even blocks.
_LARGEST_SHARE = 1 / 8
# Each unit costs a collective in the forward and two in the backward; what is smaller is gathered with the root.
_LEAST_SHARE = 1 / 1000


def sharded(
    devices: int | str | Sequence[int], num_nodes: int = 1, accelerator: str = "auto", **options: Any
) -> ModelParallelStrategy:
    """Build Lightning's strategy that shards over every process, where its own default takes the nodes alone.

    Args:
        devices: As of the Trainer.
        num_nodes: As of the Trainer.
        accelerator: As of the Trainer.
        options: As for ``ModelParallelStrategy``.

    Example:
        >>> type(sharded(devices=2, accelerator="cpu", save_distributed_checkpoint=False)).__name__
        'ModelParallelStrategy'
    """
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    size = n_devices(devices, every=max(gpus, 1)) * num_nodes
    return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, **options)


def n_devices(given: int | str | Sequence[int], every: int) -> int:
    """Devices that a Trainer takes on a node.

    Args:
        given: Its argument ``devices``.
        every: The devices of a node, for an argument that says no number.

    Example:
        >>> [n_devices(given, every=4) for given in (2, "3", [0, 1], "0,1", "auto", -1)]
        [2, 3, 2, 2, 4, 4]
    """
    if given in ("auto", -1, "-1"):
        return every
    if isinstance(given, str):
        return len(given.split(",")) if "," in given else int(given)
    return given if isinstance(given, int) else len(given)


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a network's parameters over a mesh, unit by unit; nothing where they are sharded already.

    Args:
        net: Its own forward must run in every step.
        mesh: Of one dimension.

    Raises:
        ConfigError: If the weights differ between the processes, each of which would keep a part of other weights.
    """
    if isinstance(net, FSDPModule):
        return
    _check_equal_weights(net, mesh)
    for unit in (*units(net), net):
        fully_shard(unit, mesh=mesh)


def units(net: nn.Module) -> list[nn.Module]:
    """The blocks of a network that are gathered one by one: children of its outermost ``Sequential`` and lists.

    In a network without these they are its children. A block that holds more than an eighth of the weights is opened
    if it consists of smaller blocks, as a stage of Swin or ConvNeXt does. Blocks with hardly any weights, and such that
    share weights with another part of the network, are left to the network's own unit.

    Args:
        net: Any network.

    Returns:
        Modules of which none is part of another.

    Example:
        >>> units(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        [Linear(in_features=8, out_features=8, bias=True), Linear(in_features=8, out_features=8, bias=True)]
    """
    whole = _n_weights(net)
    uses = _uses(net)
    found: list[nn.Module] = []
    waiting = _blocks(net)
    while waiting:
        block = waiting.pop(0)
        if _n_weights(block) > _LARGEST_SHARE * whole and _consists_of(block, _blocks(block)):
            waiting = _blocks(block) + waiting
        elif _n_weights(block) > _LEAST_SHARE * whole and all(uses[key] == n for key, n in _uses(block).items()):
            found.append(block)
    return found


def share_buffers(net: nn.Module, mesh: DeviceMesh) -> None:
    """Give every process the buffers of the first, such as BatchNorm's statistics, as DDP does in each forward."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in net.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(flat, group=mesh.get_group(), group_src=0)
        for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Children of a module's outermost containers; where these hold little of it, its own children."""
    found = _contained(module)
    if sum(map(_n_weights, found)) > 0.5 * _n_weights(module):
        return found
    # Not single layers: an attention reads the weight of its projection without the projection's forward.
    return [child for child in module.children() if any(True for _ in child.children())]


def _contained(module: nn.Module) -> list[nn.Module]:
    found = []
    for child in module.children():
        is_block = isinstance(module, _CONTAINERS) and type(child) not in (nn.ModuleList, nn.ModuleDict)
        found += [child] if is_block else _contained(child)
    return found


def _consists_of(module: nn.Module, parts: Sequence[nn.Module]) -> bool:
    """Whether parts hold a module's weights, and no part most of them."""
    sizes = [_n_weights(part) for part in parts]
    return sum(sizes) > 0.9 * _n_weights(module) and max(sizes) < 0.75 * _n_weights(module)


def _n_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _check_equal_weights(net: nn.Module, mesh: DeviceMesh) -> None:
    weights = [parameter.detach() for parameter in net.parameters() if not parameter.is_meta]
    sums = [sum(float(function(weight)) for weight in weights) for function in (torch.numel, torch.sum, torch.norm)]
    least = torch.tensor(sums, dtype=torch.float64, device=mesh.device_type)
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, mesh.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, mesh.get_group())
    if not torch.allclose(least, most, rtol=0, atol=0, equal_nan=True):
        raise ConfigError(
            "The network's weights differ between the processes: sharded, they would be parts of different networks.",
            "Give every process the same seed= and the same init_from=.",
        )
