"""Which modules run in tiles: those around the operations that need most, where no plan of the whole modules fits.

A module in tiles costs one more forward of it, as one that is recomputed does, and sums are rounded otherwise. So tiles
come after plans. The search grows a set of modules: at the tick at which every plan is highest, the smallest module
around the operation that lowers this floor joins, and with it all modules of its class at such a place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.account.fit import planned_peak_bytes
from ctdr_lightning.memory.bounds.lower_bound import highest_tick
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.tiles.checks import static_hindrance
from ctdr_lightning.memory.traces.trace import Trace

# Few tiles first: each starts all kernels of its modules anew. On a GPU's list of operators 4, 8 and 16 tiles of
# AlexNet's convolutions took x1.25 to x1.28, of LeNet's, whose kernels are short, x2.9, x5.1 and x9.6.
NUMBERS = (4, 16)
_GAIN = 0.98  # of the floor: a set of modules that lowers it less is not worth its forwards
_MOST_TRIED = 16  # recordings on fake tensors


@dataclass(frozen=True)
class InTiles:
    """Modules that run in tiles in a step.

    Attributes:
        tiles: From their names to their numbers of tiles.
        account: The batch with them.
    """

    tiles: Mapping[str, int]
    account: BatchAccount

    def __str__(self) -> str:
        return f"{tiles_in_words(self.tiles)}."


def tiles_in_words(tiles: Mapping[str, int]) -> str:
    """Modules in tiles, in words.

    Example:
        >>> tiles_in_words({"features": 4})
        'features runs in 4 tiles, the same up to rounding: no plan of it whole fits'
        >>> tiles_in_words({f"blocks.{i}.mlp": 4 for i in range(12)})
        'blocks.0.mlp and 11 other modules run in 4 tiles each, the same up to rounding: no plan of them whole fits'
    """
    first, *others = tiles
    if not others:
        return f"{first or 'the model'} runs in {tiles[first]} tiles, the same up to rounding: no plan of it whole fits"
    several = f"{first} and {len(others)} other module{'s' * (len(others) > 1)}"
    return f"{several} run in {tiles[first]} tiles each, the same up to rounding: no plan of them whole fits"


def found_tiles(
    model: nn.Module,
    account: Callable[[LeanStep], BatchAccount],
    step: LeanStep,
    budget_bytes: int,
    policy: str,
    whole: BatchAccount | None = None,
) -> InTiles | None:
    """The modules to run in tiles; None where these lower no floor enough.

    Args:
        model: The model.
        account: From a lean step to the account of its batch, on fake tensors.
        step: The step, without tiles.
        budget_bytes: The budget.
        policy: The memory policy's name.
        whole: The account of this step, where it is known.

    Raises:
        ConfigError: As ``account`` does.
    """

    def in_tiles(tiles: Mapping[str, int]) -> tuple[BatchAccount, set[str]]:
        tried = LeanStep(step.names, tiles)
        found = account(tried)
        return found, tiles.keys() - tried.left_alone.keys()

    return _TileSearch(model, in_tiles, whole or account(step), budget_bytes, policy).found()


class _TileSearch:
    """Grows sets of modules; its account also has the names of those that can run in tiles."""

    def __init__(
        self,
        model: nn.Module,
        account: Callable[[Mapping[str, int]], tuple[BatchAccount, set[str]]],
        whole: BatchAccount,
        budget_bytes: int,
        policy: str,
    ) -> None:
        self._modules = dict(model.named_modules())
        self._account, self._whole = account, whole
        self._budget_bytes, self._policy, self._n_tried = budget_bytes, policy, 0

    def found(self) -> InTiles | None:
        """The modules in the fewest tiles that fit."""
        grown = (self._grown(number) for number in NUMBERS)
        return next((made for made in grown if made is not None and self._fits(made.account)), None)

    def _fits(self, account: BatchAccount) -> bool:
        return planned_peak_bytes(account, self._budget_bytes, self._policy) <= self._budget_bytes

    def _grown(self, number: int) -> InTiles | None:
        """The smallest set of modules whose floor is within the budget, in so many tiles; None where there is none."""
        made = InTiles({}, self._whole)
        while made.account.floor_bytes > self._budget_bytes or not made.tiles:
            better = next(self._better(made, number), None)
            if better is None:
                return None
            made = better
        return made

    def _better(self, made: InTiles, number: int) -> Iterator[InTiles]:
        """The set with modules around the operation that needs most, the smallest ones first."""
        trace = made.account.standing
        for names in self._and_around(_module_at(trace, highest_tick(trace))):
            if self._n_tried == _MOST_TRIED:
                return
            more = dict.fromkeys((like for name in names for like in self._like(name)), number)
            if not more.keys() <= made.tiles.keys():
                self._n_tried += 1
                account, running = self._account({**made.tiles, **more})
                if account.floor_bytes <= _GAIN * made.account.floor_bytes:
                    yield InTiles({n: t for n, t in {**made.tiles, **more}.items() if n in running}, account)

    def _and_around(self, name: str) -> Iterator[list[str]]:
        """A module and those around it, the model last; there may be none but the model.

        Of a Sequential that cannot run in tiles, the longest run of its children around the module can.
        """
        while name:
            if not _is_one_operation(self._modules.get(name)):
                yield [name]
            run = self._neighbours(name)
            if len(run) > 1:
                yield run
            name = _parent(name)
        yield [""]

    def _neighbours(self, name: str) -> list[str]:
        parent = self._modules.get(_parent(name))
        if parent is None or type(parent).forward is not nn.Sequential.forward or not static_hindrance(parent):
            return []
        children = [(f"{_parent(name)}.{key}".lstrip("."), child) for key, child in parent.named_children()]
        runs = (
            [child for child, _ in run]
            for hindered, run in groupby(children, lambda named: bool(static_hindrance(named[1])))
            if not hindered
        )
        return next((run for run in runs if name in run), [])

    def _like(self, name: str) -> list[str]:
        """The modules of the same class whose names differ in numbers alone."""
        place, kind = _place(name), type(self._modules.get(name))
        alike = (other for other, module in self._modules.items() if _place(other) == place and type(module) is kind)
        return [other for other in alike if not static_hindrance(self._modules[other])]


def _is_one_operation(module: nn.Module | None) -> bool:
    """Whether a module is a layer of torch's own: its input and its output are there whole, in tiles too."""
    return module is None or (type(module).__module__.startswith("torch.nn.") and not list(module.children()))


def _place(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _module_at(trace: Trace, tick: int) -> str:
    """The module around the operation at a tick; for one of the backward, around what made the largest value it reads.

    Where that is unknown, as for products of gradients with weights, an earlier operation's is taken.
    """
    for op in reversed([op for op in trace.ops if op.tick <= tick]):
        if not op.backward:
            return op.module
        read = [trace.values[v] for v in op.inputs if v >= 0 and trace.values[v].op >= 0]
        made = [value for value in read if not trace.ops[value.op].backward]
        if made:
            largest = max(made, key=lambda value: trace.storages[value.storage].n_bytes)
            return trace.ops[largest.op].module
    return ""


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
