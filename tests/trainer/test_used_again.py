"""One callback and several fits, models and Trainers; copies and pickles of it; the end of a model."""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
from lightning.pytorch import Callback

from ctdr_lightning import CTDRCallback, Ranks, Recovery, decompose, merge
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.recovery import Distillation, Phase
from ctdr_lightning.trainer.groups import grouped
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
    return CTDRCallback(**grouped({"rank": 0.5, "verbose": False, **KINDS[kind]}))


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


def cut_model(stopped_at=None):
    """A model that another callback has cut, trained to its end or interrupted."""

    class Stops(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == stopped_at:
                raise KeyboardInterrupt

    module = parts.blobs()
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        parts.fit(module, CTDRCallback(rank=0.25, policy="keep", verbose=False), Stops(), max_epochs=1)
    assert factorized_names(module)
    return module


def layers_of(module):
    return {name: (layer.method, layer.ranks) for name, layer in walk(module) if hasattr(layer, "ranks")}


SERVED = {
    "rank": {"rank": 0.25, "policy": "sqrt"},
    "another rank": {"rank": 0.1, "method": "svd", "policy": "sqrt"},
    "auto": {"rank": "auto", "memory_budget": "1MiB"},
    "recovery": {"rank": 0.25, "policy": "sqrt", "recovery": Recovery(batchnorm_batches=2)},
    "staged": {
        "rank": 0.5,
        "policy": "sqrt",
        "recovery": Recovery(cut_epochs=[1, 2], phases=[Phase(1)], batchnorm_batches=2),
    },
    "budget": {"memory_budget": "1MiB"},
}


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("stopped_at", [None, 2])
def test_a_new_callback_serves_a_model_that_is_cut_already(tmp_path, kind, stopped_at):
    module = cut_model(stopped_at)
    layers, n_before = layers_of(module), sum(p.numel() for p in parts.blobs().parameters())
    callback = CTDRCallback(verbose=False, **grouped(SERVED[kind]))
    with pytest.warns(UserWarning, match=r"layers are cut already .*ctdr_lightning\.merge\(model\)") as caught:
        trainer = parts.fit(module, callback, max_epochs=2)
    said = next(str(w.message) for w in caught if "cut already" in str(w.message))
    assert ("ignored of this run: rank=" in said) == (kind not in ("auto", "budget"))
    assert layers_of(module) == layers
    assert callback.run.surgeon.parameters_before == n_before
    assert callback.run.memory.session.plan.policy == SERVED[kind].get("policy", "auto")
    if callback.run.coach is not None:
        assert callback.run.coach.progress.estimated_epoch == 1, "recovery runs"
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = parts.blobs()
    parts.fit(
        again, CTDRCallback(verbose=False, **grouped(SERVED[kind])), max_epochs=3, ckpt_path=tmp_path / "end.ckpt"
    )
    assert layers_of(again) == layers


@pytest.mark.parametrize("options", [{"distill": Distillation(module="net")}, {"reference": "measure"}])
def test_recovery_that_needs_the_dense_model_is_refused_where_it_is_gone(options):
    recovery = Recovery(monitor="val_acc", **options)
    with pytest.raises(ConfigError, match=f"{next(iter(options))} needs the dense model") as caught:
        parts.fit(cut_model(), CTDRCallback(rank=0.25, recovery=recovery, verbose=False))
    assert "merge(model)" in caught.value.hint


def test_after_a_merge_the_layers_are_cut_anew():
    module = merge(cut_model())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cut already.*")
        parts.fit(module, CTDRCallback(rank=0.5, policy="keep", verbose=False), max_epochs=1)
    assert factorized_names(module)


def test_the_layers_of_its_own_choices_are_served_as_well():
    first = CTDRCallback(rank=0.25, policy="keep", verbose=False)
    module = trained(first)
    choices, layers = first.run.surgeon.choices, layers_of(module)
    with pytest.warns(UserWarning, match="cut already"):
        parts.fit(module, CTDRCallback(ranks=Ranks(choices=choices), policy="keep", verbose=False), max_epochs=1)
    assert layers_of(module) == layers


def test_a_layer_that_was_cut_by_hand_belongs_to_the_run_that_cuts_others(tmp_path):
    def run(**options):
        module = parts.blobs()
        decompose(module, rank=0.25, select="net.3", progress=False)
        callback = CTDRCallback(rank=0.5, select="net.7", policy="keep", verbose=False)
        return module, parts.fit(module, callback, **options)

    module, trainer = run(max_epochs=1)
    assert factorized_names(module) == {"net.3", "net.7"}
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = run(ckpt_path=tmp_path / "one.ckpt")[0]
    assert layers_of(resumed) == layers_of(module)
