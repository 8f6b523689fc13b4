"""Precisions by Lightning's names, for a step that is recorded without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.errors import ConfigError

_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Precision:
    """Numerical precision of a step.

    Attributes:
        matmul: Argument of ``torch.set_float32_matmul_precision``; empty keeps the current setting.
        mixed: Dtype of autocast; None without autocast.
        true: Dtype of weights and inputs; None leaves them.
        on: Type of the device that autocast is for.
    """

    matmul: str = ""
    mixed: torch.dtype | None = None
    true: torch.dtype | None = None
    on: str = "cpu"

    @classmethod
    def read(cls, name: str | None, gpu: DeviceModel | None) -> Precision:
        """The precision of a name.

        Args:
            name: One of `PRECISIONS`; None leaves precision to the step.
            gpu: The GPU that the step is for; None is this processor.

        Raises:
            ConfigError: If the name is not known, or the GPU has no such arithmetic.
        """
        if name is None:
            return cls()
        if name not in PRECISIONS:
            raise ConfigError(f"precision {name!r} is not known.", f"Valid names: {', '.join(PRECISIONS)}.")
        found = PRECISIONS[name]
        capability = gpu.compute_capability if gpu is not None else None
        if gpu is not None and capability is not None:
            if torch.bfloat16 in (found.mixed, found.true) and capability < _BF16_CAPABILITY:
                raise ConfigError(f"{gpu.name} does not compute in bf16.", "Write 16-mixed or 32-true.")
            if found.matmul == "high" and not gpu.flops_tf32_per_s:
                raise ConfigError(f"{gpu.name} has no TF32.", "Write 16-mixed or 32-true.")
        return cls(found.matmul, found.mixed, found.true, "cpu" if gpu is None else "cuda")

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Dtype of a weight or an input."""
        return self.true if self.true is not None and tensor.is_floating_point() else tensor.dtype

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Apply the settings for forward and backward, and restore the old ones."""
        before = torch.get_float32_matmul_precision()
        try:
            if self.matmul:
                torch.set_float32_matmul_precision(self.matmul)
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def run(self, step: Callable[[Any, Any], Tensor], module: Any, inputs: Any) -> Tensor:
        """The forward, under autocast or with the default dtype, as Lightning's plugins run it."""
        default = torch.get_default_dtype()
        autocast = torch.autocast(self.on, self.mixed) if self.mixed is not None else nullcontext()
        try:
            torch.set_default_dtype(self.true or default)
            with autocast:
                return step(module, inputs)
        finally:
            torch.set_default_dtype(default)


PRECISIONS = {
    "32-true": Precision(matmul="highest"),
    "tf32": Precision(matmul="high"),
    "bf16-mixed": Precision(mixed=torch.bfloat16),
    "16-mixed": Precision(mixed=torch.float16),
    "bf16-true": Precision(true=torch.bfloat16),
}
