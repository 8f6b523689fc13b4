"""The optimizers' state elsewhere or in 8 bits, for as long as a Trainer trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.holders import HolderOptions, Holders
from ctdr_lightning.memory.holders.eight_bits import EightBits
from ctdr_lightning.memory.holders.optimizer_state import StateAway, state_away_of
from ctdr_lightning.trainer.groups import IN_8_BITS
from ctdr_lightning.trainer.training_step.optimizer.resident import kept_in


class OptimizerStates:
    """Puts the state of a Trainer's optimizers elsewhere and brings it back.

    Args:
        to: Name of the holder, or ``"8bit"``; None leaves the optimizers alone.
        folder: Where the disk's file is; None takes the system's folder for temporary files.
    """

    def __init__(self, to: str | None, folder: str | Path | None) -> None:
        self._to = to
        self._folder = None if folder is None else Path(folder)
        self._holders: Holders | None = None
        self._away: list[StateAway] = []

    def attach(self, trainer: Any) -> None:
        """Put away the state of every optimizer of which it is not yet.

        Raises:
            ConfigError: If the host is asked for and the steps run in host memory, or an optimizer is not known to
                update its parameters one by one, or FSDP keeps it in host memory; when 8 bits are asked for and
                bitsandbytes cannot be imported.
        """
        if self._to is None:
            return
        device = trainer.strategy.root_device.type
        if self._to == "host" and device != "cuda":
            raise ConfigError(
                f"optimizer_state='host': the steps run on {device!r}, whose memory is the host's.",
                "Write optimizer_state='disk'.",
            )
        for optimizer in trainer.optimizers:
            found = kept_in(optimizer, other_than=device)
            if found:
                raise ConfigError(
                    f"FSDP's CPUOffloadPolicy keeps the optimizer's state on {found!r}; the steps run on {device!r}.",
                    "Leave CPUOffloadPolicy out, or optimizer_state.",
                )
        self._holders = self._holders or Holders(HolderOptions(self._folder, None, device))
        for optimizer in trainer.optimizers:
            if state_away_of(optimizer) is None:
                holder = EightBits() if self._to == IN_8_BITS else self._holders[self._to]
                self._away.append(StateAway(optimizer, holder))

    @property
    def moved_bytes(self) -> int:
        """Bytes of the state that wait elsewhere."""
        return sum(away.moved_bytes for away in self._away)

    def release(self, *, over: bool = False) -> None:
        """Bring everything back, and restore the optimizers.

        Args:
            over: Whether training is over: the state then goes to host memory, because it may not fit the device
                together with the gradients.
        """
        while self._away:
            self._away.pop().release(torch.device("cpu") if over else None)
        if self._holders is not None:
            self._holders.close()
        self._holders = None
