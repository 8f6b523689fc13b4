"""Files are complete or absent: everything this package writes goes through here."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ctdr_lightning.basics.errors import CheckpointError

BYTE_ORDER_MARK = "\ufeff"


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically: to a temporary file in the same folder, which then replaces the target."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically: to a temporary file in the same folder, which then replaces the target."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_text(path: str | Path) -> str:
    """Read a text file, without the byte order mark that some editors write before the text.

    Raises:
        CheckpointError: If the file is missing or is no text.
    """
    try:
        return Path(path).read_text().removeprefix(BYTE_ORDER_MARK)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"Cannot read {str(path)!r}: {error}.", "Check the path.") from error
