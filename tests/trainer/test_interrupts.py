"""Ctrl-C in the middle of a cut: the cut is whole or absent, in memory and on disk."""

import pytest
from lightning.pytorch import Callback

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.fit_run import FitRun
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts
from tests.interrupts import counting

N_EPOCHS = 4
N_POINTS = 6
STAGED = Recovery(cut_epochs=[0, 2], phases=[Phase(1, "factors", lr_scale=0.5)], batchnorm_batches=2)
ROLLED_BACK = Recovery(
    cut_epochs=[0, 1, 2], phases=[Phase(1)], monitor="val_acc", reference=2.0, max_drop=0.01, batchnorm_batches=2
)
MEASURED = Recovery(phases=[Phase(1)], monitor="val_acc", reference="measure", distill={"module": "net"})
AT_ONCE = Recovery(phases=[Phase(1)], batchnorm_batches=2)
NO_PHASES = Recovery(layers_per_stage=2, phases=[], batchnorm_batches=0)


class SavesOnException(Callback):
    """Writes a checkpoint when the run ends by an exception."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


def ours(recovery):
    # data=None: a cut that a resumed run makes up for has the weights' factors alone; the one in setup is refitted
    return CTDRCallback(rank=0.5, policy="keep", data=None, recovery=recovery, verbose=False)


def check_whole(callback, module, trainer):
    """What is cut is what the progress says, and the optimizer holds the model's own parameters."""
    stages = callback.run.surgeon.stages[: callback.run.coach.progress.stage]
    assert factorized_names(module) == {name for names in stages for name in names}
    owned = [id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    assert not owned or sorted(owned) == sorted(id(p) for p in module.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())


def undisturbed(recovery):
    module, callback = parts.blobs(), ours(recovery)
    trainer = parts.fit(module, callback, max_epochs=N_EPOCHS)
    return module.state_dict(), callback.run.coach.progress, trainer


def interrupted(recovery, functions, at, *callbacks):
    """A run that is interrupted at the n-th line of some functions; returns its callback, module and trainer."""
    module, callback = parts.blobs(), ours(recovery)
    trainer = parts.quiet_trainer(callback, *callbacks, max_epochs=N_EPOCHS)
    with counting(*functions, at=at) as counter, pytest.raises(SystemExit):
        trainer.fit(module, *parts.loaders())
    assert counter.count >= at
    return callback, module, trainer


def n_lines(recovery, functions):
    with counting(*functions) as counter:
        undisturbed(recovery)
    return counter.count


CASES = {
    "the cuts of a staged run": (STAGED, (Coach.epoch_start,)),
    "a rollback": (ROLLED_BACK, (Coach.epoch_start,)),
    "the cut in setup": (AT_ONCE, (FitRun.cut,)),
    "cuts without phases": (NO_PHASES, (Coach.epoch_start,)),
    "the measurement of the dense model": (MEASURED, (FitRun.cut, Coach.train_start)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cut_is_whole_or_absent_wherever_it_is_interrupted(tmp_path, case):
    recovery, functions = CASES[case]
    weights, progress, _ = undisturbed(recovery)
    lines = n_lines(recovery, functions)
    assert lines > 2 * N_POINTS
    for point in range(N_POINTS):
        at = 1 + (2 * point + 1) * lines // (2 * N_POINTS)
        path = tmp_path / f"{point}.ckpt"
        callback, module, trainer = interrupted(recovery, functions, at, SavesOnException(path))
        check_whole(callback, module, trainer)
        again, later = parts.blobs(), ours(recovery)
        parts.fit(again, later, max_epochs=N_EPOCHS, ckpt_path=path)
        assert later.run.coach.progress == progress, at
        assert parts.same(again.state_dict(), weights), at
