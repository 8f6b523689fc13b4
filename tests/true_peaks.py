"""Bounds of a step's true peak on gloo ranks, by every allocation that torch's profiler saw."""

from itertools import accumulate
from statistics import median_high

from ctdr_lightning.basics.torch_private import profiler_events


class TruePeaks:
    """Bounds in bytes of settled steps: the highest of the lower ones, and the median of the upper ones.

    The profiler does not see all: a release by a thread of gloo's is missed, and a tensor that was made unwatched is
    released with the size of whatever was watched at its address before, in a forked process by the tests before it
    too. The level after a step, against the bytes that stand, shows how much was missed, in either direction.
    """

    def __init__(self):
        self._least, self._most = [], []

    def add(self, profiler, before_bytes, after_bytes):
        """Add a step that ``profiler`` watched, between the bytes of the tensors before and after it."""
        found = [event for event in profiler_events(profiler) if event.name() == "[memory]"]
        # of two events of one time the first recorded came first: a release sorted before would hide a peak
        sizes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
        levels = list(accumulate(sizes, initial=before_bytes))
        missed_bytes = levels[-1] - after_bytes
        self._least.append(max(levels) - max(0, missed_bytes))
        self._most.append(max(levels) - min(0, missed_bytes))

    @property
    def least(self):
        return max(self._least)

    @property
    def most(self):
        return median_high(self._most)
