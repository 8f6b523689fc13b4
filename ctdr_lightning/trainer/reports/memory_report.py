"""What is said of a run's memory: peaks measured and predicted, events, the plan in words and as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ctdr_lightning.basics.units import GIB
from ctdr_lightning.memory import Plan, simulate
from ctdr_lightning.memory.simulator.transfers import Transfers
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.device import device_peaks
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage


class MemoryReport:
    """Reads the numbers and texts off a run's memory stage.

    Args:
        memory: Plans the steps.
    """

    def __init__(self, memory: MemoryStage) -> None:
        self._memory = memory
        self._logged_events = 0

    def peaks(self, trainer: Any, measured: BatchMeter | None) -> dict[str, float]:
        """The true peak of the last interval, in GiB: from the allocator on a GPU, from counted storages elsewhere.

        Args:
            trainer: In training.
            measured: The last batch that was measured; None where none was.
        """
        device = trainer.strategy.root_device
        if device.type == "cuda":
            return device_peaks(device)
        return {"ctdr/peak_memory_gib": measured.peak_bytes / GIB} if measured is not None else {}

    def predicted(self) -> dict[str, float]:
        """What the last plan predicts; the same names on every rank, whose loggers wait for each other."""
        if self._memory.session is None:
            return {}
        shown = self._memory.last_plan
        peak_bytes, recompute_s = (shown.peak_bytes, shown.recompute_seconds) if shown is not None else (0, 0.0)
        found = {
            "ctdr/predicted_peak_gib": max(peak_bytes, self._memory.rest_peak_bytes) / GIB,
            "ctdr/recompute_s": recompute_s,
        }
        return found | self._transfers(shown) if self._memory.offloads else found

    def largest_predicted_bytes(self) -> int:
        """The largest peak that the plans of the run's kinds of steps predict; 0 where nothing is planned."""
        plans = self._memory.session.plans if self._memory.session is not None else ()
        return max((self._memory.rest_peak_bytes, *(plan.peak_bytes for plan in plans))) if plans else 0

    @staticmethod
    def _transfers(shown: Plan | None) -> dict[str, float]:
        """What the last plan predicts of transfers: bytes that leave the device in a step, and the waits for them."""
        transfers = shown.timeline.transfers if shown is not None else Transfers()
        return {"ctdr/moved_gib": transfers.moved_bytes / GIB, "ctdr/transfer_wait_s": transfers.waits_s}

    def new_events(self) -> list[str]:
        """What the session did since the last call, in words."""
        events = self._memory.session.events if self._memory.session is not None else []
        new, self._logged_events = events[self._logged_events :], len(events)
        return new

    def explain(self) -> str:
        """The last plan in words."""
        found = self._memory.session.plan if self._memory.session is not None else None
        return found.explain() if found is not None else "No plan yet."

    def picture(self) -> Any:
        """Memory over the planned step beside the plain one, a matplotlib figure; None without matplotlib or a plan."""
        session = self._memory.session
        if session is None or session.plan is None or find_spec("matplotlib") is None:
            return None
        from matplotlib.figure import Figure

        # TensorBoard shows pictures 350 pixels wide and leaves out pixels: a wider one would lose its lines.
        figure = Figure(figsize=(5.6, 3), dpi=160, layout="constrained")
        axes = simulate(session.plan.trace).plot(figure.subplots(), label="everything kept")
        axes.lines[0].set(color="0.7", linewidth=3)  # seen behind a plan that drops nothing, too
        session.plan.timeline.plot(axes, label=f"plan ({session.plan.policy})")
        return figure
