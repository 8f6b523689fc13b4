"""Every way to use a Trainer, against the undisturbed plain run: bits, hooks, checkpoints, and the model freed."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from ctdr_lightning import CTDRCallback, Recovery, load_from_checkpoint
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts
from tests.in_turn import in_turn
from tests.trainer.ways import WAYS, build, train

RECOVERY = Recovery(phases=[Phase(1, "factors", lr_scale=0.5), Phase(1)], batchnorm_batches=2)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks")


def planned():
    return CTDRCallback(rank=None, policy="sqrt", verbose=False)


def cut():
    return CTDRCallback(rank=0.5, policy="sqrt", recovery=RECOVERY, verbose=False)


def installed(module):
    """What hangs on a module and its layers: attributes of the instance, and the number of hooks of each kind."""
    names = set(vars(module)) - {"_trainer", "_fabric"}
    return names, {kind: sum(len(getattr(layer, kind)) for layer in module.modules()) for kind in HOOKS}


@pytest.mark.parametrize("name", in_turn(WAYS, (), pytest.mark.exhaustive))
def test_a_plan_changes_no_bit_and_leaves_nothing(name, tmp_path):
    plain = train(name, tmp_path / "plain")[0]
    callback = planned()
    module, trainer = train(name, tmp_path / "planned", callback)
    assert callback.run.memory.session.plan.policy == "sqrt"
    assert plain.losses
    assert parts.same(plain.losses, module.losses)
    assert parts.same(plain.state_dict(), module.state_dict())
    assert installed(module) == installed(plain)
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in trainer.optimizers)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["optimizer_states"]
    if name != "EMAWeightAveraging":  # its checkpoint holds the averages under these names
        assert parts.same(dict(saved["state_dict"]), dict(module.state_dict()))
    assert not list(tmp_path.glob("**/*.tmp*"))
    held = [weakref.ref(thing) for thing in (module, trainer, *module.modules(), *module.parameters())]
    del module, trainer
    gc.collect()
    assert [thing() for thing in held if thing() is not None] == []


# What changes how layers, optimizers or the schedule are handled; the slow tests have every second one of the others.
CUT_OFTEN = (
    "single device", "bf16-mixed", "bf16-true", "accumulation", "manual optimization, two optimizers",
    "a closure called several times (LBFGS)", "a schedule of steps (OneCycleLR)", "parameter groups", "configure_model",
    "fast_dev_run", "max_steps", "barebones", "iterable data", "nested dict batches", "several train dataloaders",
    "data of the module's own setup", "a layer used twice", "frozen layers", "val within the epoch", "no validation",
    "EMAWeightAveraging", "StochasticWeightAveraging",
)  # fmt: skip


REST = [name for name, way in WAYS.items() if way.cuts and name not in CUT_OFTEN]


@pytest.mark.parametrize("name", [*CUT_OFTEN, *in_turn(REST, pytest.mark.exhaustive, pytest.mark.slow)])
def test_layers_are_cut_and_recovered_and_the_checkpoint_is_whole(name, tmp_path):
    module, trainer = train(name, tmp_path, cut())
    assert trainer.state.status == "finished"
    assert factorized_names(module)
    assert all(torch.isfinite(loss).all() for loss in module.losses)
    assert "training_step" not in vars(module)
    assert not module._load_state_dict_pre_hooks
    assert all(p.requires_grad for p in module.parameters()) or name == "frozen layers"
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    again = load_from_checkpoint(WAYS[name].kind, tmp_path / "end.ckpt")
    if name != "configure_model":  # that one has its layers when a Trainer asks for them
        own = again.state_dict()
        assert all(torch.equal(own[key], saved[key].to(own[key].dtype)) for key in own)


def test_the_documentation_has_a_row_for_each():
    text = Path("docs/lightning.md").read_text()
    assert [name for name in WAYS if f"| {name} |" not in text] == []
    assert len(WAYS) >= 48


class Fails(Callback):
    """Raises in one hook, in the second epoch."""

    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, trainer, *_, **__):
        if trainer.current_epoch == 1:
            raise ValueError("mine")


PLACES = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
          "on_train_batch_end", "on_train_epoch_end", "on_validation_batch_start")  # fmt: skip


@pytest.mark.parametrize(
    "name", ["single device", "manual optimization with accumulation and clipping", "accumulation"]
)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_leaves_nothing(name, place, tmp_path):
    module, trainer, data = build(name, tmp_path, cut(), Fails(place))
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(module, *data)
    assert "training_step" not in vars(module)
    assert "backward" not in vars(module)
    assert not module._load_state_dict_pre_hooks
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_a_callback_that_averages_may_stand_first_where_no_layer_is_cut(name, tmp_path):
    def end(*ours):
        module, trainer, data = build(name, tmp_path, *ours)
        trainer.callbacks.sort(key=lambda other: isinstance(other, CTDRCallback))
        trainer.fit(module, *data)
        return module

    plain, callback = end(), planned()
    assert parts.same(end(callback).state_dict(), plain.state_dict())
    assert callback.run.memory.session.plan.policy == "sqrt"
    with pytest.raises(ConfigError, match="comes before CTDRCallback"):
        end(cut())
