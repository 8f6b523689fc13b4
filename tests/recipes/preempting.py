"""A callback for runs in other processes: the first job of a sweep that comes so far is preempted, once."""

import os
import subprocess
from pathlib import Path

from lightning import Callback


class PreemptOnce(Callback):
    """Has the played SLURM signal this job at one step, unless another was signalled before.

    Args:
        marker: A file that is made when it has.
        step: The step before which it happens.
        signal_name: The signal.
    """

    def __init__(self, marker, step, signal_name):
        self.marker, self.step, self.signal_name = Path(marker), step, signal_name

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step and "PLAYED_JOB" in os.environ and not self.marker.exists():
            self.marker.write_text(os.environ["PLAYED_JOB"])
            subprocess.run(["scancel", os.environ["PLAYED_JOB"], "--signal", self.signal_name], check=True)
