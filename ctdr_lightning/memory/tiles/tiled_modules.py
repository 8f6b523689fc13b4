"""Modules of a model that run in tiles, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import FakeTensor, is_transformed, top_saved_tensors_hooks, tree_flatten
from ctdr_lightning.memory.tiles.checks import Trial, acts_on_tokens, static_hindrance, tried
from ctdr_lightning.memory.tiles.tiled_run import Call, run_in_tiles

# From a module to the ways in which it was cut, and for each the result of its trial.
Checked = MutableMapping[nn.Module, dict[tuple[int, tuple[bool, ...]], Trial]]


class TiledModules:
    """Runs modules of a model tile by tile of their samples, while it is entered.

    The forward of such a module saves nothing, and its backward makes one tile after the other again. Results are those
    of the whole up to rounding. A module that may not run so is left alone, with the reason.

    Args:
        model: The model; the modules get an instance attribute ``forward`` and lose it again.
        tiles: From the name of a module to its number of tiles. A module inside another one of them runs in the tiles
            of that one.
        axis: Of the samples in the tensors that the modules take and give; 1 cuts sequences of modules that act on each
            token alone. None is 1 for batches with fewer samples than tiles, where a module has linear layers,
            normalisations over features and activations alone, else 0.
        checked: What was found when modules were tried on samples of real batches; it is added to. None tries each
            anew.

    Attributes:
        left_alone: From the names of modules that run whole to the reasons.

    Raises:
        ConfigError: If a name is not that of a module, or a number is less than 2.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> with TiledModules(nn.Sequential(model), {"0": 4}) as tiled:
        ...     model(torch.randn(32, 8)).sum().backward()
        >>> tiled.left_alone
        {}
    """

    def __init__(
        self,
        model: nn.Module,
        tiles: Mapping[str, int],
        axis: int | None = None,
        checked: Checked | None = None,
    ) -> None:
        modules = dict(model.named_modules())
        for name, number in tiles.items():
            if name not in modules:
                raise ConfigError(
                    f"{name!r} is no module of {type(model).__name__}.", "Write a name of named_modules()."
                )
            if isinstance(number, bool) or not isinstance(number, int) or number < 2:
                raise ConfigError(f"{number!r} is no number of tiles for {name!r}.", "Write 2 or more.")
        outer = {name for name in tiles if not any(_is_inside(name, other) for other in tiles)}
        self._modules = {name: modules[name] for name in tiles if name in outer}
        self.left_alone: dict[str, str] = {}
        checked = WeakKeyDictionary() if checked is None else checked
        self._forwards = {
            name: _TiledForward(module, tiles[name], axis, partial(self.left_alone.__setitem__, name), checked)
            for name, module in self._modules.items()
        }

    def __enter__(self) -> TiledModules:
        """Replace the modules' forwards."""
        for name, module in self._modules.items():
            if "forward" in vars(module):
                self.left_alone[name] = "has a forward of its own on the instance"
            elif name not in self.left_alone:
                vars(module)["forward"] = self._forwards[name]
        return self

    def __exit__(self, *error: object) -> None:
        """Take the forwards off again."""
        for name, module in self._modules.items():
            if vars(module).get("forward") is self._forwards[name]:
                del vars(module)["forward"]


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


class _TiledForward:
    """The forward of one module, put on the instance; a copy of the module copies this with it."""

    def __init__(
        self,
        module: nn.Module,
        n_tiles: int,
        axis: int | None,
        leave_alone: Callable[[str], None],
        checked: Checked,
    ) -> None:
        self._module, self._n_tiles, self._axis = module, n_tiles, axis
        self._leave_alone, self._checked = leave_alone, checked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._call(*args, **kwargs) if self._trains() else None
        if found is None:
            return self._whole(*args, **kwargs)
        call, tensors = found
        trial = self._trial(call, tensors)
        if trial.reason:
            self._leave_alone(trial.reason)
            return self._whole(*args, **kwargs)
        return run_in_tiles(replace(call, random_axes=trial.random_axes), tensors)

    def _trial(self, call: Call, tensors: Sequence[Tensor]) -> Trial:
        """Of the module: its samples are tried once, and where they have no values, its operators."""
        reason = static_hindrance(self._module)
        known, way = self._checked.setdefault(self._module, {}), (call.axis, call.cut)
        if reason or way in known:
            return Trial(reason) if reason else known[way]
        trial = tried(call, tensors, self._module.buffers())
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            known[way] = trial
        return trial

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def _trains(self) -> bool:
        """Whether the call is one of ordinary training, not run again later by torch's checkpoint."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
            return False
        hooks = top_saved_tensors_hooks(True)
        return hooks is None or hooks[0].__module__ != checkpoint.__name__

    def _call(self, *args: Any, **kwargs: Any) -> tuple[Call, list[Tensor]] | None:
        """The call and its tensors; None where nothing can be cut, or nothing is trained."""
        leaves, nest = tree_flatten((args, kwargs))
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        tensors = [leaves[place] for place in places]
        parameters = tuple(p for p in self._module.parameters() if p.requires_grad)
        axis = self._axis_of(tensors)
        n_samples = next((t.shape[axis] for t in tensors if t.dim() > axis), 0)
        if n_samples < 2 or not (parameters or any(t.requires_grad for t in tensors)):
            return None
        cut = tuple(t.dim() > axis and t.shape[axis] == n_samples for t in tensors)
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        n_tiles = min(self._n_tiles, n_samples)
        return Call(self._whole, others, nest, places, cut, axis, n_samples, n_tiles, parameters), tensors

    def _axis_of(self, tensors: Sequence[Tensor]) -> int:
        """Samples, or the tokens of few samples where they do not mix."""
        if self._axis is not None:
            return self._axis
        few = all(t.dim() > 2 and t.shape[0] < min(self._n_tiles, t.shape[1]) for t in tensors)
        return int(bool(tensors) and few and acts_on_tokens(self._module))
