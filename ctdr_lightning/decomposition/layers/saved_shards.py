"""Distributed checkpoints: folders to which every process wrote its own shards (``torch.distributed.checkpoint``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Lightning's names in such a folder: the file of everything that is no weight, and what entries of weights begin with.
_REST = "meta.pt"
_WEIGHTS = "state_dict"


def read_rest(folder: Path) -> dict[str, Any]:
    """A checkpoint's entries but for weights and the optimizers' state; empty where a folder has weights alone.

    Args:
        folder: Written by Lightning's ``ModelParallelStrategy``, or by ``torch.distributed.checkpoint.save``.
    """
    file = folder / _REST
    found = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    return found if isinstance(found, dict) else {}


def read_folder(folder: Path) -> dict[str, Any]:
    """A whole checkpoint but for the optimizers' state, put together in this process.

    Args:
        folder: As of `read_rest`.

    Returns:
        The entries of a Lightning checkpoint: ``state_dict``, and the others as they were saved.
    """
    from torch.distributed import checkpoint  # 0.5 s, which no other import of this package needs

    state = {_WEIGHTS: {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in _entries(folder).items()}}
    checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True)
    return {**read_rest(folder), **state}


def saved_shapes(path: Path) -> dict[str, torch.Size]:
    """Shapes of the tensors in the model's part of a checkpoint, which is a folder of shards or one file."""
    if path.is_dir():
        return {name: entry.size for name, entry in _entries(path).items()}
    weights = torch.load(path, map_location="meta", weights_only=True)[_WEIGHTS]
    return {name: tensor.shape for name, tensor in weights.items()}


def _entries(folder: Path) -> dict[str, Any]:
    """Sizes and types of the model's tensors by name."""
    from torch.distributed import checkpoint

    return {
        name.removeprefix(f"{_WEIGHTS}."): entry
        for name, entry in checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if name.startswith(f"{_WEIGHTS}.") and isinstance(entry, checkpoint.TensorStorageMetadata)
    }
