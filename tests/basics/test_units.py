"""Amounts of memory as people and NumPy write them."""

import numpy as np
import pytest

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError, first_line
from ctdr_lightning.basics.units import parse_bytes


@pytest.mark.parametrize("value", [0.5, "50%", " 50.0 % ", "0.5", ".5", np.float32(0.5)])
def test_a_fraction_is_of_the_devices_memory(value):
    assert parse_bytes(value, total_bytes=1000) == 500
    with pytest.raises(ConfigError, match="is a fraction, but the device's memory is not known here"):
        parse_bytes(value)


@pytest.mark.parametrize("value", [np.int64(4096), np.uint16(4096), np.float64(4096.0)])
def test_numbers_of_numpy_are_numbers_and_a_checkpoint_may_hold_them(value):
    assert parse_bytes(value) == int(value)
    budget = CTDRCallback(rank=None, memory_budget=value).options.memory_budget
    assert type(budget) in (int, float)
    assert budget == value


@pytest.mark.parametrize("value", ["101%", "150 %"])
def test_more_than_all_of_the_memory_is_refused_in_the_users_words(value):
    with pytest.raises(ConfigError, match=value):
        parse_bytes(value, total_bytes=1000)


def test_an_error_of_ours_stands_in_a_sentence_without_its_kind_and_hint():
    assert first_line(ConfigError("rank=0 is no rank.", "Write 0.5.")) == "rank=0 is no rank"
