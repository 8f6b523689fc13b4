"""Load a checkpoint of a factorized model: layers are rebuilt from the names and shapes in it, then weights load.

Nothing but tensors and primitives is read (``weights_only=True``), so a hostile file cannot run code.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.documents import CALLBACK_STATE_VERSION
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.decomposition.layers.attention import PROJECTIONS, open_attention
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer, factorized
from ctdr_lightning.decomposition.layers.saved_shards import read_folder
from ctdr_lightning.decomposition.layers.surgery import replace_everywhere, walk
from ctdr_lightning.decomposition.layers.tied import follow_owners
from ctdr_lightning.decomposition.methods import METHODS
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of, weight_of

# An entry of no elements in checkpoints of factorized models. Only a state dict's names reach the message of
# `MyModule.load_from_checkpoint(path)`, which knows nothing of us: torch lists this name first among the unexpected.
NOTE = "HINT: layers are factorized, load this with ctdr_lightning.load_from_checkpoint(MyModule, path)"
_FACTOR = re.compile(r"(?P<method>\w+)\.(?P<index>\d+)\.weight")


def restore(model: nn.Module, checkpoint: str | Path | Mapping[str, Any], prefix: str = "") -> nn.Module:
    """Give a dense model the factorized layers of a checkpoint, then load its weights.

    Args:
        model: The architecture that was decomposed, dense or factorized in any way.
        checkpoint: A path, a Lightning checkpoint, or a state dict. A folder holds the shards of several processes.
        prefix: Prefix of the model's entries there: ``"net."`` if a LightningModule holds it as ``self.net``.

    Returns:
        The same model.

    Raises:
        CheckpointError: If the checkpoint cannot be read, is not one, or belongs to another architecture; the
            model's weights are then as they were.

    Example:
        >>> from ctdr_lightning import decompose
        >>> trained = nn.Sequential(nn.Linear(64, 64))
        >>> _ = decompose(trained, rank=4)
        >>> restore(nn.Sequential(nn.Linear(64, 64)), trained.state_dict())[0].ranks
        (4,)
    """
    state = _state_dict(_read(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint)
    if prefix:
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    replaced = rebuild_from_state_dict(model, state)
    problem = _mismatch(model, state)
    if problem:
        replace_everywhere(model, {new: old for old, new in replaced.items()})
        raise CheckpointError(
            f"checkpoint does not fit {type(model).__name__}: {problem}.",
            _way_out(model, state),
        )
    model.load_state_dict(state)
    return model


def rebuild_from_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str = ""
) -> dict[nn.Module, nn.Module]:
    """Factorize those layers of a module that are factorized in a state dict; shapes only, nothing is loaded.

    Made for ``register_load_state_dict_pre_hook``: layers are replaced before the module loads its children.

    Args:
        module: The module whose layers are looked at, in place.
        state_dict: Names and tensors.
        prefix: Prefix of the module's own names in ``state_dict`` (``"module."``).

    Returns:
        Each replaced layer and its new one.

    Raises:
        CheckpointError: If factors are there that fit no layer.
    """
    opened = open_attention(module, lambda name: _is_open(state_dict, f"{prefix}{name}."))
    swaps: dict[nn.Module, nn.Module] = {}
    for name, layer in walk(module):
        geometry = layer.geometry if isinstance(layer, FactorizedLayer) else _geometry(layer)
        found = _factors(state_dict, f"{prefix}{name}.") if geometry is not None else None
        if geometry is None or found is None:
            continue
        method, shapes = found
        if not (isinstance(layer, FactorizedLayer) and layer.method == method and _shapes(layer) == shapes):
            swaps[layer] = _rebuild(name, layer, geometry, method, shapes)
    swaps |= follow_owners(module, swaps)
    replace_everywhere(module, swaps)
    return opened | swaps


def _is_open(state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether an attention's projections are stored as layers of their own."""
    return any(key.startswith(f"{prefix}{name}.") for key in state_dict for name in PROJECTIONS)


def _geometry(layer: nn.Module) -> Geometry | None:
    kind = kind_of(layer)
    return KINDS[kind].geometry(layer) if kind else None


def _factors(state_dict: Mapping[str, Any], prefix: str) -> tuple[str, list[torch.Size]] | None:
    """Method and factor shapes stored under a layer's name, or None where it is dense or absent."""
    found = {}
    for key, value in state_dict.items():
        match = _FACTOR.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if match and match["method"] in METHODS and isinstance(value, Tensor):
            found[match["method"], int(match["index"])] = value.shape
    if not found:
        return None
    return next(iter(found))[0], [found[key] for key in sorted(found)]


def _shapes(layer: FactorizedLayer) -> list[torch.Size]:
    return [weight_of(factor).shape for factor in layer.factor_layers]


def _rebuild(name: str, layer: nn.Module, geometry: Geometry, method: str, shapes: list[torch.Size]) -> FactorizedLayer:
    dense = layer.to_dense() if isinstance(layer, FactorizedLayer) else layer
    try:
        ranks = METHODS[method].ranks_of(geometry, shapes)
        if min(ranks) < 1 or not METHODS[method].supports(geometry):
            raise ValueError(f"{method} of ranks {ranks}")
        new = factorized(dense, geometry, method, ranks)
    except (IndexError, ValueError, RuntimeError, ZeroDivisionError, TypeError) as error:
        raise CheckpointError(_misfit(name, method, shapes), "Build the architecture that was saved.") from error
    if _shapes(new) != shapes:
        raise CheckpointError(_misfit(name, method, shapes), "Build the architecture that was saved.")
    return new


def _misfit(name: str, method: str, shapes: list[torch.Size]) -> str:
    return f"checkpoint: {method} factors of shapes {[tuple(s) for s in shapes]} do not fit layer {name!r}"


def _read(path: str | Path) -> Any:
    try:
        if Path(path).is_dir():
            return read_folder(Path(path))
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the damaged bytes lead to
        if not Path(path).exists():
            raise CheckpointError(f"checkpoint {str(path)!r} does not exist.", "Check the path.") from None
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that torch could not read.

    Args:
        path: The checkpoint.
        error: That of torch.
    """
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"checkpoint {str(path)!r} cannot be read: {first}",
        "It is truncated, corrupt, or holds more than tensors and primitives.",
    )


def _check_version(checkpoint: Any) -> None:
    """Refuse a checkpoint of a callback of another release: its layers may mean something else there."""
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, Mapping) else None
    if callbacks is None:
        return
    if not isinstance(callbacks, Mapping):
        raise CheckpointError(f"checkpoint: its 'callbacks' is a {type(callbacks).__name__}.", "Use an earlier one.")
    for name, own in callbacks.items():
        ours = isinstance(own, Mapping) and "surgery" in own
        if ours and not (type(own.get("version")) is int and own["version"] == CALLBACK_STATE_VERSION):
            raise CheckpointError(
                f"checkpoint: the state of {name!r} has version {own.get('version')!r}, this release reads "
                f"{CALLBACK_STATE_VERSION}.",
                "Use the release that wrote it, or restore(model, checkpoint['state_dict']).",
            )


def _state_dict(checkpoint: Any) -> Mapping[str, Tensor]:
    _check_version(checkpoint)
    state = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, Mapping) else checkpoint
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise CheckpointError(
            f"checkpoint holds {type(state).__name__}, not a state dict.",
            "Save model.state_dict() or use Lightning's file.",
        )
    wrong = [key for key, value in state.items() if not isinstance(value, Tensor) and not key.endswith("_extra_state")]
    if wrong:
        raise CheckpointError(
            f"checkpoint: entry {wrong[0]!r} is a {type(state[wrong[0]]).__name__}, not a tensor.",
            "Save model.state_dict() or use Lightning's file.",
        )
    if NOTE not in state:
        return state  # not copied: its _metadata tells modules the version they were saved with
    kept = OrderedDict((key, value) for key, value in state.items() if key != NOTE)
    vars(kept).update(vars(state) if hasattr(state, "__dict__") else {})
    return kept


def _way_out(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    starts = {key.partition(".")[0] for key in state}
    if len(starts) == 1 and (start := starts.pop()) not in dict(model.named_children()):
        return f'All entries start with {start!r}: write restore(model, checkpoint, prefix="{start}.").'
    return "Build the architecture that was saved; for a dense checkpoint, merge(model) first."


def _mismatch(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    own = model.state_dict()
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    if missing or unexpected:
        shown = [f"{len(keys)} {what} (first {keys[0]!r})" for keys, what in
                 ((missing, "entries missing"), (unexpected, "entries too many")) if keys]  # fmt: skip
        return ", ".join(shown)
    for key, tensor in own.items():
        if isinstance(tensor, Tensor) and tensor.shape != state[key].shape:
            return f"{key!r} has shape {tuple(state[key].shape)}, the model {tuple(tensor.shape)}"
    return ""
