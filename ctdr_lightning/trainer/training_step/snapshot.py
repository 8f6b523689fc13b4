"""What a training step found before it ran, to be put back when it has failed: exactly, or not at all.

Versions of tensors tell what a failed try has written, but not what stood there before, and a copy of everything before
each step is too dear. So what is small is copied, except what optimizers keep, and what earlier steps were seen to
write, as far as a limit allows. The copies stand in memory while the step runs, and count in its plan.
When a step fails, whatever changed must be among the copies; otherwise the way to it is the reason not to repeat.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.values.tensors import version_of
from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from ctdr_lightning.trainer.training_step.reachable import Reachable, Trail, iterator_state, mark, reachable, way

# The root below which small tensors are not copied: forward and backward leave an optimizer's state alone, and Adam's
# is twice the net where all layers are small (with the copies the demo's step took 10 % more than its budget).
OPTIMIZERS = "optimizers"
# Copies of what earlier steps wrote stand beside every step. A queue of 65,536 x 128 just fits, a teacher does not.
COPIED_AT_MOST_BYTES = 32 * 2**20


class GlobalRandom:
    """The states of torch's, Python's and NumPy's own generators, and of the CUDA devices in use.

    Args:
        devices: Indices of CUDA devices.
    """

    def __init__(self, devices: list[int]) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def put_back(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


class Gradients:
    """The gradients that stood before a try.

    Args:
        tensors: The ways to all tensors, and the tensors.
    """

    def __init__(self, tensors: list[tuple[Trail, Tensor]]) -> None:
        leaves = [(trail, tensor) for trail, tensor in tensors if isinstance(tensor, nn.Parameter)]
        self._before = [(trail, leaf, leaf.grad, leaf.requires_grad) for trail, leaf in leaves]
        self._versions = [-1 if grad is None else version_of(grad) for _, _, grad, _ in self._before]

    def written(self) -> Iterator[str]:
        """The gradients that a backward has added to in place."""
        for (trail, _, grad, _), version in zip(self._before, self._versions, strict=True):
            if grad is not None and version_of(grad) != version:
                yield f"the gradient of {way(trail)}, to which the backward has added"

    def put_back(self) -> None:
        """Take away those that came, and bring back those that went."""
        for _, leaf, grad, requires_grad in self._before:
            leaf.grad = grad
            if leaf.is_leaf:
                leaf.requires_grad_(requires_grad)


class Snapshot:
    """Everything that a step can reach, as it stands now.

    Args:
        roots: Where to start, by name: the module, the batch, the optimizers (under ``OPTIMIZERS``).
        written: Marks of the ways to large tensors that earlier steps wrote; `learn` adds to it.

    Attributes:
        reach: What was found.
        copied: Tensors of which there are copies.
        copied_bytes: Size of the copies.
    """

    def __init__(self, roots: Mapping[str, Any], written: set[Hashable]) -> None:
        self._written = written
        self.reach: Reachable = reachable(roots)
        tensors = self.reach.tensors
        self._versions = [version_of(tensor) for _, tensor in tensors]
        self._copies = self._copy(tensors)
        self.copied = [tensors[index][1] for index in self._copies]
        self.copied_bytes = sum(copy.nbytes for copy in self._copies.values())
        self._arrays = {i: a.copy() for i, (_, a) in enumerate(self.reach.arrays) if a.size <= SMALL_ELEMENTS}
        self._generators = [(g, _generator_state(g)) for g in self.reach.generators]
        self._iterators = [iterator_state(thing) for _, thing in self.reach.iterators]
        self._random = GlobalRandom(sorted({t.device.index or 0 for _, t in tensors if t.is_cuda}))
        self.gradients = Gradients(tensors)

    def _copy(self, tensors: list[tuple[Trail, Tensor]]) -> dict[int, Tensor]:
        copies, left_bytes, known = {}, COPIED_AT_MOST_BYTES, self._written
        for index, (trail, tensor) in enumerate(tensors):
            trains = tensor.requires_grad and isinstance(tensor, nn.Parameter)
            if trains or tensor.layout != torch.strided or self._versions[index] < 0:
                continue
            small = tensor.numel() <= SMALL_ELEMENTS and _root(trail) != OPTIMIZERS
            if not small and (not known or mark(trail) not in known or tensor.nbytes > left_bytes):
                continue
            left_bytes -= 0 if small else tensor.nbytes
            copies[index] = tensor.detach().clone()
        return copies

    @property
    def copies(self) -> list[Tensor]:
        """The copies themselves."""
        return list(self._copies.values())

    def learn(self) -> None:
        """After a try that went well: remember what it wrote and was not copied, for the steps to come."""
        for index in self._changed():
            self._written.add(mark(self.reach.tensors[index][0]))

    def _changed(self) -> Iterator[int]:
        for index, (_, tensor) in enumerate(self.reach.tensors):
            if index not in self._copies and version_of(tensor) != self._versions[index]:
                yield index

    def cannot_be_put_back(self) -> str:
        """The first thing that a failed try changed and that cannot be put back; empty where there is none."""
        return next(self._lost(), "")

    def _lost(self) -> Iterator[str]:
        for index in self._changed():
            trail, tensor = self.reach.tensors[index]
            yield f"{way(trail)} ({format_bytes(tensor.nbytes)}), which the step writes in place"
        yield from self.gradients.written()
        for index, (trail, array) in enumerate(self.reach.arrays):
            if index not in self._arrays and array.flags.writeable:
                yield f"{way(trail)}, a NumPy array of {format_bytes(array.nbytes)} whose changes cannot be told"
        for (trail, thing), state in zip(self.reach.iterators, self._iterators, strict=True):
            if not _identical(state, iterator_state(thing)):
                yield f"{way(trail)}, an iterator that cannot be taken back"
        for trail in self.reach.too_large:
            yield f"{way(trail)}, of so many entries that changes in it cannot be told"

    def forget_gradients(self) -> None:
        """The forward is done; the gradients of the step before may be freed now."""
        self.gradients = Gradients([])

    def put_back(self) -> None:
        """Undo what the failed try has changed."""
        for thing, before in self.reach.containers:
            _restore(thing, before)
        for thing, slots in self.reach.slots:
            for name, value in slots.items():
                object.__setattr__(thing, name, value)
        with torch.no_grad():
            for index, copied in self._copies.items():
                self.reach.tensors[index][1].copy_(copied)
        for index, array in self._arrays.items():
            if self.reach.arrays[index][1].flags.writeable:
                self.reach.arrays[index][1][...] = array
        for generator, state in self._generators:
            _set_generator(generator, state)
        self.gradients.put_back()
        self._random.put_back()

    @property
    def drawn_from(self) -> list[Any]:
        """The generators that are put back."""
        return self.reach.generators


def _root(trail: Trail) -> Any:
    while trail[0] is not None:
        trail = trail[0]
    return trail[1]


def _identical(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _restore(thing: Any, before: Any) -> None:
    """Give a container the contents that it had, where it has others."""
    if isinstance(thing, MutableMapping):
        if not (_identical(list(thing), list(before)) and _identical(list(thing.values()), list(before.values()))):
            thing.clear()
            thing.update(before)
    elif isinstance(thing, set):
        if thing != set(before):
            thing.clear()
            thing.update(before)
    elif not _identical(list(thing), before):
        if isinstance(thing, deque):
            thing.clear()
            thing.extend(before)
        else:
            thing[:] = before


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
