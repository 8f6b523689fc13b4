"""Memory of the host that a GPU reads and writes by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import OffloadError, first_line
from ctdr_lightning.basics.units import format_bytes


def pin(n_bytes: int) -> Tensor:
    """Allocate pinned memory, shape ``(n_bytes,)``.

    Raises:
        OffloadError: If the system has no more of it. CUDA itself says "out of memory", as it does of the device's.
    """
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OffloadError(
            f"{format_bytes(n_bytes)} of host memory could not be pinned: {first_line(error)}.",
            "Raise the limit of locked memory (ulimit -l), offload less to the host, or raise the memory_budget.",
        ) from error
