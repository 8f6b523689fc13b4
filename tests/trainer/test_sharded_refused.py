"""Engines that shard in their own way: why they are refused, and what does the same instead."""

import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.strategies import check_strategy


def refusal(name):
    strategy = type(name, (), {})()
    with pytest.raises(ConfigError, match=name) as caught:
        check_strategy(strategy, cuts=False, chooses=False, allow_untested=False)
    return caught.value


def test_deepspeed_is_refused_for_want_of_a_device_to_test_it_on():
    error = refusal("DeepSpeedStrategy")
    assert "CUDA devices alone, so nothing could be tested" in str(error)
    assert "fully_shard(unit, reshard_after_forward=False, ...)" in error.hint
    assert "allow_untested=True" in error.hint


def test_each_refusal_names_an_alternative_of_its_own():
    assert "fully_shard" in refusal("FSDPStrategy").hint
    assert "ddp" in refusal("XLAStrategy").hint


def test_lightnings_deepspeed_does_not_begin_on_a_processor():
    """The refusal's reason: once this fails, DeepSpeed can be tested."""
    strategy = object.__new__(DeepSpeedStrategy)  # the package is not installed
    strategy.accelerator = CPUAccelerator()
    with pytest.raises(RuntimeError, match="only supported on CUDA GPUs"):
        strategy.setup_environment()
