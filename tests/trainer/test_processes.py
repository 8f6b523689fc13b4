"""Runs on two processes that the Trainer starts itself: the model that comes back is the one that was trained."""

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from ctdr_lightning import CTDRCallback, Recovery, decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.strategies import check_strategy
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts


def on_two(module, *callbacks):
    """Train on two processes that are forked from this one, as ``ddp_notebook`` does."""
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    return parts.fit(module, *callbacks, strategy=strategy, devices=2, max_epochs=1)


@pytest.mark.slow
def test_a_plan_under_forked_processes_changes_no_bit():
    plain, planned = parts.blobs(), parts.blobs()
    on_two(plain)
    on_two(planned, CTDRCallback(rank=None, policy="sqrt", verbose=False))
    assert parts.same(plain.state_dict(), planned.state_dict())


def test_a_model_that_was_decomposed_before_comes_back_trained():
    module = parts.blobs()
    decompose(module, rank=0.5, progress=False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    on_two(module, CTDRCallback(rank=None, policy="sqrt", verbose=False))
    assert factorized_names(module)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in module.named_parameters())


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.parametrize("recovery", [None, Recovery()])
def test_a_cut_in_processes_that_start_from_this_one_is_refused(start_method, recovery):
    trainer = parts.quiet_trainer(strategy=DDPStrategy(start_method=start_method), devices=2)
    with pytest.raises(ConfigError, match="ddp_spawn") as caught:
        check_strategy(trainer.strategy, cuts=True, chooses=recovery is not None, allow_untested=False)
    assert "decompose(model" in caught.value.hint


def test_the_refusal_reaches_the_main_process_and_the_model_is_as_it_was():
    module = parts.blobs()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(Exception, match="ddp_spawn"):
        on_two(module, CTDRCallback(rank=0.5, policy="keep", verbose=False))
    assert parts.same(module.state_dict(), before)
