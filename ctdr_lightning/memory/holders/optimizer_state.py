"""An optimizer's state waits elsewhere between its steps, and passes through memory a chunk at a time within them.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, arXiv 2101.06840; for the disk
Rajbhandari et al., "ZeRO-Infinity", SC 2021, arXiv 2104.07857.

Reproduced: the optimizer's state is in host memory or on a disk; the next chunk is read while one is updated, and the
    last one is written behind it.
Modelled: nothing; the step runs unchanged, with the same results to the bit.
Left out: gradients and weights stay on the device, and the update runs there rather than on the host, so that any
    optimizer of ``torch.optim`` may be used that updates its parameters one by one; the delayed update, which changes
    results; partitions of its own: where parameters are sharded, each process moves the state of its own shards.

Memory: the state of two chunks. Time: the state's bytes over the link twice a step, where the update does not hide it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import mark_stepped, replaces_scheduled_step
from ctdr_lightning.memory.holders.base import Holder, Parcel
from ctdr_lightning.memory.holders.eight_bits import EightBits, SmallParcel, eight_bit_bytes
from ctdr_lightning.memory.values.tensors import own_part

# Parameters of a chunk. Adam's state of 16 MiB of parameters is 32 MiB, and two chunks are there at once. On a disk
# 4 MiB took 12 % longer where tried, as transfers are short, and 64 MiB 20 %, as less of them is hidden.
CHUNK_BYTES = 16 * 2**20
# A smaller net's chunks are smaller, so that two of them and their state take a quarter of the weights' bytes.
CHUNK_SHARE = 1 / 16
# Counters and single numbers stay: moving them would cost more than they take.
LEAST_BYTES = 4096
NOT_BY_PARAMETER = ("LBFGS",)

_ATTACHED: WeakKeyDictionary[Optimizer, StateAway] = WeakKeyDictionary()


def state_away_of(optimizer: Optimizer) -> StateAway | None:
    """The `StateAway` of an optimizer, or None."""
    return _ATTACHED.get(optimizer)


def chunks_of(optimizer: Optimizer, chunk_bytes: int | None = None) -> Iterator[tuple[int, list[Tensor]]]:
    """Parameters that are updated together: ``(index of the group, parameters)``, neighbours of one group up to a size.

    Args:
        optimizer: It is not changed.
        chunk_bytes: Parameters of a chunk, in bytes; a larger one is a chunk of its own. None takes a sixteenth of all,
            and 16 MiB at most. Of sharded parameters one shard counts.
    """
    total = sum(_shard_bytes(p) for group in optimizer.param_groups for p in group["params"])
    most = min(CHUNK_BYTES, int(CHUNK_SHARE * total)) if chunk_bytes is None else chunk_bytes
    for index, group in enumerate(optimizer.param_groups):
        chunk: list[Tensor] = []
        filled_bytes = 0
        for param in group["params"]:
            n_bytes = _shard_bytes(param)
            if chunk and filled_bytes + n_bytes > most:
                yield index, chunk
                chunk, filled_bytes = [], 0
            chunk.append(param)
            filled_bytes += n_bytes
        if chunk:
            yield index, chunk


def _shard_bytes(param: Tensor) -> int:
    """Bytes of one shard, the same number on every process: some updates are collective, so chunks must agree."""
    if not isinstance(param, DTensor):
        return param.nbytes
    whole = (placement.is_replicate() or placement.is_partial() for placement in param.placements)
    n_shards = prod(param.device_mesh.size(dim) for dim, is_whole in enumerate(whole) if not is_whole)
    return -(-param.nbytes // n_shards)


def _form_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Gives flat contents the strides of a tensor, and makes them a shard if the tensor is one."""
    own = own_part(tensor)
    shape, stride = own.shape, own.stride()
    if not isinstance(tensor, DTensor):
        return lambda flat: flat.as_strided(shape, stride)
    shard = partial(
        DTensor.from_local, device_mesh=tensor.device_mesh, placements=tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return lambda flat: shard(flat.as_strided(shape, stride))


class _Moved:
    """The large tensors of some parameters' state, elsewhere: one parcel, however many they are."""

    def __init__(self, holder: Holder, states: dict[Tensor, dict[str, Tensor]]) -> None:
        self.params = tuple(states)
        self._kinds = [(p, name, _form_of(t)) for p, state in states.items() for name, t in state.items()]
        tensors = [own_part(t) for state in states.values() for t in state.values()]
        self.n_bytes = sum(t.nbytes for t in tensors)
        self.parcel: Parcel = holder.put([t.as_strided((t.numel(),), (1,)) for t in tensors])

    def fetch(self) -> dict[Tensor, dict[str, Tensor]]:
        found: dict[Tensor, dict[str, Tensor]] = {param: {} for param in self.params}
        for (param, name, form), flat in zip(self._kinds, self.parcel.fetch(), strict=True):
            found[param][name] = form(flat)
        return found


class StateAway:
    """Keeps an optimizer's state in a holder between steps.

    ``optimizer.step``, ``state_dict`` and ``load_state_dict`` work as before: a state dict holds tensors in host
    memory, and hooks on the step run once.

    Args:
        optimizer: One of ``torch.optim`` that updates its parameters one by one.
        holder: Where the state waits.
        chunk_bytes: Parameters that are updated at once, in bytes; see :func:`chunks_of`.

    Raises:
        ConfigError: If the optimizer is not of ``torch.optim``, or needs all parameters at once.

    Example:
        >>> from ctdr_lightning.memory.holders import HolderOptions, Holders
        >>> weight, holders = torch.nn.Parameter(torch.ones(64, 64)), Holders(HolderOptions())
        >>> optimizer = torch.optim.Adam([weight])
        >>> away = StateAway(optimizer, holders["disk"])
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> away.moved_bytes, sorted(optimizer.state_dict()["state"][0])
        (32768, ['exp_avg', 'exp_avg_sq', 'step'])
        >>> away.release()
        >>> holders.close()
    """

    def __init__(self, optimizer: Optimizer, holder: Holder, chunk_bytes: int | None = None) -> None:
        check_movable(optimizer)
        self._optimizer = optimizer
        self._holder = holder
        self._chunk_bytes = chunk_bytes
        self._moved: dict[Tensor, _Moved] = {}
        self._own_step = vars(optimizer).get("step")
        # The class's own function without hooks and without its switch of the grad mode: hooks are to run once a step.
        self._update_all: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
        step = Optimizer.profile_hook_step(lambda optimizer, closure=None: self._step(optimizer, closure))
        replaces_scheduled_step(step)
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_post_hook(lambda _: self._reload()),
        ]
        self._put_all()
        _ATTACHED[optimizer] = self

    @property
    def _parcels(self) -> list[_Moved]:
        return list(dict.fromkeys(self._moved.values()))

    @property
    def moved_bytes(self) -> int:
        """Bytes of the state that wait elsewhere."""
        return sum(moved.n_bytes for moved in self._parcels)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory that moving takes all along."""
        return self._holder.device_bytes

    def waiting_bytes(self, state: Iterable[Tensor]) -> int:
        """Bytes of a state that the device keeps between steps, the permanent buffers of moving included.

        Args:
            state: Tensors of its sizes; their contents do not matter.
        """
        waits = eight_bit_bytes if self.stays_here else lambda _: 0
        return self.device_bytes + sum(waits(tensor) if _can_move(tensor) else tensor.nbytes for tensor in state)

    @property
    def stays_here(self) -> bool:
        """Whether the state waits on the device, in fewer bytes."""
        return isinstance(self._holder, EightBits)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the state that the device holds between steps."""
        parcels = [moved.parcel for moved in self._parcels]
        return [tensor for parcel in parcels if isinstance(parcel, SmallParcel) for tensor in parcel.tensors]

    def chunks(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Parameters that are updated together, as of :func:`chunks_of`."""
        return chunks_of(self._optimizer, self._chunk_bytes)

    def release(self, device: torch.device | None = None) -> None:
        """Bring the state back and leave the optimizer as it was.

        Args:
            device: Where the state is to be; None is where it came from.
        """
        for param in list(self._moved):
            self._bring(param, device)
        for hook in self._hooks:
            hook.remove()
        if self._own_step is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._own_step  # type: ignore[method-assign]
        _ATTACHED.pop(self._optimizer, None)

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, a chunk at a time."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        mark_stepped(optimizer)  # as a scheduler's own wrapper does, which this one replaces
        with torch.no_grad():
            self._update([(i, params) for i, params in self.chunks() if any(p.grad is not None for p in params)])
        return loss

    def _update(self, chunks: Sequence[tuple[int, list[Tensor]]]) -> None:
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        leaving: list[_Moved] = []
        try:
            for place, (index, params) in enumerate(chunks):
                for param in params:
                    self._bring(param)
                for moved in leaving:  # two chunks are there at once: this one, and the next on its way
                    moved.parcel.gone()
                if place + 1 < len(chunks):
                    self._start(chunks[place + 1][1])
                for group in groups:
                    group["params"] = []
                groups[index]["params"] = params
                self._update_all(self._optimizer)
                leaving = self._put(params)
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for moved in leaving:
                moved.parcel.gone()

    def _start(self, params: Sequence[Tensor]) -> None:
        for moved in dict.fromkeys(self._moved[p] for p in params if p in self._moved):
            moved.parcel.start()

    def _put(self, params: Iterable[Tensor]) -> list[_Moved]:
        """Start to move parameters' state out; its tensors are no longer in ``optimizer.state``."""
        states: dict[Tensor, dict[str, Tensor]] = {}
        for param in params:
            state = self._optimizer.state.get(param) or {}
            large = {n: t for n, t in state.items() if isinstance(t, Tensor) and _can_move(t)}
            if large:
                states[param] = large
        if not states:
            return []
        moved = _Moved(self._holder, states)
        for param, large in states.items():
            self._moved[param] = moved
            for name in large:
                del self._optimizer.state[param][name]
        return [moved]

    def _put_all(self) -> None:
        for _, params in self.chunks():
            for moved in self._put(params):
                moved.parcel.gone()

    def _bring(self, param: Tensor, device: torch.device | None = None) -> None:
        """Bring a parameter's state back, and the state of its whole parcel."""
        moved = self._moved.get(param)
        for each, state in moved.fetch().items() if moved is not None else ():
            del self._moved[each]
            there = state if device is None else {name: t.to(device) for name, t in state.items()}
            self._optimizer.state[each].update(there)

    def _reload(self) -> None:
        """Replace the state that waits elsewhere by the loaded one."""
        self._moved.clear()
        self._put_all()

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies in host memory, one parcel's at a time."""
        order = [param for group in optimizer.param_groups for param in group["params"]]
        index_of = {param: index for index, param in enumerate(order)}
        state = dict(state_dict["state"])
        for moved in self._parcels:
            for param, large in moved.fetch().items():
                index = index_of[param]
                state[index] = {**state.get(index, {}), **{name: tensor.cpu() for name, tensor in large.items()}}
        return {**state_dict, "state": state}


def _can_move(tensor: Tensor) -> bool:
    tensor = own_part(tensor)
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return plain and tensor.untyped_storage().nbytes() == tensor.nbytes >= LEAST_BYTES


def updates_one_by_one(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to update each parameter by its own gradient and state alone."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ not in NOT_BY_PARAMETER


def name_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class, with its module where that is not torch's: GaLore's is an ``AdamW`` too.

    Args:
        optimizer: Any.
    """
    kind = type(optimizer)
    return kind.__name__ if kind.__module__.startswith("torch.") else f"{kind.__module__}.{kind.__name__}"


def check_movable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state cannot wait elsewhere.

    Raises:
        ConfigError: If it is not of ``torch.optim``, or needs all parameters at once.
    """
    if not updates_one_by_one(optimizer):
        raise ConfigError(
            f"The state of {name_of(optimizer)} cannot wait elsewhere: this optimizer is not known to update its "
            "parameters one by one.",
            "Use an optimizer of torch.optim other than LBFGS, or leave optimizer_state out.",
        )
