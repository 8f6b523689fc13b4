"""Copies of a module that share its tensors: a candidate costs the memory of its factors alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.interrupts import put_back_after
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.layers.factorized import factorized
from ctdr_lightning.decomposition.layers.surgery import replace_everywhere, walk
from ctdr_lightning.decomposition.layers.tied import follow_owners
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of, weight_of

M = TypeVar("M", bound=nn.Module)
_STD = 0.02  # small enough that no activation overflows, large enough that none is a denormal number, which is slow


def twin_of(model: M) -> M:
    """A copy of a module's structure around the same parameters and buffers.

    Args:
        model: Any module; layers may be replaced in the copy, but a write to its tensors is a write to the model's.
    """
    return duplicate(model, {tensor: tensor for tensor in chain(model.parameters(), model.buffers())})


def structure_of(model: M, choices: Choices) -> M:
    """A twin whose layers have the shapes that choices say; the factors are noise.

    It serves a recording, which looks at shapes alone.

    """
    dense = dict(walk(model))
    layers: dict[str, nn.Module] = {}
    for name, choice in choices.factorized.items():
        kind = kind_of(dense[name])
        assert kind is not None
        assert choice.method is not None
        layers[name] = new = factorized(dense[name], KINDS[kind].geometry(dense[name]), choice.method, choice.ranks)
        for factor in new.factor_layers:
            nn.init.normal_(weight_of(factor), std=_STD)
    return twin_with(model, layers)


def twin_with(model: M, layers: Mapping[str, nn.Module]) -> M:
    """A twin in which some layers have others in their place.

    Args:
        model: Dense.
        layers: The new layers, by the names of the old ones.
    """
    twin = twin_of(model)
    swaps = {twin.get_submodule(name): new for name, new in layers.items()}
    replace_everywhere(twin, swaps | follow_owners(twin, swaps))
    return twin


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Put back buffers, modes, gradients and torch's random state when the block is left.

    Gradients are taken off meanwhile, so that each step of the block starts as the first one does.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})

    @torch.no_grad()
    def put_back() -> None:
        for buffer, before in buffers:
            buffer.copy_(before)
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient

    with put_back_after(put_back), torch.random.fork_rng(devices=devices):
        for parameter, _ in gradients:
            parameter.grad = None
        yield
