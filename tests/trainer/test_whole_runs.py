"""Whole runs under a budget: every way to use a Trainer keeps the least one that the errors name, fresh and resumed."""

import pytest
from lightning.pytorch import Callback

from ctdr_lightning import CTDRCallback, Memory
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from tests import parts
from tests.in_turn import in_turn
from tests.trainer.true_peaks import Peaks, named
from tests.trainer.ways import WAYS, build, train

# One of each kind of module, data, precision and callback; the slow tests have every second one of the others.
OFTEN = (
    "single device", "bf16-mixed", "accumulation", "manual optimization, two optimizers",
    "a closure called several times (LBFGS)", "iterable data", "a smaller last batch", "a step that returns None",
    "hooks that read gradients", "own activation checkpointing", "StochasticWeightAveraging",
)  # fmt: skip
# Lightning's own resumed run is not the undisturbed one: it reads 64-bit weights into 32-bit ones, stops later where
# EarlyStopping stopped, and saves pruned weights without their masks. After fast_dev_run nothing is left to do.
NOT_RESUMED = ("64-true", "EarlyStopping", "min_epochs", "ModelPruning", "fast_dev_run")


def ways():
    rest = [name for name in WAYS if name not in OFTEN]
    return [*OFTEN, *in_turn(rest, pytest.mark.slow, *[pytest.mark.exhaustive] * 2)]


def budgeted(budget_bytes):
    return CTDRCallback(budget_bytes, rank=None, memory=Memory(over_budget="raise"), verbose=False)


def least_budget(name, folder):
    """The budget with which the run ends, asked for as its errors say; each kind of step may ask for more."""
    budget_bytes = 1024
    while True:
        try:
            train(name, folder, budgeted(budget_bytes))
        except InfeasibleBudgetError as error:
            asked_bytes = named(error)
        else:
            return budget_bytes
        assert asked_bytes > budget_bytes
        budget_bytes = asked_bytes


class Saver(Callback):
    """Saves a checkpoint after the first epoch."""

    def __init__(self, folder):
        self.path = folder / "first.ckpt"

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ways())
def test_the_least_budget_that_errors_name_is_kept_fresh_and_resumed(name, tmp_path):
    plain = train(name, tmp_path / "plain")[0]
    budget_bytes = least_budget(name, tmp_path / "asked")
    callback, peaks, saver = budgeted(budget_bytes), Peaks(), Saver(tmp_path)
    module = train(name, tmp_path / "budgeted", callback, peaks, saver)[0]
    assert parts.same(plain.losses, module.losses)
    assert parts.same(plain.state_dict(), module.state_dict())
    assert max(peaks.bytes) <= budget_bytes
    if name in NOT_RESUMED:
        return
    callback, peaks = budgeted(budget_bytes), Peaks()
    module, trainer, data = build(name, tmp_path / "resumed", callback, peaks)
    trainer.fit(module, *data, ckpt_path=saver.path)
    n_left = len(module.losses)
    assert parts.same(plain.losses[-n_left:], module.losses)
    assert parts.same(plain.state_dict(), module.state_dict())
    assert max(peaks.bytes, default=0) <= budget_bytes
