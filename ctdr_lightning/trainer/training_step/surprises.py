"""Batches that took more than their plan predicted, because their recording was incomplete."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory import Trace
from ctdr_lightning.memory.values.op_traits import COLLECTIVE

# Predictions are within 2 % of measurements in the tests of whole batches; generators' states, which a retry
# copies, take some kilobytes more.
_SHARE, _BYTES = 0.02, 64 * 2**10


class Surprises:
    """Judges measured batches.

    Attributes:
        counted_bytes: Bytes that later plans count in addition to all known ones: they were missing in a plan of a
            fresh recording.
        judged: Whether any batch was.
    """

    def __init__(self) -> None:
        self.counted_bytes = 0
        self.judged = False
        self._n = 0

    def judge(self, taken_bytes: int, predicted_bytes: int, late_bytes: int = 0) -> str:
        """Compare a batch with its prediction.

        Args:
            taken_bytes: Its true peak.
            predicted_bytes: Its plan's prediction.
            late_bytes: Bytes that another thread may have freed late, see `freed_late`.

        Returns:
            The event, in words, if the step is to be recorded again; the user is warned the first time. Empty if the
            batch was as predicted.
        """
        self.judged = True
        missing_bytes = taken_bytes - predicted_bytes
        if missing_bytes - late_bytes <= _SHARE * predicted_bytes + _BYTES:
            return ""
        said = f"the batch took {format_bytes(taken_bytes)}, its plan says {format_bytes(predicted_bytes)}"
        if not self._n:
            rank_zero_warn(f"CTDR: {said}. The step is recorded anew, and planned with the missing bytes; shown once.")
        else:
            self.counted_bytes += missing_bytes
        self._n += 1
        return said


def freed_late(trace: Trace) -> int:
    """Bytes that a step may take beyond its plan because another thread frees them late.

    A process group of gloo's holds the tensors of a collective in a thread of its own, until that thread runs again.

    Args:
        trace: The step.

    Returns:
        The largest tensor of any collective; 0 for a step without one.
    """
    ids = {v for op in trace.ops if op.pin == COLLECTIVE for v in (*op.inputs, *op.outputs) if v >= 0}
    return max((trace.storages[trace.values[v].storage].n_bytes for v in ids), default=0)
