"""Distributed checkpoints: folders to which every process wrote its own shards (``torch.distributed.checkpoint``).

The names and shapes in such a folder are in a file that torch reads with Python's own serialization, which runs
whatever a file names. So the names in the file are looked at first, and any that no checkpoint needs is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Lightning's names in such a folder: the file of everything that is no weight, and what entries of weights begin with.
_REST = "meta.pt"
_WEIGHTS = "state_dict"
_INDEX = ".metadata"
_RECORDS = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_HARMLESS = {
    "torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _RECORDS),
}  # fmt: skip
# Ops of the file that name something by other means than two words right before it; torch writes no such ops.
_UNREAD = {"GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "PUT", "BINPUT", "LONG_BINPUT"}


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

    _check_names(folder)
    state = {_WEIGHTS: {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in _entries(folder).items()}}
    checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True)
    return {**read_rest(folder), **state}


def saved_shapes(path: Path) -> dict[str, torch.Size]:
    """Shapes of the tensors in the model's part of a checkpoint, which is a folder of shards or one file."""
    if path.is_dir():
        _check_names(path)
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


def _check_names(folder: Path) -> None:
    """Refuse an index that names anything but shapes, types and places.

    Raises:
        ValueError: With the first such name.
    """
    index = (folder / _INDEX).read_bytes()
    strange = next((name for name in _named(index) if not _is_harmless(name)), None)
    if strange is not None:
        raise ValueError(f"its index names {strange!r}")


def _named(index: bytes) -> Iterator[str]:
    """Everything outside of itself that an index names, without running any of it."""
    memo: list[str | None] = []
    words: list[str | None] = [None, None]  # the last two things put on the stack, None for no word
    for op, argument, _ in pickletools.genops(index):
        if op.name == "MEMOIZE":
            memo.append(words[1])
            continue
        if op.name in _UNREAD:
            yield op.name
        if op.name == "STACK_GLOBAL":
            yield f"{words[0]}.{words[1]}"
        word = str(argument) if "UNICODE" in op.name else None
        words = [words[1], memo[int(argument or 0)] if op.name in ("BINGET", "LONG_BINGET") else word]


def _is_harmless(name: str) -> bool:
    module, _, word = name.rpartition(".")
    return name in _HARMLESS or (module == "torch" and isinstance(getattr(torch, word, None), torch.dtype))
