"""State of a run in a checkpoint: one record, written and read in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctdr_lightning.basics.documents import CALLBACK_STATE_VERSION as VERSION
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.trainer.surgeon import Surgery


@dataclass(frozen=True)
class RunState:
    """The callback's entry in a checkpoint.

    Attributes:
        options: The callback's arguments, as primitives.
        surgery: The decomposition.
        stepped: Batches after which an optimizer stepped, as Lightning's loggers count them.
        recovery: Progress of the recovery, in primitives and tensors; None without recovery. The coach reads it.
        random: Every rank's random state; None if the checkpoint holds none.

    Example:
        >>> state = RunState({"rank": 0.5}, Surgery(None, [], 0), stepped=3)
        >>> RunState.from_dict(state.to_dict()) == state
        True
    """

    options: Mapping[str, Any]
    surgery: Surgery
    stepped: int = 0
    recovery: Any = None
    random: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Primitives and tensors, with the format's version; fields that are None are left out."""
        state = {
            "version": VERSION,
            "options": dict(self.options),
            "surgery": self.surgery.to_dict(),
            "stepped": self.stepped,
            "recovery": self.recovery,
            "random": self.random,
        }
        return {name: value for name, value in state.items() if value is not None}

    @classmethod
    def from_dict(cls, state: Any) -> RunState:
        """Read the output of `to_dict`.

        Raises:
            CheckpointError: If there is no such state, when it is of another version, or when it is damaged.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                "The checkpoint was written without CTDRCallback: it holds a dense model or another run.",
                "To start from dense weights, load them with model.load_state_dict and call fit without ckpt_path.",
            )
        if state.get("version") != VERSION:
            raise CheckpointError(
                f"The checkpoint's CTDR state has version {state.get('version')!r}, this release reads {VERSION}.",
                "Use the release that wrote it.",
            )
        options, stepped = state.get("options"), state.get("stepped")
        for name, value, kind in (("options", options, Mapping), ("stepped", stepped, int)):
            if not isinstance(value, kind):
                raise CheckpointError(
                    f"The checkpoint's CTDR state is damaged: its {name!r} is a {type(value).__name__}.",
                    "Use an earlier checkpoint.",
                )
        if isinstance(stepped, bool) or not isinstance(stepped, int) or stepped < 0:
            raise CheckpointError(
                f"The checkpoint's CTDR state is damaged: its 'stepped' is {stepped!r}.", "Use an earlier checkpoint."
            )
        surgery = Surgery.from_dict(state.get("surgery"))
        return cls(dict(options or {}), surgery, stepped, state.get("recovery"), state.get("random"))

    @classmethod
    def of_checkpoint(cls, checkpoint: Any, key: str) -> RunState:
        """Read the callback's entry of a Lightning checkpoint.

        Args:
            checkpoint: The loaded file.
            key: The callback's ``state_key``.

        Raises:
            CheckpointError: As `from_dict` does.
        """
        callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, Mapping) else None
        return cls.from_dict(callbacks.get(key) if isinstance(callbacks, Mapping) else None)
