"""The modules that may run in tiles: looked at first, then tried on samples of a real batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ctdr_lightning.basics.errors import first_line
from ctdr_lightning.basics.torch_private import (
    FakeTensor,
    OpMode,
    OpOverload,
    hooks_after_modules,
    hooks_before_modules,
    hooks_of,
    no_dispatch_modes,
    tree_leaves,
)
from ctdr_lightning.memory.tiles.draws import axis_of_samples, drawn_shape
from ctdr_lightning.memory.tiles.needless import Needless, needless_operators
from ctdr_lightning.memory.tiles.tiled_run import Call, no_cast_cache, run_in_tiles
from ctdr_lightning.memory.values.op_traits import COLLECTIVE, RANDOM, UNPROVEN, pin_reason_of_call, traits

_RANDOM = "draws random numbers for all samples at once"
_FORBIDDEN = {
    RANDOM: _RANDOM, COLLECTIVE: "exchanges data with other processes",
    UNPROVEN: "runs an operator that is not torch's own", "higher-order operator": "runs a higher-order operator",
}  # fmt: skip
# Ends of class names of modules without parts. Conv1D is a linear layer of transformers; torch's own is Conv1d.
_BY_TOKEN = ("Linear", "Conv1D", "LayerNorm", "RMSNorm", "Identity", "Dropout")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Relative to the norm of the whole. Sums over tiles of a batch of 64 differed by up to 3e-6 in 32 bits; samples that
# mix, by a mean or a maximum over the batch, by 1e-2 and more.
_ALIKE, _ROUNDED = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3}, 3e-2
# Samples, or tokens, of a trial: few, as it comes before the plan. Two parts of 7 begin at no multiple of 2 to 6, so
# that samples that mix in groups of any size, except 7, give other results in parts.
_TRIED = 14


class _NotInTiles(Exception):
    """An operator forbids tiles; its reason is the message."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        reason: Why a call may not run in tiles; empty where it may.
        random_axes: Of the samples in the numbers of its random operators, as `DrawnOnce` takes them.
        needless: Its operators, and those that its backward can do without.
    """

    reason: str = ""
    random_axes: tuple[int | None, ...] = ()
    needless: Needless = ()


class _Watch(OpMode):
    """Stops at an operator by which the result would depend on the tiles.

    Args:
        outside: Tensors that were there before the module ran.

    Attributes:
        drawn: Shapes of the numbers that random operators drew.
    """

    def __init__(self, outside: Sequence[Tensor]) -> None:
        super().__init__()
        self.drawn: list[tuple[int, ...]] = []
        self._outside = {t.untyped_storage()._cdata for t in outside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = traits(func)
        reason = _FORBIDDEN.get(pin_reason_of_call(func, args, kwargs) if isinstance(func, OpOverload) else op.pin)
        if reason == _RANDOM and (shape := drawn_shape(func, args)) is not None:
            self.drawn.append(shape)
            reason = None
        if op.batch_norm and (op.training is None or args[op.training]):
            reason = "normalises each sample by its whole batch"
        if reason is None and any(self._is_outside(args, place) for place in op.written):
            reason = "writes to its input, a weight or a buffer"
        if reason is not None:
            raise _NotInTiles(reason)
        return func(*args, **kwargs)

    def _is_outside(self, args: Any, place: int) -> bool:
        written = args[place] if place < len(args) else None
        return isinstance(written, Tensor) and written.untyped_storage()._cdata in self._outside


def static_hindrance(module: nn.Module) -> str:
    """Why a module may not run in tiles, seen without running it; empty where nothing is seen.

    Args:
        module: The module.
    """
    if any(len(hooks) for inner in module.modules() for hooks in hooks_of(inner)):
        return "has hooks, which would see tiles"
    if any(isinstance(inner, _BATCH_NORMS) and inner.training for inner in module.modules()):
        return "normalises each sample by its whole batch"
    if any(type(p.data) not in (Tensor, FakeTensor) for p in module.parameters()):
        return "has sharded weights"
    return ""


def acts_on_tokens(module: nn.Module) -> bool:
    """Whether a module is made of parts alone that act on each token of a sequence by itself.

    Args:
        module: The module; the code of its own forward is not looked at.
    """
    parts = [part for part in module.modules() if next(part.children(), None) is None]
    return all(_is_activation(part) or type(part).__name__.endswith(_BY_TOKEN) for part in parts)


def _is_activation(part: nn.Module) -> bool:
    at_home = type(part).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return at_home and not list(part.parameters()) and not type(part).__name__.startswith("Softmax")


def tried(call: Call, tensors: Sequence[Tensor], module: nn.Module) -> Trial:
    """Try whether a call may run in tiles.

    A few samples run whole and in two parts, with gradients; no random state and no buffer changes. Fake tensors have
    no values to compare, so that of them operators alone are looked at.

    Args:
        call: The call.
        tensors: Its tensors.
        module: The module.
    """
    try:
        with _unseen(), _attributes_put_back(module), _fakes_of(tensors), torch.enable_grad():
            return _tried(call, tensors, module)
    except _NotInTiles as reason:
        return Trial(str(reason))
    except torch.OutOfMemoryError:  # says nothing about the module
        raise
    except Exception as error:  # the module's own code may ask for a number of samples that only the whole has
        return Trial(f"does not run on a part of its samples: {first_line(error)}")


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide what runs inside from hooks and modes of a step that is recorded or guided."""
    suspended = [(hooks, dict(hooks)) for hooks in (hooks_before_modules, hooks_after_modules)]
    try:
        for hooks, _ in suspended:
            hooks.clear()
        with no_dispatch_modes(), saved_tensors_hooks(_same, _same), no_cast_cache():
            yield
    finally:
        for hooks, before in suspended:
            hooks.update(before)


@contextmanager
def _attributes_put_back(module: nn.Module) -> Iterator[None]:
    """Give modules back the attributes and buffers that they had: those of a trial are of a few samples."""
    held = [(names, dict(names)) for inner in module.modules() for names in (vars(inner), inner._buffers)]
    try:
        yield
    finally:
        for names, before in held:
            for name in names.keys() - before.keys():
                del names[name]
            names.update(before)


def _fakes_of(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Tensors that a module makes for itself, such as masks, are fake where its arguments are."""
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), nullcontext())


def n_tried(n_samples: int) -> int:
    """Number of samples of a trial: the first of two parts has an odd number of them.

    Args:
        n_samples: Number that there are; at least 2.

    Example:
        >>> [n_tried(n) for n in (2, 3, 4, 8, 100)]
        [2, 2, 2, 6, 14]
    """
    few = min(n_samples, _TRIED)
    return few - max((few - 1) % 4 - 1, 0)


def _tried(call: Call, tensors: Sequence[Tensor], module: nn.Module) -> Trial:
    n_samples = n_tried(call.n_samples)
    few = [t.detach() for t in call.pieces(tensors, 0, n_samples)]
    call = replace(call, n_samples=n_samples, n_tiles=2)
    kept = _kept_tensors(module)
    call = replace(call, random_axes=_random_axes(call, few, [*call.parameters, *module.buffers()]))
    now = _kept_tensors(module)
    if len(now) != len(kept) or any(a is not b for a, b in zip(now, kept, strict=True)):
        raise _NotInTiles("keeps a tensor as an attribute, which would be that of a tile")
    graded = _graded(few)
    with _same_numbers(few[0]):
        needless = needless_operators(lambda: call.outputs(graded))
    if any(isinstance(tensor, FakeTensor) for tensor in few):
        return Trial("", call.random_axes, needless)
    whole = _results(replace(call, n_tiles=1), few)
    # a function of the module's own may keep tensors where autograd does not see them: then nothing is needless
    for found, unmade in ((needless, (0, 1)), ((), (0,))):
        calls = [replace(call, needless=found, unmade=number) for number in unmade]
        if all(_all_alike(whole, _results(each, few), few[0].device.type) for each in calls):
            return Trial("", call.random_axes, found)
    return Trial("gives other results in parts: its samples mix")


def _kept_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that modules hold in attributes, buffers and parameters among them."""
    held = [list(vars(inner).values()) for inner in module.modules()]
    return [leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor)]


def _random_axes(call: Call, few: Sequence[Tensor], owned: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Of the samples in the numbers that are drawn for all of them, and for a tile."""
    whole = _drawn(call, few, owned)
    if not whole:
        return ()
    n_part = call.n_rows
    part = _drawn(call, call.pieces(few, 0, n_part), owned)
    try:
        shapes = zip(whole, part, strict=True)
        return tuple(axis_of_samples(of_all, of_part, call.n_samples, n_part) for of_all, of_part in shapes)
    except ValueError:
        raise _NotInTiles(_RANDOM) from None


def _drawn(call: Call, tensors: Sequence[Tensor], owned: Sequence[Tensor]) -> list[tuple[int, ...]]:
    with _Watch([*tensors, *owned]) as watch, _same_numbers(tensors[0]):
        call.outputs(tensors)
    return watch.drawn


def _same_numbers(tensor: Tensor) -> AbstractContextManager[None]:
    """Random numbers drawn inside are drawn again outside; fakes draw none."""
    if isinstance(tensor, FakeTensor):
        return nullcontext()
    return torch.random.fork_rng(devices=[tensor.device] if tensor.device.type == "cuda" else [])


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _results(call: Call, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Outputs and gradients."""
    given = _graded(tensors)
    with _same_numbers(given[0]):
        outputs = call.outputs(given)[0] if call.n_tiles == 1 else tree_leaves(run_in_tiles(call, given))
    _check_outputs(call, outputs)
    graded = [output for output in outputs if output.requires_grad]
    wanted = [*(t for t in given if t.requires_grad), *call.parameters]
    if not (graded and wanted):
        return [*outputs]
    return [*outputs, *torch.autograd.grad(graded, wanted, [_slope(o) for o in graded], allow_unused=True)]


def _graded(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]


def _check_outputs(call: Call, outputs: Sequence[Any]) -> None:
    for output in outputs:
        if not isinstance(output, Tensor) or output.dim() <= call.axis or output.shape[call.axis] != call.n_samples:
            raise _NotInTiles("has an output that is no tensor of its samples")


def _slope(output: Tensor) -> Tensor:
    """A gradient that tells samples and entries apart, without a random number."""
    n = output.numel()
    return (
        torch.arange(n, device=output.device, dtype=torch.float32)
        .mul_(0.7)
        .cos_()
        .reshape(output.shape)
        .to(output.dtype)
    )


def _all_alike(whole: Sequence[Tensor | None], parts: Sequence[Tensor | None], device: str) -> bool:
    rounds = torch.is_autocast_enabled(device)
    return len(whole) == len(parts) and all(_alike(a, b, rounds) for a, b in zip(whole, parts, strict=True))


def _alike(whole: Tensor | None, parts: Tensor | None, rounds: bool) -> bool:
    if whole is None or parts is None:
        return whole is parts
    if not whole.is_floating_point():
        return torch.equal(whole, parts)
    difference, size = (float(t.detach().float().norm()) for t in (whole - parts, whole))
    return difference <= (_ROUNDED if rounds else _ALIKE.get(whole.dtype, _ROUNDED)) * size
