"""The bytes of an optimizer's step, predicted before it runs: its state, and its temporaries.

A twin of the optimizer steps on ``meta`` tensors, which have sizes and no memory. For-each Adam makes temporaries as
large as all weights, the same Adam parameter by parameter as large as the largest, a fused one none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import FakeTensorMode
from ctdr_lightning.memory.holders.disk import STAGING_BYTES
from ctdr_lightning.memory.holders.eight_bits import EightBits
from ctdr_lightning.memory.holders.optimizer_state import (
    StateAway,
    check_movable,
    chunks_of,
    state_away_of,
    updates_one_by_one,
)
from ctdr_lightning.memory.holders.optimizer_state_tensors import state_tensors
from ctdr_lightning.memory.holders.optimizer_twin import ReadsAsOne, twin_without_memory
from ctdr_lightning.memory.traces.optimizer import NO_OPTIMIZER, OptimizerBytes
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.memory.values.tensors import own_part

Waits = Callable[[Optimizer], AbstractContextManager[Any]]

# Settings of torch's optimizers, from the fastest to the leanest.
SETTINGS: tuple[dict[str, bool], ...] = ({"foreach": False, "fused": False}, {"foreach": False, "fused": True})


# Read off LBFGS's source in torch 2.13 and measured: copies of all weights that exist at a closure next to the state,
# more of them in a line search, and more that are made between two closures.
_LBFGS_STANDING, _LINE_SEARCH_STANDING, _LBFGS_MORE = 3, 6, 3
_SCALAR_BYTES = 8
# Steps that a counter may say: far more than any run has, and exact in the floating point of bias corrections.
_MOST_STEPS = 2**40


# The optimizers that have a name, with settings that do not change their bytes.
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def predict(
    optimizers: list[Optimizer], n_steps: float = math.inf, *, inside: bool = False, **settings: bool
) -> OptimizerBytes | None:
    """Bytes of the state and of a step.

    Args:
        optimizers: They are not changed; of several only one steps at a time.
        n_steps: How often they step; a short run does not fill LBFGS's history.
        inside: Whether each parameter is updated as its gradient is ready.
        settings: ``foreach`` or ``fused``, where they are to be other than they are.

    Returns:
        The bytes; None where an optimizer cannot step on sizes alone (it asks for a closure).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1000, 1000))
        >>> predict([torch.optim.Adam([weight], foreach=True)])
        OptimizerBytes(state=8000004, temporary=4000000, standing=0)
    """
    try:
        with torch.random.fork_rng(devices=[]):  # a step may draw numbers
            each = [_take(optimizer, n_steps, settings, inside=inside) for optimizer in optimizers]
    except Exception:  # whatever an optimizer of somebody's raises on tensors without contents: it is measured instead
        return None
    return OptimizerBytes(
        sum(found.state for found in each),
        max((found.temporary for found in each), default=0),
        max((found.standing for found in each), default=0),
    )


def leaner(optimizers: list[Optimizer]) -> Iterator[tuple[str, bool, OptimizerBytes]]:
    """The settings that take less than the present ones, with their bytes; the most usual first."""
    present = predict(optimizers)
    for setting in SETTINGS:
        known = all(name in optimizer.defaults for optimizer in optimizers for name in setting)
        found = predict(optimizers, **setting) if known and optimizers else None
        if found is not None and (present is None or found.total < present.total):
            yield *(("fused", True) if setting["fused"] else ("foreach", False)), found


def elsewhere(optimizers: list[Optimizer]) -> tuple[str, OptimizerBytes] | None:
    """The place for the optimizers' state, and their bytes with it; None where it cannot wait elsewhere."""
    on_gpu = any(p.is_cuda for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    if not optimizers or any(state_away_of(optimizer) is not None for optimizer in optimizers):
        return None
    try:
        for optimizer in optimizers:
            check_movable(optimizer)
        each = [_measure_away(optimizer, {}, 0 if on_gpu else 2 * STAGING_BYTES) for optimizer in optimizers]
    except Exception:  # as in predict
        return None
    return "host" if on_gpu else "disk", OptimizerBytes(each[0][0], max(temporary for _, temporary in each))


def predict_for(
    optimizer: Optimizer | None,
    trained: Sequence[Tensor],
    *,
    inside: bool = False,
    waits: Waits = nullcontext,
) -> OptimizerBytes:
    """Bytes of an optimizer with other parameters, all with the settings of its first group.

    Args:
        optimizer: It is not changed; None counts as Adam.
        trained: Perhaps on ``meta``.
        inside: Whether parameters are updated as their gradients are ready.
        waits: Has an optimizer's state counted where it waits, as `waiting` does.
    """
    if not trained:
        return NO_OPTIMIZER
    optimizer = optimizer or torch.optim.Adam(trained)
    group = optimizer.param_groups[0]
    group = {**group, **on_device_of(group)}
    kind: Any = type(optimizer)
    twin = kind.__new__(kind)  # torch's own copy of an optimizer leaves out the attributes of a subclass
    vars(twin).update({**vars(optimizer), "param_groups": [{**group, "params": trained}], "state": defaultdict(dict)})
    with waits(twin):
        found = predict([twin], inside=inside)
    return OptimizerBytes(2 * sum(p.nbytes for p in trained)) if found is None else found


@contextmanager
def waiting(optimizer: Optimizer, *, in_8_bits: bool, device_bytes: int) -> Iterator[None]:
    """Count an optimizer's state where it will wait between steps; one whose state cannot wait is left alone.

    Args:
        optimizer: Without state.
        in_8_bits: Whether it waits on the device, in 8 bits; elsewhere otherwise.
        device_bytes: Bytes of the device's memory that moving takes all along.
    """
    if not updates_one_by_one(optimizer):
        yield
        return
    # an optimizer without state puts nothing into it
    holder: Any = EightBits() if in_8_bits else SimpleNamespace(device_bytes=device_bytes)
    away = StateAway(optimizer, holder)
    try:
        yield
    finally:
        away.release()


def optimizer_of(asked: str | Optimizer, trained: Iterable[Tensor]) -> Optimizer:
    """An optimizer, made where it is a name.

    Raises:
        ConfigError: When the name is not known.
    """
    if isinstance(asked, Optimizer):
        return asked
    if asked not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer={asked!r} is not known.", f"Valid names: {', '.join(OPTIMIZERS)}; or give the optimizer itself."
        )
    return OPTIMIZERS[asked](list(trained))


def _take(optimizer: Optimizer, n_steps: float, settings: dict[str, bool], *, inside: bool) -> OptimizerBytes:
    """Bytes of the state and of a step."""
    if type(optimizer) is torch.optim.LBFGS:
        return _take_lbfgs(optimizer, n_steps)
    away = state_away_of(optimizer)
    if away is not None:
        return OptimizerBytes(*_measure_away(optimizer, settings, away.waiting_bytes(_state_of(optimizer, away))))
    state, temporary = _measure(optimizer, settings)
    return OptimizerBytes(state, _measure_alone(optimizer, settings) if inside else temporary)


def _take_lbfgs(optimizer: Optimizer, n_steps: float) -> OptimizerBytes:
    """Bytes of LBFGS, in copies of all weights.

    Two for each remembered iteration, the last direction and the last gradient. At each closure a gradient, a new
    direction and its summands exist, with the line search six more.
    """
    group = optimizer.param_groups[0]
    weights = sum(own_part(p).nbytes for p in group["params"])
    remembered = min(group["history_size"], n_steps * group["max_iter"])
    standing = _LBFGS_STANDING + (_LINE_SEARCH_STANDING if group["line_search_fn"] else 0)
    scalars = 4 * _SCALAR_BYTES * group["history_size"]
    return OptimizerBytes(
        round((2 * remembered + 2) * weights) + scalars, (standing + _LBFGS_MORE) * weights, standing * weights
    )


def _measure_alone(optimizer: Optimizer, settings: dict[str, bool]) -> int:
    """The temporaries of a step that updates one parameter at a time; groups differ in theirs."""
    trained = ([p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups)
    largest = [max(params, key=lambda p: own_part(p).nbytes) for params in trained if params]
    return max((_measure(optimizer, settings, {param})[1] for param in largest), default=0)


def _measure_away(optimizer: Optimizer, settings: dict[str, bool], device_bytes: int) -> tuple[int, int]:
    """The same where the state waits elsewhere: two chunks of it are a part of the step."""
    away = state_away_of(optimizer)
    chunks = chunks_of(optimizer) if away is None else away.chunks()
    largest = max((params for _, params in chunks), key=_own_bytes, default=[])
    state, temporary = _measure(optimizer, settings, set(largest))
    return device_bytes, 2 * state + temporary


def _own_bytes(params: Iterable[Tensor]) -> int:
    return sum(own_part(param).nbytes for param in params)


def _measure(optimizer: Optimizer, settings: dict[str, bool], only: set[Tensor] | None = None) -> tuple[int, int]:
    if settings.get("fused", all(group.get("fused") for group in optimizer.param_groups)):
        # a fused kernel refuses meta tensors; its state is that of the others, and it allocates nothing
        return _measure(optimizer, {"foreach": False, "fused": False}, only)[0], 0
    try:
        return _measured(_twin(optimizer, settings, only))
    except Exception:  # whatever an optimizer of somebody's raises on meta: a generator, say, cannot be there
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _measured(_twin(optimizer, settings, only, device=None))


def _measured(twin: Optimizer) -> tuple[int, int]:
    temporaries = [_step(twin)]  # the first step makes the state
    before = {(id(owner), name): n for owner, name, n in _numbers(twin)}
    temporaries.append(_step(twin))
    counters = [(owner, name) for owner, name, n in _numbers(twin) if before.get((id(owner), name)) == n - 1]
    for n_steps in _busy_steps(twin, counters):
        for owner, name in counters:
            owner[name] = n_steps
        temporaries.append(_step(twin))
    return _state_bytes(twin), max(0, *temporaries)


def _step(twin: Optimizer) -> int:
    """Take a step. Returns the peak of its memory above its state."""
    for param in (p for group in twin.param_groups for p in group["params"]):
        param.grad = torch.empty_like(param)
    # a step that compiles itself would do so for sizes, which takes longer than a batch
    with torch.compiler.set_stance("force_eager"), PeakMeter() as meter, ReadsAsOne():
        meter.live.track(state_tensors([twin]))
        twin.step()
    return meter.live.peak - _state_bytes(twin)


def _numbers(twin: Optimizer) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Whole numbers that an optimizer keeps: with its parameters, in their groups, or itself."""
    for owner in filter(lambda found: isinstance(found, dict), (*twin.state.values(), *twin.param_groups, vars(twin))):
        yield from ((owner, name, n) for name, n in owner.items() if type(n) is int)


def _busy_steps(twin: Optimizer, counters: list[tuple[dict[str, Any], str]]) -> tuple[int, ...]:
    """Numbers of steps after which all that an optimizer does every so many steps is due, as GaLore's decomposition is.

    The multiple of all its whole settings, for optimizers that count before that question and after it.
    """
    counted = {(id(owner), name) for owner, name in counters}
    owners = (*twin.param_groups, vars(twin))
    whole = {n for o in owners for name, n in o.items() if type(n) is int and n > 1 and (id(o), name) not in counted}
    together = math.lcm(*whole)
    return (together - 1, together) if counters and 1 < together < _MOST_STEPS else ()


def _state_of(optimizer: Optimizer, away: StateAway) -> Iterator[Tensor]:
    """The optimizer's future state, on ``meta``, a chunk at a time."""
    for _, params in away.chunks():
        twin = _twin(optimizer, {"foreach": False, "fused": False}, set(params))
        for param in (p for group in twin.param_groups for p in group["params"]):
            param.grad = torch.empty_like(param)
        twin.step()
        yield from state_tensors([twin])


def _twin(
    optimizer: Optimizer, settings: dict[str, bool], only: set[Tensor] | None = None, device: str | None = "meta"
) -> Optimizer:
    """The optimizer's twin, with changed settings.

    Args:
        optimizer: It is not changed.
        settings: Changed settings.
        only: The parameters that it has; None for all of them.
        device: Of its tensors.
    """
    twin = twin_without_memory(optimizer, only, device)
    for group, own in zip(twin.param_groups, optimizer.param_groups, strict=True):
        group.update(_setting(own, settings))
    return twin


def _setting(group: dict[str, Any], settings: dict[str, bool]) -> dict[str, Any]:
    """The group's own setting, or the one that torch would choose on the parameters' device."""
    if settings:
        return {name: value for name, value in settings.items() if name in group}
    return on_device_of(group)


def on_device_of(group: dict[str, Any]) -> dict[str, Any]:
    """The setting of a group that torch would choose on its parameters' device: a copy's may be on ``meta``.

    Args:
        group: Of an optimizer.
    """
    if group.get("foreach", False) is None and not group.get("fused"):
        return {"foreach": all(p.is_cuda and not isinstance(p, DTensor) for p in group["params"])}
    return {}


def _state_bytes(optimizer: Optimizer) -> int:
    storages = (tensor.untyped_storage() for tensor in state_tensors([optimizer]))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
