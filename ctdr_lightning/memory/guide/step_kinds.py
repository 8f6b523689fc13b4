"""Kinds of steps: the signature under which steps are alike, and the record of each kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.basics.nests import leaves_of, outline_of, tensors_of
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.traces.trace import RECOUNTED, Trace

Planner = Callable[[Trace], Plan | None]  # None for a step that is not to come again
# One kind of step for each sequence length: 64 lengths, or what is left of them after rounding, serve an epoch.
MOST_KINDS = 64
# An estimate, not measured: 2 kB an op in Python's memory for a trace with its plan. So many ops would be 256 MiB.
MOST_OPS = 128 * 1024


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
    refuted: bool = False  # whether a value of its plan came back otherwise

    def hold(self, error: ReplayError) -> None:
        """Hold the outputs of ops that may not run again.

        At first only those from which all others may follow: a GPU short of memory takes another kernel for one layer,
        and the outputs of all later layers come back otherwise. Held, these would not fit. It has its kernels by the
        next time; what comes back otherwise then is held as a whole.

        Args:
            error: That of a step that was being recorded.
        """
        self.held |= error.ticks if self.held or not error.first_ticks else error.first_ticks

    def recount(self, zeros: Mapping[int, float]) -> None:
        """Have a plan made for other shares of zeros, by value id; without any the plan stays."""
        if zeros and self.trace is not None:
            text = str(int(self.trace.meta.get(RECOUNTED, 0)) + 1)
            self.trace, self.due = self.trace.with_zeros(zeros).with_note(RECOUNTED, text), True

    def pins_of(self, error: ReplayError) -> Mapping[int, str]:
        """Values to pin, with the reasons: the first that came back otherwise, and from the second time on all.

        Args:
            error: That of a step under a plan.
        """
        again, self.refuted = self.refuted, True
        return error.pins if again or not error.first_pins else {v: error.pins[v] for v in error.first_pins}


class Kinds(OrderedDict[Hashable, Kind]):
    """The kinds of a run by their signatures, the latest last; beyond a limit the oldest are forgotten."""

    def latest(self, signature: Hashable) -> tuple[Kind, bool]:
        """The kind of a signature, made where it is new, and whether others were forgotten for it."""
        kind = self.setdefault(signature, Kind())
        self.move_to_end(signature)
        known = len(self)
        while len(self) > MOST_KINDS or (len(self) > 1 and self._n_ops() > MOST_OPS):
            self.popitem(last=False)
        return kind, len(self) < known

    def _n_ops(self) -> int:
        return sum(len(kind.trace.ops) for kind in self.values() if kind.trace is not None)


def signature_of(batch: Any, module: nn.Module | None = None) -> Hashable:
    """Signature of a step: the batch's structure, shapes and dtypes, modules in training mode, tensors with gradients.

    Args:
        batch: Any nest of tensors and plain objects.
        module: The module whose mode counts, or None.
    """
    shapes = tuple(_look(leaf) for leaf in leaves_of(batch))
    modes: list[bool] = []
    if module is not None:
        modes = [*(m.training for m in module.modules()), *(p.requires_grad for p in module.parameters())]
    return (outline_of(batch), shapes, hash(tuple(modes)), torch.is_grad_enabled())


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    inside = tuple(_look(tensor) for tensor in tensors_of(leaf))  # of an object, such as a batch of graphs
    return (type(leaf).__name__, inside) if inside else type(leaf).__name__


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
