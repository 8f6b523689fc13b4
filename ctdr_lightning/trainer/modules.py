"""Facts about LightningModules of either package, ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ctdr_lightning.basics.errors import CheckpointError, ConfigError, CTDRError, first_line
from ctdr_lightning.decomposition.layers.saved_shards import read_folder
from ctdr_lightning.trainer.structure import match_structure

M = TypeVar("M")
_BASES = ("lightning.", "pytorch_lightning.", "ctdr_lightning.")
# Tensors up to this size are copied before each step, to be put back where it fails: BatchNorm's statistics, counters
# and metrics are below; to copy 2**16 elements takes about as long as to launch it.
SMALL_ELEMENTS = 2**16
# In torch's errors where a step that runs without a graph asks for a gradient itself, as gradient penalties do.
NEEDS_GRAPH = "does not require grad"


def overrides(module: object, name: str) -> bool:
    """Whether the user's class defines a hook, rather than Lightning's base classes or ours alone."""
    owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    return owner is not None and not owner.__module__.startswith(_BASES)


def has_compiled_step(module: object) -> bool:
    """Whether ``torch.compile`` was called on the whole LightningModule, its step included."""
    return hasattr(vars(module).get("training_step"), "_torchdynamo_orig_callable")


def compiled_anew(step: Any, backend: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled step, compiled by another backend.

    Args:
        step: It has been through ``torch.compile``.
        backend: As ``torch.compile`` takes it.
    """
    return torch.compile(step._torchdynamo_orig_callable, backend=backend)


def load_from_checkpoint(kind: type[M], path: Any, **options: Any) -> M:
    """``kind.load_from_checkpoint`` for a checkpoint of a decomposed model.

    Args:
        kind: A LightningModule class that builds the dense model.
        path: The checkpoint: a file, or the folder of a run that was sharded.
        options: As for ``LightningModule.load_from_checkpoint``; hyperparameters included.

    Returns:
        The module, its layers factorized as they are in the checkpoint.

    Raises:
        ConfigError: If ``kind`` is not a LightningModule class.
        CheckpointError: If the checkpoint cannot be read or does not fit the module.

    Example:
        ``model = load_from_checkpoint(MyModule, "last.ckpt")``
    """

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        match_structure(self, checkpoint["state_dict"])
        kind.on_load_checkpoint(self, checkpoint)  # type: ignore[attr-defined]

    if not hasattr(kind, "load_from_checkpoint"):
        raise ConfigError(f"{kind!r} is not a LightningModule class.", "For a plain module: restore(model, path).")
    own: Any = type(kind.__name__, (kind,), {"on_load_checkpoint": on_load_checkpoint})
    try:
        source = _as_file(path) if Path(path).is_dir() else path
        module = own.load_from_checkpoint(source, **{"weights_only": True, **options})
    except CTDRError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {str(path)!r} does not exist.", "Check the path.") from error
    except Exception as error:  # damaged bytes and somebody else's constructor may raise anything
        problem = f"checkpoint {str(path)!r} does not fit {kind.__name__}: {first_line(error)}."
        raise CheckpointError(problem, "Give the hyperparameters that the run had, as keywords.") from error
    module.__class__ = kind
    return module


def _as_file(folder: str | Path) -> io.BytesIO:
    """A distributed checkpoint as the one file that Lightning reads."""
    file = io.BytesIO()
    torch.save(read_folder(Path(folder)), file)
    file.seek(0)
    return file
