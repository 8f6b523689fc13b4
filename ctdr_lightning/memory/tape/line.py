"""A line of a plan's script while a step runs by it."""

from __future__ import annotations

from bisect import bisect_right

from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.plans.script import ScriptLine
from ctdr_lightning.memory.values.op_traits import traits


class Line:
    """One script line, with the op itself once it was seen.

    Attributes:
        plain: Whether the op needs nothing of the tape.
        shares: Whether it makes no storage: views and writes in place.
        saves: Whether autograd saves something that is dropped between this op and the next; None if it saves nothing.
        normalises: Whether it is a BatchNorm whose statistics are held, so that it may run again for less.
    """

    __slots__ = (
        "away", "bell", "exposed", "func", "name", "normalises", "plain", "replay", "saves", "sends", "shape", "shares",
        "stays", "tick", "writes",
    )  # fmt: skip

    def __init__(self, line: ScriptLine, saves: bool | None) -> None:
        self.name, self.shape, self.replay, self.saves = line.op, line.shape, line.replay, saves
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


def lines_of(plan: Plan) -> list[Line]:
    """The lines of a plan's script."""
    trace = plan.trace
    ticks = [trace.ops[index].tick for index in trace.forward_ops]
    saving = {bisect_right(ticks, save.packed) - 1 for value in trace.values for save in value.saves}
    return [Line(line, line.saves if place in saving else None) for place, line in enumerate(plan.script)]
