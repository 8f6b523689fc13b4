"""BatchNorm statistics, re-estimated after layers changed: no optimizer step, most of the lost accuracy back.

The statistics are reset and averaged over some training batches with equal weight (``momentum=None``), and over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def tracked(module: nn.Module) -> dict[str, Any]:
    """The normalisation layers that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _KINDS) and layer.running_mean is not None
    }


@torch.no_grad()
def reestimate(
    module: nn.Module,
    run: Callable[[Any], object],
    batches: Iterable[Any],
    average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> int:
    """Replace running statistics by their plain average over some batches.

    Args:
        module: Its normalisation layers are changed in place; modes and momenta are put back.
        run: Runs the module on one batch.
        batches: Training batches.
        average: Averages a tensor over ranks; the identity on one.

    Returns:
        Batches used.
    """
    layers = list(tracked(module).values())
    if not layers:
        return 0
    before = [(layer, layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.train().momentum = None
    n_batches = 0
    try:
        for batch in batches:
            run(batch)
            n_batches += 1
    finally:
        for layer, training, momentum in before:
            layer.train(training).momentum = momentum
    for layer in layers:
        layer.running_mean.copy_(average(layer.running_mean))
        layer.running_var.copy_(average(layer.running_var))
    return n_batches


@torch.no_grad()
def copy_statistics(source: nn.Module, target: nn.Module) -> None:
    """Copy running statistics between two modules of the same structure."""
    theirs = tracked(source)
    for name, layer in tracked(target).items():
        for key, buffer in layer.named_buffers(recurse=False):
            buffer.copy_(getattr(theirs[name], key))
