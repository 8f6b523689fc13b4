"""Kinds of steps: the signature under which steps are alike, and the record of each kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import tree_flatten
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.traces.trace import Trace

Planner = Callable[[Trace], Plan]


@dataclass
class Kind:
    """Record of the steps of one signature."""

    trace: Trace | None = None
    plan: Plan | None = None
    due: bool = False  # whether a plan is to be made of the trace
    divergences: int = 0
    structure: Hashable = None
    fingerprint: Hashable = None
    held: set[int] = field(default_factory=set)  # ticks of ops that came back otherwise while the step was recorded
    foreseen: bool = False  # its trace is not of a step of its own that ran
    forwards: tuple[bool, ...] = ()  # of modules in the recorded step: whether gradients were on


def signature_of(batch: Any, module: nn.Module | None = None) -> Hashable:
    """Signature of a step: the batch's structure, shapes and dtypes, modules in training mode, tensors with gradients.

    Args:
        batch: Any nest of tensors and plain objects.
        module: The module whose mode counts, or None.
    """
    leaves, spec = tree_flatten(batch)
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    modes: list[bool] = []
    if module is not None:
        modes = [*(m.training for m in module.modules()), *(p.requires_grad for p in module.parameters())]
    return (str(spec), shapes, hash(tuple(modes)), torch.is_grad_enabled())


def shapes_in(signature: Hashable) -> list[str]:
    """The tensors that a signature tells of, in words: ``["64x3x32x32 float32", "64 int64"]``."""
    if not isinstance(signature, tuple):
        return []
    if len(signature) == 2 and isinstance(signature[1], torch.dtype) and isinstance(signature[0], tuple):
        shape = "x".join(map(str, signature[0])) or "one"
        return [f"{shape} {str(signature[1]).removeprefix('torch.')}"]
    return [text for part in signature for text in shapes_in(part)]


def graph_of(loss: Tensor) -> Hashable:
    """Signature of an autograd graph: the numbers of functions by name, and their edges, in order."""
    todo, seen, names = [loss.grad_fn], set(), []
    while todo:
        function = todo.pop()
        if function is not None and function not in seen:
            seen.add(function)
            names.append(function.name())
            todo += [after for after, _ in function.next_functions]
    return len(names), hash(tuple(names))
