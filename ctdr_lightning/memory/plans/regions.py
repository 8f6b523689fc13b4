"""The parts of a step in which a plan needs the tape."""

from __future__ import annotations

from collections.abc import Sequence

from ctdr_lightning.memory.plans.script import ScriptLine

HOOK_CALLS_PER_OP = 4  # one dispatched op costs as much as four calls of a module hook (about 9 us and 2 us)


class Regions:
    """The regions of a script: where each begins, and which are busy.

    Attributes:
        first: For each region the index of the first line that is not before it.
        busy: For each region whether the tape must see its ops; saves after an op with a bell end at the next op.
        listens: For each region whether something dropped may be saved in it: before its first op if it is busy, else
            anywhere.
        differs: For each region whether the tape has to do other things in it than in the one before.
        worthwhile: Whether so many ops are in quiet regions that it pays to be told of every module.
        last: The region of the last line.
        n_training: How many of the modules whose forwards begin the regions up to ``last`` are in training mode.
    """

    def __init__(self, script: Sequence[ScriptLine], n_training: int = -1) -> None:
        self.n_training = n_training
        known = all(line.region >= 0 for line in script)
        count = 1 + max((line.region for line in script), default=-1) if known else 0
        self.busy = [False] * count
        self.first = [len(script)] * count
        for index in reversed(range(len(script) if known else 0)):
            line = script[index]
            self.busy[line.region] |= line.busy or (index > 0 and script[index - 1].bell >= 0)
            self.first[line.region] = index
        for region in reversed(range(count - 1)):
            self.first[region] = min(self.first[region], self.first[region + 1])
        self.last = script[-1].region if known and script else 0
        self.listens = self._find_listening(script)
        needs = list(zip(self.busy, self.listens, strict=True))
        self.differs = [place == 0 or needs[place - 1] != need for place, need in enumerate(needs)]
        n_unseen = sum(not self.busy[line.region] for line in script) if known else 0
        self.worthwhile = HOOK_CALLS_PER_OP * n_unseen > count

    def _find_listening(self, script: Sequence[ScriptLine]) -> list[bool]:
        """A save between two ops happens in the region of the first, of the second, or between them."""
        listens = [False] * len(self.busy)
        regions = [line.region for line in script] if listens else []
        for line, region, following in zip(script, regions, [*regions[1:], len(listens) - 1], strict=False):
            for other in range(region, following + 1) if line.saves else ():
                listens[other] |= other > region or not self.busy[other]
        return listens
