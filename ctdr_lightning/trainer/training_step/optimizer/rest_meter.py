"""Measures the optimizer's step, and all else that follows a backward, with the memory that kernels take in a call.

A plan knows the workspaces of forward and backward from the recording. Nothing is recorded of an optimizer: GaLore's
decomposition has a workspace, and bitsandbytes' 8-bit Adam is on a processor one call that allocates ten times as much.
"""

from __future__ import annotations

from typing import Any

from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.recorder.workspace import WatchingClock
from ctdr_lightning.memory.values.live_bytes import LiveBytes, PeakMeter


class RestMeter(PeakMeter):
    """Goes on with the count of a batch, and on a processor adds the workspace of each call.

    A GPU's allocator knows the peak of a batch by itself, and a profiler around each kernel's launch would cost time.

    Args:
        live: The count so far.
        watches: Whether all tensors are on a processor.

    Attributes:
        peak_bytes: The largest count with the workspace of a call; `live` counts tensors alone.
        workspace_bytes: The largest workspace.
    """

    def __init__(self, live: LiveBytes, *, watches: bool) -> None:
        super().__init__()
        self.live, self._clock = live, WatchingClock() if watches else None
        self.peak_bytes = self.workspace_bytes = self._inside_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a step that compiles itself do so, as torchao's do: under any other mode torch refuses."""
        return True

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call under watch."""
        if self._clock is None:
            return super().call(func, args, kwargs)
        out, _, self._inside_bytes = self._clock.run(func, args, kwargs)
        return out

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._inside_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live.now + self._inside_bytes)
            self.workspace_bytes, self._inside_bytes = max(self.workspace_bytes, self._inside_bytes), 0
        return out
