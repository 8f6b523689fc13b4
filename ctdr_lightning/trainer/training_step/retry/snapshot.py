"""The state before a training step, to be restored after a failure: exactly, or not at all.

Version counters show which tensors a failed attempt wrote, not their old contents. Copying everything before each step
costs too much. So small tensors are copied, except those of optimizers and those of a module that holds many, and
tensors that earlier steps were seen to write, up to a limit. The copies are resident while the step runs, and count in
its plan.
When a step fails, every change must be among the copies; otherwise the path to it is the reason not to repeat.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.values.tensors import own_part, version_of
from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from ctdr_lightning.trainer.training_step.retry.reachable import Reachable, Trail, iterator_state, mark, reachable, way
from ctdr_lightning.trainer.training_step.retry.standing import Standing

# The root below which small tensors are not copied: forward and backward leave an optimizer's state alone, and Adam's
# is twice the net where all layers are small (with the copies the demo's step took 10 % more than its budget).
OPTIMIZERS = "optimizers"
# The root of the model.
MODULE = "module"
# The root that is another in each step.
BATCH = "batch"
# Copies of earlier steps' writes are resident in every step. A queue of 65,536 x 128 just fits, a teacher does not.
COPIED_AT_MOST_BYTES = 32 * 2**20
# Small tensors that are a module's plain attributes are copied unseen up to this sum: metrics are below, and a module
# that holds its data in batches (5 MiB of digits, a sixth of its step) is above. Not tuned.
ATTRIBUTES_AT_MOST_BYTES = 2**20


# ``(index, tensor, whether it is small, whether it is a parameter)``.
_Candidate = tuple[int, Tensor, bool, bool]


class GlobalRandom:
    """The states of torch's, Python's and NumPy's own generators, and of the CUDA devices in use.

    Args:
        devices: Indices of CUDA devices.
    """

    def __init__(self, devices: list[int]) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    @property
    def states(self) -> list[Tensor]:
        """The states in the memory that is planned: on a processor, torch's own."""
        return [] if self._cuda else [self._torch]

    @property
    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = GlobalRandom(list(self._cuda))
        same = now._python == self._python and all(map(np.array_equal, now._numpy, self._numpy))
        return not (same and all(map(torch.equal, now._all, self._all)))

    @property
    def _all(self) -> list[Tensor]:
        return [self._torch, *self._cuda.values()]

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
        parameters: The ways to all parameters, and the parameters.
    """

    def __init__(self, parameters: list[tuple[Trail, Tensor]]) -> None:
        self._before = [(trail, leaf, leaf.grad, leaf.requires_grad) for trail, leaf in parameters]
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


def _is_emptied(tensor: Tensor) -> bool:
    """Whether a tensor's memory was taken from it, as FSDP takes that of gathered weights: to read it is a crash."""
    return type(tensor) is Tensor and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


class Snapshot:
    """The present state of everything that a step can reach.

    Args:
        roots: Where to start, by name: the module, the batch, the optimizers (under ``OPTIMIZERS``).
        written: Marks of the paths to large tensors that earlier steps wrote; `learn` adds to it.
        standing: The part that persists between steps, for the snapshots of a run; None looks through everything.
        most_bytes: Of small tensors among a module's attributes, to be copied unseen.
        large: Whether frozen parameters and buffers are copied unseen, too.

    Attributes:
        reach: The reachable objects.
        copied: Tensors of which there are copies.
        copied_bytes: Size of the copies and of generators' states.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        written: set[Hashable],
        standing: Standing | None = None,
        most_bytes: float = ATTRIBUTES_AT_MOST_BYTES,
        *,
        large: bool = False,
    ) -> None:
        self._written, self._most_bytes, self._large = written, most_bytes, large
        standing = standing or Standing()
        known = standing.reach({name: root for name, root in roots.items() if name != BATCH})
        passing = reachable({BATCH: roots[BATCH]}) if BATCH in roots else Reachable()
        self.reach: Reachable = joined(known, passing)
        tensors = self.reach.tensors
        self._versions = versions_of([tensor for _, tensor in tensors])
        n_known, n_written = len(known.tensors), len(written)
        candidates = [
            *standing.once(("candidates", n_written), lambda: self._candidates(tensors[:n_known], 0)),
            *self._candidates(tensors[n_known:], n_known),
        ]
        chosen = self._chosen(candidates)
        copies = standing.copies.of([tensor for index, tensor in chosen.items() if index < n_known])
        copies = copies + [tensor.detach().clone() for index, tensor in chosen.items() if index >= n_known]
        self._copies = dict(zip(chosen, copies, strict=True))
        self.copied = [tensors[index][1] for index in self._copies]
        self._arrays = {i: a.copy() for i, (_, a) in enumerate(self.reach.arrays) if a.size <= SMALL_ELEMENTS}
        self._generators = [(g, _generator_state(g)) for g in self.reach.generators]
        self._iterators = [iterator_state(thing) for _, thing in self.reach.iterators]
        devices = standing.once("devices", lambda: _cuda_devices(known.tensors)) | _cuda_devices(passing.tensors)
        self._random = GlobalRandom(sorted(devices))
        self.copied_bytes = sum(own_part(copy).nbytes for copy in (*self.copies, *self.states))
        self._parameters = standing.once("parameters", lambda: _parameters(known.tensors)) + _parameters(
            passing.tensors
        )
        self.note_gradients()

    def _candidates(self, tensors: list[tuple[Trail, Tensor]], start: int) -> list[_Candidate]:
        """Those that are copied if they do not train."""
        found, known = [], self._written
        attributes = {id(tensor) for tensor in few_attributes(tensors, self._most_bytes)}
        for index, (trail, tensor) in enumerate(tensors, start):
            copied = id(tensor) in attributes if _is_attribute(trail) else _root(trail) != OPTIMIZERS
            small = copied and (tensor.numel() <= SMALL_ELEMENTS or (self._large and _root(trail) == MODULE))
            if (small or (known and mark(trail) in known)) and tensor.layout == torch.strided:
                found.append((index, tensor, small, isinstance(tensor, nn.Parameter)))
        return found

    def _chosen(self, candidates: list[_Candidate]) -> dict[int, Tensor]:
        chosen, left_bytes = {}, COPIED_AT_MOST_BYTES
        for index, tensor, small, is_parameter in candidates:
            if (
                (is_parameter and tensor.requires_grad)
                or self._versions[index] < 0
                or (not small and tensor.nbytes > left_bytes)
                or _is_emptied(tensor)
            ):
                continue
            left_bytes -= 0 if small else tensor.nbytes
            chosen[index] = tensor
        return chosen

    @property
    def copies(self) -> list[Tensor]:
        """The copies themselves."""
        return list(self._copies.values())

    @property
    def states(self) -> list[Tensor]:
        """The states of torch's generators in the memory that is planned: none on a GPU, as all are the host's."""
        own = self._random.states
        return [*(state for _, state in self._generators if isinstance(state, Tensor)), *own] if own else []

    def learn(self) -> int:
        """After a successful attempt: remember its writes to tensors that were not copied, for later steps.

        Returns:
            Bytes of the copies for the next step.
        """
        left_bytes, next_bytes = COPIED_AT_MOST_BYTES, self.copied_bytes
        for index in self._changed():
            trail, tensor = self.reach.tensors[index]
            self._written.add(mark(trail))
            trains = tensor.requires_grad and isinstance(tensor, nn.Parameter)
            if not trains and tensor.layout == torch.strided and tensor.nbytes <= left_bytes:
                left_bytes -= tensor.nbytes
                next_bytes += tensor.nbytes
        return next_bytes

    def _changed(self) -> Iterator[int]:
        now = versions_of([tensor for _, tensor in self.reach.tensors])
        for index, (version, before) in enumerate(zip(now, self._versions, strict=True)):
            if version != before and index not in self._copies:
                yield index

    def cannot_be_put_back(self) -> str:
        """The first thing that a failed try changed and that cannot be put back; empty if there is none."""
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

    def note_gradients(self) -> None:
        """Note the present gradients as those to restore."""
        self.gradients = Gradients(self._parameters)

    def forget_gradients(self) -> None:
        """The forward is done; the gradients of the step before may be freed now."""
        self.gradients = Gradients([])

    def put_back(self) -> None:
        """Undo the changes of the failed attempt."""
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
    def has_drawn(self) -> bool:
        """Whether torch's, Python's or NumPy's own generators have moved since."""
        return self._random.moved

    @property
    def drawn_from(self) -> list[Any]:
        """The generators that are put back."""
        return self.reach.generators


def few_attributes(tensors: list[tuple[Trail, Tensor]], most_bytes: float = ATTRIBUTES_AT_MOST_BYTES) -> list[Tensor]:
    """Small tensors that are a module's attributes, its parameters and buffers apart; none where they are many.

    Args:
        tensors: With the ways to them.
        most_bytes: Of all together.
    """
    small = [tensor for trail, tensor in tensors if _is_attribute(trail) and tensor.numel() <= SMALL_ELEMENTS]
    return small if sum(tensor.nbytes for tensor in small) <= most_bytes else []


def _is_attribute(trail: Trail) -> bool:
    return _root(trail) == MODULE and trail[0] is not None and trail[0][1] not in ("_parameters", "_buffers")


def _parameters(tensors: list[tuple[Trail, Tensor]]) -> list[tuple[Trail, Tensor]]:
    return [(trail, tensor) for trail, tensor in tensors if isinstance(tensor, nn.Parameter)]


def _cuda_devices(tensors: list[tuple[Trail, Tensor]]) -> set[int]:
    return {tensor.device.index or 0 for _, tensor in tensors if tensor.is_cuda}


def joined(first: Reachable, second: Reachable) -> Reachable:
    """The results of two walks together."""
    lists = {f.name: getattr(first, f.name) + getattr(second, f.name) for f in fields(Reachable)}
    return Reachable(**lists)


def versions_of(tensors: list[Tensor]) -> list[int]:
    """The tensors' in-place versions; -1 where none is tracked."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(tensor) for tensor in tensors]


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
