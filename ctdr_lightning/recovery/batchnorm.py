"""BatchNorm statistics, re-estimated after layers changed: no optimizer step, most of the lost accuracy back.

The statistics are reset and averaged over some training batches with equal weight (``momentum=None``), and over ranks
("precise BatchNorm", Wu and Johnson, arXiv:2105.07576). InstanceNorm takes no plain average and keeps its running
statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.interrupts import put_back_after

_KIND = nn.modules.batchnorm._BatchNorm


def tracked(module: nn.Module) -> dict[str, Any]:
    """The BatchNorm layers that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _KIND) and layer.running_mean is not None
    }


@torch.no_grad()
def reestimate(
    module: nn.Module,
    run: Callable[[Any], object],
    batches: Iterable[Any],
    average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> set[str]:
    """Replace running statistics by their plain average over some batches.

    Args:
        module: Its BatchNorm layers are changed in place; modes and momenta are put back.
        run: Runs the module on one batch.
        batches: Training batches.
        average: Averages a tensor over ranks; the identity on one.

    Returns:
        Names of the layers that a batch reached; the others keep their statistics.
    """
    layers = tracked(module)
    before = [(layer, layer.training, layer.momentum) for layer in layers.values()]
    kept = {name: _statistics(layer) for name, layer in layers.items()}

    def put_back() -> None:
        for layer, training, momentum in before:
            layer.train(training).momentum = momentum

    with put_back_after(put_back):
        for layer in layers.values():
            layer.reset_running_stats()
            layer.train().momentum = None
        for batch in batches if layers else ():
            run(batch)
    reached = {name for name, layer in layers.items() if layer.num_batches_tracked > 0}
    for name, layer in layers.items():
        if name in reached:
            layer.running_mean.copy_(average(layer.running_mean))
            layer.running_var.copy_(average(layer.running_var))
        else:
            _put_back(layer, kept[name])
    return reached


@torch.no_grad()
def copy_statistics(source: nn.Module, target: nn.Module) -> None:
    """Copy running statistics between two modules of the same structure."""
    theirs = tracked(source)
    for name, layer in tracked(target).items():
        _put_back(layer, _statistics(theirs[name]))


def _statistics(layer: nn.Module) -> dict[str, Tensor]:
    return {key: buffer.clone() for key, buffer in layer.named_buffers(recurse=False)}


def _put_back(layer: nn.Module, statistics: dict[str, Tensor]) -> None:
    for key, buffer in layer.named_buffers(recurse=False):
        buffer.copy_(statistics[key])
