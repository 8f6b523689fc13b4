"""The bytes that an optimizer's step takes, told before it runs: its state, and what it allocates meanwhile.

A twin of the optimizer steps on ``meta`` tensors, which have sizes and no memory. For-each Adam makes temporaries as
large as all weights, the same Adam parameter by parameter as large as the largest, a fused one none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ctdr_lightning.memory.holders.disk import STAGING_BYTES
from ctdr_lightning.memory.holders.optimizer_state import check_movable, chunks_of, state_away_of
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.trainer.training_step.step_in_backward import steps_in_backward

# What torch's optimizers know, from the fastest where memory does not count to the leanest.
SETTINGS: tuple[dict[str, bool], ...] = ({"foreach": False, "fused": False}, {"foreach": False, "fused": True})


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """What optimizers take.

    Attributes:
        state: Bytes of the state that they keep, once they have stepped.
        temporary: Bytes that a step has allocated at once besides.
    """

    state: int
    temporary: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.temporary


def predict(optimizers: list[torch.optim.Optimizer], **settings: bool) -> OptimizerBytes | None:
    """Bytes of the state and of a step.

    Args:
        optimizers: They are not changed; of several only one steps at a time.
        settings: ``foreach`` or ``fused``, where they are to be other than they are.

    Returns:
        The bytes; None where an optimizer cannot step on sizes alone (LBFGS asks for a closure), or keeps shards.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1000, 1000))
        >>> predict([torch.optim.Adam([weight], foreach=True)])
        OptimizerBytes(state=8000004, temporary=4000000)
    """
    try:
        each = [_take(optimizer, settings) for optimizer in optimizers]
    except Exception:  # whatever an optimizer of somebody's raises on tensors without contents: it is measured instead
        return None
    return OptimizerBytes(sum(state for state, _ in each), max((temporary for _, temporary in each), default=0))


def leaner(optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, OptimizerBytes]]:
    """The settings that take less than the present ones, in words, with their bytes; the most usual first."""
    present = predict(optimizers)
    for setting in SETTINGS:
        known = all(name in optimizer.defaults for optimizer in optimizers for name in setting)
        found = predict(optimizers, **setting) if known and optimizers else None
        if found is not None and (present is None or found.total < present.total):
            named = "fused=True" if setting["fused"] else "foreach=False"
            yield f"{type(optimizers[0]).__name__}(..., {named})", found


def elsewhere(optimizers: list[torch.optim.Optimizer]) -> tuple[str, OptimizerBytes] | None:
    """What the optimizers would take with their state elsewhere, in words and bytes; None where it cannot be."""
    on_gpu = any(p.is_cuda for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    if not optimizers or any(state_away_of(optimizer) is not None for optimizer in optimizers):
        return None
    try:
        for optimizer in optimizers:
            check_movable(optimizer)
        each = [_measure_away(optimizer, {}, 0 if on_gpu else 2 * STAGING_BYTES) for optimizer in optimizers]
    except Exception:  # as in predict
        return None
    words = f"CTDRCallback(..., optimizer_state={'host' if on_gpu else 'disk'!r})"
    return words, OptimizerBytes(each[0][0], max(temporary for _, temporary in each))


def predict_inside(optimizers: list[torch.optim.Optimizer]) -> OptimizerBytes | None:
    """What the optimizers would take if they updated each parameter as its gradient is ready; None as for `predict`."""
    try:
        each = [(_measure(optimizer, {})[0], _measure_alone(optimizer, {})) for optimizer in optimizers]
    except Exception:  # as in predict
        return None
    return OptimizerBytes(sum(state for state, _ in each), max((temporary for _, temporary in each), default=0))


def _take(optimizer: torch.optim.Optimizer, settings: dict[str, bool]) -> tuple[int, int]:
    """Bytes of the state and of a step."""
    away = state_away_of(optimizer)
    if away is not None:
        waiting = away.waiting_bytes(_state_of(optimizer) if away.stays_here else ())
        return _measure_away(optimizer, settings, waiting)
    state, temporary = _measure(optimizer, settings)
    return state, _measure_alone(optimizer, settings) if steps_in_backward(optimizer) else temporary


def _measure_alone(optimizer: torch.optim.Optimizer, settings: dict[str, bool]) -> int:
    """The temporaries of a step that updates one parameter at a time; groups differ in what they take."""
    trained = ([p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups)
    largest = [max(params, key=lambda p: p.nbytes) for params in trained if params]
    return max((_measure(optimizer, settings, {param})[1] for param in largest), default=0)


def _measure_away(optimizer: torch.optim.Optimizer, settings: dict[str, bool], device_bytes: int) -> tuple[int, int]:
    """The same where the state waits elsewhere: two chunks of it are a part of the step."""
    away = state_away_of(optimizer)
    chunks = chunks_of(optimizer) if away is None else away.chunks()
    largest = max((params for _, params in chunks), key=lambda params: sum(p.nbytes for p in params), default=[])
    state, temporary = _measure(optimizer, settings, set(largest))
    return device_bytes, 2 * state + temporary


def _measure(
    optimizer: torch.optim.Optimizer, settings: dict[str, bool], only: set[Tensor] | None = None
) -> tuple[int, int]:
    if settings.get("fused", all(group.get("fused") for group in optimizer.param_groups)):
        # a fused kernel refuses meta tensors; its state is that of the others, and it allocates nothing
        return _measure(optimizer, {"foreach": False, "fused": False}, only)[0], 0
    twin = _twin(optimizer, settings, only)
    params = [p for group in twin.param_groups for p in group["params"]]
    peaks: list[int] = []
    state = 0
    for _ in range(2):  # the first step makes the state
        for param in params:
            param.grad = torch.empty_like(param)
        with PeakMeter() as meter:
            twin.step()
        state = _state_bytes(twin)
        peaks.append(meter.live.peak - (state if not peaks else 0))
    return state, max(0, *peaks)


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer's state will be, on ``meta``."""
    twin = _twin(optimizer, {"foreach": False, "fused": False})
    for param in (p for group in twin.param_groups for p in group["params"]):
        param.grad = torch.empty_like(param)
    twin.step()
    return [v for state in twin.state.values() for v in state.values() if isinstance(v, Tensor)]


def _twin(optimizer: torch.optim.Optimizer, settings: dict[str, bool], only: set[Tensor] | None = None) -> Any:
    """An optimizer of the same class and settings on meta tensors, without state and without hooks.

    Args:
        optimizer: It is not changed.
        settings: What is to be other than it is.
        only: The parameters that it has; None for all of them.
    """
    kind: Any = type(optimizer)
    twin = kind.__new__(kind)
    # neither hooks nor the step that schedulers put over the class's own
    plain = {k: v for k, v in vars(optimizer).items() if not k.startswith("_optimizer_") and k != "step"}
    groups = [
        {**group, **_setting(group, settings), "params": _meta(group["params"], only)}
        for group in optimizer.param_groups
    ]
    twin.__setstate__({**plain, "state": defaultdict(dict), "param_groups": groups})
    return twin


def _setting(group: dict[str, Any], settings: dict[str, bool]) -> dict[str, Any]:
    """The group's own setting, or the one that torch would choose on the parameters' device."""
    if settings:
        return {name: value for name, value in settings.items() if name in group}
    if group.get("foreach", False) is None and not group.get("fused"):
        return {"foreach": all(p.is_cuda for p in group["params"])}
    return {}


def _meta(params: list[Tensor], only: set[Tensor] | None) -> list[nn.Parameter]:
    if any(isinstance(p, DTensor) for p in params):
        raise TypeError("a shard")
    trained = [p for p in params if p.requires_grad and (only is None or p in only)]
    return [nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in trained]


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum({id(v): v.untyped_storage().nbytes() for v in values}.values())
