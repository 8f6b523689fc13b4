"""Modules of a model that run in tiles, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import FakeTensor, is_transformed, top_saved_tensors_hooks, tree_flatten
from ctdr_lightning.memory.tiles.checks import Trial, acts_on_tokens, static_hindrance, tried
from ctdr_lightning.memory.tiles.tiled_run import Call, run_in_tiles

# From the first of modules that run as one to their number, how they were cut and which of their weights are trained,
# and for each the trial's result.
Checked = MutableMapping[nn.Module, dict[tuple[int, int, tuple[bool, ...], tuple[bool, ...]], Trial]]


class TiledModules:
    """Runs modules of a model tile by tile of their samples, while it is entered.

    The forward of such a module saves nothing, and its backward makes one tile after the other again. Results are those
    of the whole up to rounding. A module that may not run so is left alone, with the reason.

    Args:
        model: The model; the modules get an instance attribute ``forward`` and lose it again.
        tiles: From the name of a module to its number of tiles. A module inside another one of them runs in the tiles
            of that one. Neighbours in an `nn.Sequential` with the same number run as one: the convolution, activation
            and pooling of one tile before those of the next.
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
        outer = {name: n for name, n in tiles.items() if not any(_is_inside(name, other) for other in tiles)}
        checked = WeakKeyDictionary() if checked is None else checked
        self.left_alone: dict[str, str] = {}

        def tiled(names: Sequence[str], parts: Sequence[nn.Module], n_tiles: int) -> _TiledForward:
            def leave_alone(reason: str) -> None:
                self.left_alone.update(dict.fromkeys(names, reason))

            return _TiledForward(parts, n_tiles, axis, leave_alone, checked)

        merged = _neighbours(modules, outer)
        together = {name for runs in merged.values() for names in runs.values() for name in names}
        self._names = {name: [name] for name in outer if name not in together}
        self._forwards: dict[str, Callable[..., Any]] = {
            name: tiled([name], [modules[name]], outer[name]) for name in self._names
        }
        for parent, runs in merged.items():
            self._names[parent] = [name for names in runs.values() for name in names]
            self._forwards[parent] = _SequentialForward(
                modules[parent],
                {at: tiled(names, [modules[n] for n in names], outer[names[0]]) for at, names in runs.items()},
            )
        self._modules = {name: modules[name] for name in self._names}

    def __enter__(self) -> TiledModules:
        """Replace the modules' forwards."""
        for name, module in self._modules.items():
            if "forward" in vars(module):
                reason = "has a forward of its own on the instance"
                self.left_alone.update(dict.fromkeys(self._names[name], reason))
            elif not self.left_alone.keys() >= set(self._names[name]):
                vars(module)["forward"] = self._forwards[name]
        return self

    def __exit__(self, *error: object) -> None:
        """Take the forwards off again."""
        for name, module in self._modules.items():
            if vars(module).get("forward") is self._forwards[name]:
                del vars(module)["forward"]


def _neighbours(modules: Mapping[str, nn.Module], tiles: Mapping[str, int]) -> dict[str, dict[int, list[str]]]:
    """From names of Sequentials to the runs of two and more of their children in as many tiles, by first places."""
    found: dict[str, dict[int, list[str]]] = {}
    inside: dict[str, dict[int, str]] = {}
    for name in tiles:
        if name and not static_hindrance(modules[name]):
            inside.setdefault(name.rpartition(".")[0], {})[id(modules[name])] = name
    for parent, names in inside.items():
        sequential: Any = modules[parent]
        if type(sequential).forward is not nn.Sequential.forward:
            continue
        numbered = [(at, names.get(id(child), "")) for at, child in enumerate(sequential)]
        for n_tiles, run in groupby(numbered, lambda placed: tiles.get(placed[1])):
            first, *others = run
            if n_tiles is not None and others:
                found.setdefault(parent, {})[first[0]] = [first[1], *(name for _, name in others)]
    return found


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


class _SequentialForward:
    """The forward of a Sequential with runs of its children as one, by their first places."""

    def __init__(self, module: Any, runs: Mapping[int, _TiledForward]) -> None:
        self._module, self._runs = module, runs

    def __call__(self, input: Any) -> Any:
        until = 0
        for at, child in enumerate(self._module):
            if at < until:
                continue
            run = self._runs.get(at)
            input = child(input) if run is None else run(input)
            until = at + (1 if run is None else run.n_parts)
        return input


class _TiledForward:
    """The forward of modules that run one after the other, put on the instance; a copy of it copies this with it."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        n_tiles: int,
        axis: int | None,
        leave_alone: Callable[[str], None],
        checked: Checked,
    ) -> None:
        self.n_parts, self._first, self._n_tiles, self._axis = len(parts), parts[0], n_tiles, axis
        self._module = parts[0] if len(parts) == 1 else nn.Sequential(*parts)
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
        return run_in_tiles(replace(call, random_axes=trial.random_axes, needless=trial.needless), tensors)

    def _trial(self, call: Call, tensors: Sequence[Tensor]) -> Trial:
        """Of the module: its samples are tried once, and where they have no values, its operators."""
        reason = static_hindrance(self._module)
        trained = tuple(parameter.requires_grad for parameter in self._module.parameters())
        known, way = self._checked.setdefault(self._first, {}), (self.n_parts, call.axis, call.cut, trained)
        if reason or way in known:
            return Trial(reason) if reason else known[way]
        trial = tried(call, tensors, self._module)
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
