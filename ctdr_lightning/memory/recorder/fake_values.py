"""Values of the small tensors of a step on fake tensors, so that the step may read them: draws, lengths, masks, counts.

The contents of a batch's small tensors are there, and what follows from them alone is computed beside the recording:
integers and flags of up to 2^18 elements, other tensors of up to 2^10. What follows from activations is assumed, as if
each of their numbers was 2, which is finite and no probability: ``loss.item()`` is 2.0, ``isfinite(loss)`` holds, the
predicted class is the first. Selections by values, such as ``x[mask]``, take all there is to select, as another batch
may. Complexity: a small operator for each one that makes such a tensor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ctdr_lightning.basics.torch_private import (
    NEEDS_VALUES,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    no_dispatch_modes,
    tree_leaves,
    tree_map_only,
)
from ctdr_lightning.memory.recorder.packed import PACK, PAD, makes_lengths, packed, takes_lengths
from ctdr_lightning.memory.values.op_traits import UNINITIALISED, traits

# A batch's padding mask is followed, images and activations are not. Not tuned.
_MOST_INTEGERS, _MOST_NUMBERS = 2**18, 2**10
_MOST_READ = 2**24  # elements that one assumed value may follow from: a tenth of a second
_VALUE, _ASSUMED = "ctdr_value", "ctdr_assumed"  # attributes of a fake tensor
_RANDOM, _POINTWISE = torch.Tag.nondeterministic_seeded, torch.Tag.pointwise


class ValuedFakes(FakeTensorMode):
    """Fake tensors of which the small ones have values.

    Args:
        reads_values: Whether the step may read values; it raises otherwise.

    Attributes:
        device: Device of tensors that are made like real ones.
        assumed: Names of the operators that asked for an assumed value.
    """

    device = torch.device("cpu")

    def __init__(self, *, reads_values: bool = False) -> None:
        # torch runs an operator without a fake kernel on zeros of the device, which may not be there
        super().__init__(allow_fallback_kernels=self.device.type == "cpu")
        self._reads_values, self._pads = reads_values, False
        self._random_state = torch.get_rng_state()
        self.assumed: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on fake tensors, and beside it on their values."""
        kwargs = kwargs or {}
        if not self._reads_values or not _is_torchs(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _SELECTED:
            return self._all_selected(func, args)
        if func is PACK:
            with self:
                return packed(*args)
        if self._pads and makes_lengths(func, args, kwargs):
            with no_dispatch_modes():
                return func(*args, **{**kwargs, "device": torch.device("cpu")})
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except NEEDS_VALUES as error:
            return self._by_values(func, args, kwargs, error)
        self._follow(func, args, kwargs, out)
        return out

    def from_tensor(self, tensor: Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        """A fake tensor like a real one."""
        return self._with_value(super().from_tensor(tensor, *args, **kwargs), tensor)

    def new_like(self, tensor: Tensor, dtype: torch.dtype) -> Any:
        """A fake tensor of a real one's sizes, and its value where that is small; it requires no gradient."""
        with self:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device)
        return self._with_value(fake, tensor)

    @contextmanager
    def readings(self) -> Iterator[None]:
        """Answers functions that read a tensor without an operator."""
        with ExitStack() as stack:
            stack.enter_context(_without_tracebacks())
            if self._reads_values:
                stack.enter_context(_Reads(self))
                stack.enter_context(_taken_for_real())
            yield

    def _with_value(self, fake: Any, real: Tensor) -> Any:
        if self._reads_values and _is_small(real) and not real.is_meta and not isinstance(real, FakeTensor):
            with no_dispatch_modes():  # a copy, since the step may write into it
                setattr(fake, _VALUE, real.detach().to("cpu", fake.dtype, copy=True))
        elif hasattr(fake, _VALUE):  # of an operator that made it
            delattr(fake, _VALUE)
        return fake

    def read(self, fake: Tensor) -> Tensor:
        """The value of a tensor that a step reads; an assumed one where it is not known."""
        if _is_assumed(fake):
            self.assumed.add("aten._local_scalar_dense.default")
        return _value(fake)

    def with_lengths(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of C++ that reads lengths or batch sizes, its second argument, or writes them."""
        self._pads = func.__name__ == PAD
        try:
            out = func(args[0], self.known(args[1]), *args[2:], **kwargs)
        finally:
            self._pads = False
        return tuple(t if isinstance(t, FakeTensor) else self._on_processor(t) for t in out)

    def known(self, fake: Tensor) -> Tensor:
        """A copy of the value of a tensor."""
        with no_dispatch_modes():
            return self.read(fake).clone()

    def _on_processor(self, value: Tensor) -> FakeTensor:
        return self._with_value(FakeTensorMode.from_tensor(self, value), value)

    def _by_values(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
        """The result of an operator that has none without values."""
        given = _tensors(args, kwargs)
        if sum(t.numel() for t in given) > _MOST_READ:
            raise error
        if any(map(_is_assumed, given)):
            self.assumed.add(str(func))
        return tree_map_only(Tensor, self.from_tensor, self._computed(func, args, kwargs))

    def _all_selected(self, func: OpOverload, args: Sequence[Any]) -> Tensor:
        out = _SELECTED[func](*args)
        self._follow(func, [_assumed(a) if isinstance(a, Tensor) else a for a in args], {}, out)
        setattr(out, _ASSUMED, True)
        return out

    def _follow(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Give an operator's results their values; tensors that it writes lose theirs where it has none."""
        made = _tensors(out)
        try:
            values = _tensors(self._computed(func, args, kwargs)) if _may_follow(func, args, kwargs, made) else []
        except Exception:  # whatever a kernel says to assumed values, or a GPU's to the processor's
            values = []
        assumed = any(map(_is_assumed, _tensors(args, kwargs)))
        for fake, value in zip(made, values, strict=False):
            setattr(fake, _VALUE, value)
            setattr(fake, _ASSUMED, assumed)
        for place, _ in traits(func).writes if not values else ():
            if place < len(args) and isinstance(args[place], FakeTensor) and _has_value(args[place]):
                setattr(args[place], _ASSUMED, True)
                with suppress(RuntimeError):  # of an even one, which has one element in memory
                    _value(args[place]).fill_(1)  # and its views

    def _computed(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operator's result on values."""
        args, kwargs = tree_map_only(Tensor, _value, (tuple(args), dict(kwargs)))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with no_dispatch_modes(), torch.no_grad():
            if _RANDOM in func.tags:
                return self._drawn(func, args, kwargs)
            if traits(func).pin == UNINITIALISED:  # what was there would differ from run to run
                return func(*args, **kwargs).fill_(1)
            return _once(func, args, kwargs) if _is_even(func, args) else func(*args, **kwargs)

    def _drawn(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Random values, by a generator of the recording's own."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            return func(*args, **kwargs)
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(before)


class _Reads(TorchFunctionMode):
    """Answers the functions that take a tensor's contents without an operator.

    Args:
        fakes: The mode of the recording.
    """

    def __init__(self, fakes: ValuedFakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch's, these with values."""
        if func in _READING and isinstance(args[0], FakeTensor):
            alone = args[0].detach()  # an operator of the real functions, too
            if func is Tensor.__format__ and alone.dim() == 0:
                return format(alone.item(), *args[1:])
            known = self._fakes.known(alone)
            with no_dispatch_modes():
                return func(known, *args[1:], **(kwargs or {}))
        if takes_lengths(func, args):
            return self._fakes.with_lengths(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def _taken_for_real() -> Iterator[None]:
    """Let transformers read known values: for a fake tensor it builds the masks that a run may omit."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(module, "is_fake_tensor", None)
    if asked is not None:
        module.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor) and _is_assumed(tensor)
    try:
        yield
    finally:
        if asked is not None:
            module.is_fake_tensor = asked


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from printing a traceback for an operator that fails: the error says as much."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


_READING: set[Any] = {Tensor.numpy, Tensor.__array__, Tensor.__format__}


def _is_torchs(func: OpOverload) -> bool:
    """Whether an operator may run beside the recording: a collective would wait for other processes."""
    return isinstance(func, OpOverload) and func.namespace == "aten"


def _may_follow(func: OpOverload, args: Any, kwargs: Any, made: Sequence[Tensor]) -> bool:
    """Whether an operator's results are small, and known or worth an assumption: flags and integers."""
    given = _tensors(args, kwargs)
    if not made or any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
        return False  # a generator is the user's
    if all(map(_has_value, given)):
        return all(map(_is_small, made))
    if len(made) > 1 or made[0].dtype.is_floating_point or _RANDOM in func.tags or traits(func).writes:
        return False
    return _is_even(func, tree_map_only(Tensor, _value, tuple(args))) or (
        _is_small(made[0]) and sum(t.numel() for t in given) <= _MOST_READ
    )


def _is_small(tensor: Tensor) -> bool:
    numbers = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.layout is torch.strided and tensor.numel() <= (_MOST_NUMBERS if numbers else _MOST_INTEGERS)


def _has_value(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or hasattr(tensor, _VALUE)


def _is_assumed(tensor: Tensor) -> bool:
    return not _has_value(tensor) or getattr(tensor, _ASSUMED, False)


def _value(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    value: Tensor | None = getattr(tensor, _VALUE, None)
    return _assumed(tensor) if value is None else value


def _assumed(tensor: Tensor) -> Tensor:
    with no_dispatch_modes():
        one = torch.ones((), dtype=tensor.dtype)
        return (one + one if tensor.dtype.is_floating_point else one).expand(tensor.shape)


def _is_even(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether one element of each tensor gives the result, as all elements of a tensor are the same."""
    tensors = _tensors(args)
    same = all(n == 1 or step == 0 for t in tensors for n, step in zip(t.shape, t.stride(), strict=True))
    return _POINTWISE in func.tags and not traits(func).writes and bool(tensors) and same


def _once(func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    """The result of such an operator from one element of each tensor."""
    one = tree_map_only(Tensor, lambda t: t.as_strided((), ()), args)
    shape = torch.broadcast_shapes(*(t.shape for t in _tensors(args)))
    found: Tensor = func(*one, **kwargs)
    return found.expand(shape)


def _tensors(*nest: Any) -> list[Tensor]:
    return [t for t in tree_leaves(nest) if isinstance(t, Tensor)]


def _places(of: Tensor) -> Tensor:
    return of.new_empty((of.numel(), of.dim()), dtype=torch.int64)


def _values(of: Tensor, mask: Tensor) -> Tensor:
    return of.new_empty(torch.broadcast_shapes(of.shape, mask.shape).numel())


# Operators whose results are as long as values say: from the arguments to the longest result.
_SELECTED: dict[OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten.nonzero.default: _places,
    torch.ops.aten.masked_select.default: _values,
}
