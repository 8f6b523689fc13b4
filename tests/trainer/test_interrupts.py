"""Ctrl-C in the middle of a cut: the cut is whole or absent, in memory and on disk."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from ctdr_lightning import CTDRCallback, Ranks, Recovery, decompose
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.fit_run import FitRun
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts
from tests.interrupts import counting, spread

N_EPOCHS = 4
N_POINTS, MANY_POINTS = 2, 60
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
    return CTDRCallback(rank=0.5, policy="keep", ranks=Ranks(data=None), recovery=recovery, verbose=False)


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


def lines_of(recovery, functions):
    with counting(*functions) as counter:
        undisturbed(recovery)
    return counter


CASES = {
    "the cuts of a staged run": (STAGED, (Coach.epoch_start,)),
    "a rollback": (ROLLED_BACK, (Coach.epoch_start,)),
    "the cut in setup": (AT_ONCE, (FitRun.cut,)),
    "cuts without phases": (NO_PHASES, (Coach.epoch_start,)),
    "the measurement of the dense model": (MEASURED, (FitRun.cut, Coach.train_start)),
}


def check_interrupts(folder, case, n_points):
    recovery, functions = CASES[case]
    weights, progress, _ = undisturbed(recovery)
    counter = lines_of(recovery, functions)
    assert counter.count > 2 * n_points
    for at in spread(counter, n_points):
        path = folder / f"{at}.ckpt"
        callback, module, trainer = interrupted(recovery, functions, at, SavesOnException(path))
        check_whole(callback, module, trainer)
        again, later = parts.blobs(), ours(recovery)
        parts.fit(again, later, max_epochs=N_EPOCHS, ckpt_path=path)
        assert later.run.coach.progress == progress, at
        assert parts.same(again.state_dict(), weights), at


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_cut_is_whole_or_absent_wherever_it_is_interrupted(tmp_path, case):
    check_interrupts(tmp_path, case, N_POINTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_cut_is_whole_or_absent_at_many_more_lines(tmp_path, case):
    check_interrupts(tmp_path, case, MANY_POINTS)


def bare(kind):
    """A model, and the arguments of `decompose` for it."""
    torch.manual_seed(0)
    if kind == "attention":
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Linear(16, 4)), {"rank": 0.4}
    data = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 4) for _ in range(2)]
    return parts.Blobs().net, {"rank": 0.5, "data": data if kind == "with data" else None}


def standing(model):
    """Which modules stand where, and the values, modes and hooks of all."""
    modules = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return modules, values, [module.training for module in model.modules()]


def check_bare(kind, n_points):
    whole, options = bare(kind)
    decompose(whole, **options, progress=False)
    again, options = bare(kind)
    with counting(decompose) as counter:  # the second time, when whatever is remembered is known
        decompose(again, **options, progress=False)
    cut = set(factorized_names(whole))
    for at in spread(counter, n_points):
        model, options = bare(kind)
        before = standing(model)
        random = torch.get_rng_state()
        with counting(decompose, at=at), pytest.raises(KeyboardInterrupt):
            decompose(model, **options, progress=False)
        if factorized_names(model):
            assert factorized_names(model) == cut, at
            assert parts.same(model.state_dict(), whole.state_dict()), at
            continue
        assert parts.same(standing(model), before), at
        decompose(model, **options, progress=False)
        assert parts.same(model.state_dict(), whole.state_dict()), at
        assert torch.equal(random, torch.get_rng_state()), at


@pytest.mark.parametrize("kind", ["by weights", "with data", "attention"])
def test_the_bare_function_cuts_all_or_nothing(kind):
    check_bare(kind, 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["by weights", "with data", "attention"])
def test_the_bare_function_cuts_all_or_nothing_at_many_more_lines(kind):
    check_bare(kind, 250)
