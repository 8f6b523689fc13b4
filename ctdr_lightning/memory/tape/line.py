"""A line of a plan's script while a step runs by it."""

from __future__ import annotations

from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.plans.script import ScriptLine
from ctdr_lightning.memory.values.op_traits import traits


class Line:
    """One script line, with the op itself once it was seen.

    Attributes:
        plain: Whether the op needs nothing of the tape.
        shares: Whether it makes no storage: views and writes in place.
        normalises: Whether it is a BatchNorm whose statistics are held, so that it may run again for less.
    """

    __slots__ = (
        "away", "bell", "exposed", "func", "name", "normalises", "plain", "replay", "saves", "sends", "shape", "shares",
        "stays", "tick", "writes",
    )  # fmt: skip

    def __init__(self, line: ScriptLine) -> None:
        self.name, self.shape, self.replay, self.saves = line.op, line.shape, line.replay, line.saves
        self.exposed = line.exposed
        self.stays = [(stay == "awaited", stay == "needed", stay == "kept") for stay in line.stays]
        self.sends, self.tick, self.bell = line.sends, line.tick, line.bell
        self.away = line.marked or bool(line.sends)
        if set(line.stays) == {"awaited"}:  # the values' default
            self.stays = []
        self.func: OpOverload | None = None
        self.plain = self.writes = self.normalises = self.shares = False

    def learn(self, func: OpOverload) -> None:
        """The op behind the name."""
        op = traits(func)
        self.func, self.writes, self.shares = func, bool(op.writes), op.view or bool(op.written)
        self.normalises = op.batch_norm and all(kept for _, _, kept in self.stays[1:])
        self.plain = not self.replay and not self.writes and not self.away
