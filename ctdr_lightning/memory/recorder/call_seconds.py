"""Seconds of the calls that a fake recording sees: known from one real step, or measured once on dummy tensors.

A roofline is up to a quarter wrong for a whole step, and a recording of the real step needs the step's memory. Most
calls of a changed model are calls of the model before: they get the recorded times. Only new ones are run, each
distinct one once, on tensors of the same shapes and strides; where made-up contents could harm, a roofline has to do.
Complexity: one benchmark a distinct new call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.devices import model_of
from ctdr_lightning.basics.gpu_memory import synchronize
from ctdr_lightning.basics.thread_clock import now_s
from ctdr_lightning.basics.torch_private import OpOverload, no_dispatch_modes, tree_flatten, tree_map_only
from ctdr_lightning.memory.traces.trace import Trace
from ctdr_lightning.memory.values.op_seconds import op_seconds
from ctdr_lightning.memory.values.op_traits import may_run_on_dummies, traits
from ctdr_lightning.memory.values.tensors import tensors_in

# A benchmark lasts about this long: with it the steps of eleven candidates of two networks were predicted within 5 %.
_ENOUGH_S = 0.006
# The least of three: another process may have disturbed the others. A call that is as long as all three by itself is
# run but once more: ResNet-50's candidates have 300 calls of 30 ms.
_ROUNDS = 3
# So many calls of each op, the longest, are also run alone: in a step caches are cold. Ratios found: 0.8 to 1.3.
_COMPARED = 4
_Call = tuple[Hashable, OpOverload, tuple[Any, ...], dict[str, Any]]
_MOST_RATIO = 2.0  # beyond it the clock has been disturbed


class CallSeconds:
    """Tells a recording of fake tensors how long each call takes on this device.

    Hand it to ``record_fake`` as its ``device``. Fake calls that :meth:`learn` has seen in a real step cost nothing.

    Attributes:
        n_measured: Number of distinct calls that were run.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, float] = {}
        self._measured: dict[Hashable, float] = {}
        self._ratios: dict[str, float] = {}
        self._longest: dict[str, list[_Call]] = {}
        self._view_s = self._python_s = 0.0
        self._calls: list[_Call] | None = None

    @property
    def n_measured(self) -> int:
        """Number of distinct calls that were run."""
        return len(self._measured)

    def seconds(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """Time that one call on fake tensors would take on real ones."""
        key = _key(func, args, kwargs)
        if self._calls is not None:
            self._calls.append((key, func, args, kwargs))
            return 0.0
        return self._alone(key, func, args, kwargs, out) + self._python_s

    def _alone(self, key: Hashable, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        if key in self._known:
            return self._known[key]
        if traits(func).view:
            return self._view_s
        if key not in self._measured and _may_be_timed(func, args, kwargs):
            # noise is no probability and no factorized matrix: such calls refuse it
            with suppress(RuntimeError):
                self._measured[key] = benchmark(func, args, kwargs)
        if key not in self._measured:
            return op_seconds(model_of(_device(args, kwargs)), func, args, kwargs, out)
        return self._measured[key] * self._ratio(func.name())

    def learn(self, again: Callable[[], Trace], real: Trace, step_s: float = 0.0) -> bool:
        """Take the calls' times from a real step.

        Args:
            again: Records the same step on fake tensors with this object as its device.
            real: The real step's trace.
            step_s: Seconds of the whole step; time outside of its ops is Python's, and is spread over them.

        Returns:
            Whether the fake step's ops are the real step's, and make as many bytes: the fake kernel of an LSTM makes no
            workspace. Otherwise nothing is learnt, and every call is measured.
        """
        calls: list[_Call] = []
        self._calls = calls
        try:
            fake = again()
        finally:
            self._calls = None
        if _ops_of(fake) != _ops_of(real) or len(calls) != len(real.ops):
            return False
        taken: dict[Hashable, list[float]] = defaultdict(list)
        for (key, *_), op in zip(calls, real.ops, strict=True):
            taken[key].append(op.seconds)
        self._known = {key: median(seconds) for key, seconds in taken.items()}
        views = [op.seconds for (_, func, *_), op in zip(calls, real.ops, strict=True) if traits(func).view]
        self._view_s = median(views) if views else 0.0
        self._longest, self._ratios = self._longest_of(calls), {}
        self._python_s = max(step_s - sum(self._known[call[0]] for call in calls), 0.0) / max(len(calls), 1)
        return True

    def _ratio(self, name: str) -> float:
        """Time of an op in a step, with cold caches, over its time in a loop."""
        if name not in self._ratios:
            longest, alone = self._longest.get(name, []), 0.0
            with suppress(RuntimeError):  # as of the new call
                alone = sum(benchmark(func, args, kwargs) for _, func, args, kwargs in longest)
            ratio = sum(self._known[key] for key, *_ in longest) / alone if alone else 1.0
            self._ratios[name] = min(max(ratio, 1 / _MOST_RATIO), _MOST_RATIO)
        return self._ratios[name]

    def _longest_of(self, calls: Sequence[_Call]) -> dict[str, list[_Call]]:
        """By op, the longest of a step's distinct calls that may be run alone."""
        found: dict[str, list[_Call]] = defaultdict(list)
        for call in {call[0]: call for call in calls}.values():
            _, func, args, kwargs = call
            if not traits(func).view and _may_be_timed(func, args, kwargs):
                found[func.name()].append(call)
        return {name: sorted(some, key=lambda call: -self._known[call[0]])[:_COMPARED] for name, some in found.items()}


def _may_be_timed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return may_run_on_dummies(func, list(tensors_in((*args, *kwargs.values()))))


def _ops_of(trace: Trace) -> list[tuple[str, list[int]]]:
    """Each op with the bytes that it makes."""
    return [(op.name, [trace.value_bytes(v) if v >= 0 else 0 for v in op.outputs]) for op in trace.ops]


def benchmark(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Seconds of one call on real tensors that look like its arguments."""
    with torch.no_grad(), no_dispatch_modes():
        generator = torch.Generator().manual_seed(0)
        args, kwargs = tree_map_only(Tensor, lambda tensor: _like(tensor, generator), (args, kwargs))
        first = _timed(func, args, kwargs, 1)  # the first run also warms up
        repeats = max(1, int(_ENOUGH_S / _ROUNDS / max(first, 1e-7)))
        n_rounds = _ROUNDS if first < _ENOUGH_S else 1
        return min(first, *(_timed(func, args, kwargs, repeats) for _ in range(n_rounds)))


def _timed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int) -> float:
    device = _device(args, kwargs)
    synchronize(device)
    start_s = now_s(device.type)
    for _ in range(repeats):
        func(*args, **kwargs)
    synchronize(device)
    return (now_s(device.type) - start_s) / repeats


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    found = (t.device for t in tensors_in((*args, *kwargs.values())) if t.device.type != "cpu")
    return next(found, torch.device("cpu"))


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A real tensor of a fake one's looks: noise, or zeros where it is an index or a mask."""
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    flat = torch.zeros(reach, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_floating_point():
        flat = flat.normal_(generator=generator) if flat.is_cpu else flat.fill_(0.5)
    return flat.as_strided(shape, stride)


def _key(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    leaves, spec = tree_flatten((args, kwargs))
    return func.name(), str(spec), tuple(_looks(leaf) for leaf in leaves)


def _looks(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(map(int, leaf.shape)), tuple(map(int, leaf.stride())), leaf.dtype
    return str(leaf)
