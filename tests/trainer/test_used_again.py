"""One callback and several fits, models and Trainers; copies and pickles of it; the end of a model."""

import copy
import gc
import pickle
import weakref

import pytest

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Distillation, Phase
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts

STAGED = Recovery(
    cut_epochs=[0, 1], phases=[Phase(1, "factors")], distill=Distillation(module="net"), monitor="val_acc",
    reference="measure", max_drop=1.0, batchnorm_batches=2, stop_when_recovered=False,
)  # fmt: skip
KINDS = {
    "rank": {"policy": "keep"},
    "plan": {"rank": None, "policy": "sqrt"},
    "stages": {"policy": "keep", "recovery": STAGED},
    "one cut": {"policy": "keep", "recovery": Recovery(batchnorm_batches=2)},
}


def ours(kind):
    return CTDRCallback(**{"rank": 0.5, "verbose": False, **KINDS[kind]})


def trained(callback, seed=0):
    module = parts.blobs(seed=seed)
    parts.fit(module, callback)
    return module


WAYS = {
    "the same": lambda callback: callback,
    "a copy": copy.deepcopy,
    "a shallow copy": copy.copy,
    "a pickle": lambda callback: pickle.loads(pickle.dumps(callback)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_callback_that_was_used_serves_a_second_model_as_a_new_one_would(kind, way):
    first = ours(kind)
    trained(first, seed=3)
    again, fresh = trained(WAYS[way](first)), trained(ours(kind))
    assert bool(factorized_names(again)) == (kind != "plan")
    assert parts.same(again.state_dict(), fresh.state_dict())


def test_the_first_model_stays_as_it_was_when_the_callback_serves_a_second():
    callback = ours("stages")
    first = trained(callback)
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    trained(callback, seed=4)
    assert parts.same(before, first.state_dict())
    assert not first._load_state_dict_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_and_the_trainer_end_with_their_last_user(kind):
    callback, module = ours(kind), parts.blobs()
    trainer = parts.fit(module, callback)
    held = [weakref.ref(thing) for thing in (module, trainer, *module.modules(), *module.parameters())]
    del module, trainer
    gc.collect()
    assert [thing() for thing in held if thing() is not None] == []


def test_the_same_model_under_another_trainer_goes_on_and_its_schedule_begins_again():
    callback, module = ours("stages"), parts.blobs()
    parts.fit(module, callback, max_epochs=1)
    some = factorized_names(module)
    assert callback.run.coach.progress.stage == 1
    parts.fit(module, callback, max_epochs=3)
    assert some < factorized_names(module)
    assert callback.run.coach.progress.stage == 2
    assert callback.run.coach.progress.entered_epoch == 2


def test_the_same_trainer_goes_on_where_it_stopped():
    def run(*epochs):
        callback, module = ours("stages"), parts.blobs()
        trainer = parts.quiet_trainer(callback, max_epochs=epochs[0])
        for last in epochs:
            trainer.fit_loop.max_epochs = last
            trainer.fit(module, *parts.loaders())
        return callback.run.coach.progress.to_dict(), factorized_names(module)

    assert run(1, 3) == run(3)


def test_a_subclass_keeps_what_it_added_when_it_is_copied():
    class Named(CTDRCallback):
        def __init__(self, name, **options):
            super().__init__(**options)
            self._name = name

    callback = Named("mine", rank=0.5, policy="keep", verbose=False)
    trained(callback)
    assert copy.deepcopy(callback)._name == "mine"
