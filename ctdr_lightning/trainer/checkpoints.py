"""Checkpoints that are complete or absent, read as tensors and primitives only, and refused with a reason."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from ctdr_lightning.basics import files
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.decomposition.layers.from_checkpoint import NOTE, unreadable
from ctdr_lightning.decomposition.layers.saved_shards import read_folder, read_rest
from ctdr_lightning.trainer.strategies import is_sharded


class CompleteFileIO(TorchCheckpointIO):
    """Writes checkpoints atomically: to a temporary file in the same folder, which then replaces the target.

    Lightning writes to the system's temporary folder and moves from there; on another file system the move
    is a copy, and a process killed during it leaves half a file under the final name.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save to a local path completely or not at all; other paths as Lightning does.

        Args:
            checkpoint: The checkpoint's contents.
            path: Its target.
            storage_options: Not supported, as in Lightning.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        files.write_bytes(path, buffer.getvalue())

    @override
    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Load a checkpoint, of a folder its shards put together; the error for an unreadable file gives the reason.

        Raises:
            CheckpointError: If it is truncated, corrupt, or holds more than tensors and primitives.
        """
        try:
            found = self._load(path, map_location, weights_only is not False)
        except FileNotFoundError as error:
            raise CheckpointError(f"checkpoint {str(path)!r} does not exist.", "Check the path.") from error
        except Exception as error:  # torch.load raises whatever the damaged bytes lead to
            raise unreadable(path, error) from error
        for name in ("callbacks", "state_dict"):  # Lightning looks into these before any callback is asked
            if not isinstance(found, Mapping) or not isinstance(found.get(name, {}), Mapping):
                kind = type(found[name] if isinstance(found, Mapping) else found).__name__
                raise CheckpointError(
                    f"checkpoint {str(path)!r} is damaged: its {name!r} is a {kind}, no mapping.", "Use an earlier one."
                )
        return found

    def _load(self, path: str | Path, map_location: Any, weights_only: bool) -> Any:
        if _is_local(path) and Path(path).is_dir():
            return read_folder(Path(path))
        return super().load_checkpoint(path, map_location, weights_only=weights_only)


def read_entries(path: str | Path) -> Any:
    """Read the entries of a checkpoint that are no weights, and these too where they are in the same file.

    Args:
        path: A file, or the folder of a distributed checkpoint.

    Raises:
        CheckpointError: As `CompleteFileIO.load_checkpoint` does.
    """
    if not Path(path).is_dir():
        return CompleteFileIO().load_checkpoint(path)
    try:
        return read_rest(Path(path))
    except Exception as error:  # torch.load raises whatever the damaged bytes lead to
        raise unreadable(path, error) from error


def _is_local(path: str | Path) -> bool:
    return urlparse(str(path)).scheme in ("", "file") and "://" not in str(path)


def write_complete_files(strategy: Any) -> None:
    """Give a strategy `CompleteFileIO` where it has Lightning's own; a user's plugin stays."""
    if type(getattr(strategy, "checkpoint_io", None)).__name__ == "TorchCheckpointIO":
        strategy.checkpoint_io = CompleteFileIO()


def leave_note(checkpoint: dict[str, Any], strategy: Any) -> None:
    """Add an entry whose name tells how to load a factorized model, where a plain load would only list its keys.

    Args:
        checkpoint: About to be saved; changed in place.
        strategy: The trainer's; shards of a model take no further entry.
    """
    if checkpoint.get("state_dict") and not is_sharded(strategy):
        checkpoint["state_dict"][NOTE] = torch.empty(0)
