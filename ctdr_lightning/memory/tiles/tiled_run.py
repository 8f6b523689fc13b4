"""One call of a module, a tile of its samples at a time: nothing is saved, and the backward makes each tile again.

As in ALST's tiled MLP (2506.13996) and MsT (2407.15892), for any module whose samples do not mix. The forward keeps
inputs and outputs alone; the backward runs the forward of a tile and differentiates it before it goes on to the next,
so that the largest tensors inside are those of one tile. Costs one more forward of the module, less the operators that
the backward does not need. Gradients of weights are
summed over tiles, which changes them by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctdr_lightning.basics.torch_private import OpMode, tree_flatten, tree_unflatten
from ctdr_lightning.memory.tiles.draws import DrawnOnce
from ctdr_lightning.memory.tiles.needless import Needless, OtherOperators, WithoutNeedless


@dataclass(frozen=True)
class Call:
    """A call of a module, without its tensors: these are given apart, so that a plan may free them.

    Attributes:
        run: The module's own forward.
        leaves: The arguments as a flat list, with None in the place of tensors.
        nest: Their structure.
        places: Of the tensors among them.
        cut: Which of the tensors have the module's samples along the axis.
        axis: Of the samples.
        n_samples: Number of samples.
        n_tiles: Number of tiles.
        parameters: Of the module, those that are trained.
        random_axes: Of the samples in the numbers that each random operator draws, as `DrawnOnce` takes them.
        needless: Its operators, and those that its backward can do without.
        unmade: As for `WithoutNeedless`.
    """

    run: Callable[..., Any]
    leaves: tuple[Any, ...]
    nest: Any
    places: tuple[int, ...]
    cut: tuple[bool, ...]
    axis: int
    n_samples: int
    n_tiles: int
    parameters: tuple[Tensor, ...]
    random_axes: tuple[int | None, ...] = ()
    needless: Needless = ()
    unmade: int | None = None

    @property
    def n_rows(self) -> int:
        """Number of samples of a tile; the last may have fewer."""
        return -(-self.n_samples // self.n_tiles)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """First sample and number of samples of each tile."""
        for begin in range(0, self.n_samples, self.n_rows):
            yield begin, min(self.n_rows, self.n_samples - begin)

    def pieces(self, tensors: Sequence[Tensor], begin: int, n_rows: int) -> list[Tensor]:
        """The tensors of a tile: views of those that are cut, all others whole."""
        return [t.narrow(self.axis, begin, n_rows) if cut else t for t, cut in zip(tensors, self.cut, strict=True)]

    def outputs(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Run on such tensors; the outputs as a flat list, and their structure."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.nest)
        return tree_flatten(self.run(*args, **kwargs))

    def of_tile(
        self, tensors: Sequence[Tensor], begin: int, n_rows: int, drawn: list[Tensor], *modes: OpMode
    ) -> tuple[list[Any], Any]:
        """The same of one tile, on its tensors and the random numbers that were drawn for all, within such modes."""
        with ExitStack() as stack:
            if self.random_axes:  # a mode costs some microseconds an operator
                stack.enter_context(DrawnOnce(self.random_axes, drawn, self.n_samples, begin, n_rows))
            for mode in modes:
                stack.enter_context(mode)
            return self.outputs(tensors)

    def of_tile_again(self, tensors: Sequence[Tensor], begin: int, n_rows: int, drawn: list[Tensor]) -> list[Any]:
        """The outputs of one tile for its backward, which may need no values of them."""
        if any(needless for _, needless in self.needless):
            try:
                return self.of_tile(tensors, begin, n_rows, drawn, WithoutNeedless(self.needless, self.unmade))[0]
            except OtherOperators:  # the module's own code went another way than in the trial
                pass
        return self.of_tile(tensors, begin, n_rows, drawn)[0]


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Keep autocast from remembering casts of weights, which have no graph where none is recorded."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def run_in_tiles(call: Call, tensors: Sequence[Tensor]) -> Any:
    """The result of a call, made tile by tile.

    Args:
        call: Of a module whose samples do not mix, and whose outputs all have them along the axis.
        tensors: Its tensors.
    """
    structure: list[Any] = []
    found = _Tiled.apply(call, structure, *tensors, *call.parameters)
    return tree_unflatten(list(found), structure[0])


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, structure: list[Any], *given: Tensor) -> tuple[Tensor, ...]:
        """All outputs, each filled tile by tile."""
        device = given[0].device.type
        ctx.call = call
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.set_materialize_grads(False)
        tensors = given[: len(call.places)]
        outputs: list[Tensor] = []
        drawn: list[Tensor] = []
        for begin, n_rows in call.tiles():
            with no_cast_cache():
                of_tile, nest = call.of_tile(call.pieces(tensors, begin, n_rows), begin, n_rows, drawn)
            if not outputs:
                structure.append(nest)
                outputs = [_whole(output, call) for output in of_tile]
            for output, part in zip(outputs, of_tile, strict=True):
                output.narrow(call.axis, begin, n_rows).copy_(part)
            del of_tile
        ctx.save_for_backward(*given, *drawn)
        ctx.mark_non_differentiable(*[output for output in outputs if not output.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        """Make each tile again, and differentiate it."""
        call, needed = ctx.call, ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors
        tensors, drawn = saved[: len(call.places)], list(saved[len(needed) :])
        total: list[Tensor | None] = [None] * len(needed)
        for begin, n_rows in call.tiles():
            given = [slope.narrow(call.axis, begin, n_rows) if slope is not None else None for slope in slopes]
            found = _of_tile(ctx, tensors, drawn, (begin, n_rows), given)
            for index, slope in enumerate(found):
                if slope is None:
                    continue
                before = total[index]
                if index < len(call.cut) and call.cut[index]:
                    whole = torch.zeros_like(tensors[index]) if before is None else before
                    whole.narrow(call.axis, begin, n_rows).copy_(slope)
                    total[index] = whole
                else:
                    total[index] = slope if before is None else before.add_(slope)
            del found
        return (None, None, *total)


def _of_tile(
    ctx: Any, tensors: Sequence[Tensor], drawn: list[Tensor], tile: tuple[int, int], slopes: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of one tile's tensors and of the parameters; None where not needed."""
    call, needed = ctx.call, ctx.needs_input_grad[2:]
    device, dtype, enabled = ctx.autocast
    own = [t.detach().requires_grad_(need) for t, need in zip(call.pieces(tensors, *tile), needed, strict=False)]
    with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
        outputs = call.of_tile_again(own, *tile, drawn)
    pairs = [(o, s) for o, s in zip(outputs, slopes, strict=True) if s is not None and o.requires_grad]
    del outputs
    inputs = [tensor for tensor, need in zip((*own, *call.parameters), needed, strict=True) if need]
    if not pairs:
        return [None] * len(needed)
    by = iter(torch.autograd.grad([o for o, _ in pairs], inputs, [s for _, s in pairs], allow_unused=True))
    return [next(by) if need else None for need in needed]


def _whole(of_tile: Tensor, call: Call) -> Tensor:
    """An output of all samples, unfilled, like that of a tile."""
    shape = list(of_tile.shape)
    shape[call.axis] = call.n_samples
    return of_tile.new_empty(shape)
