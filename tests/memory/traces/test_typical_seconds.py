"""Medians over equal ops and recordings."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import record
from ctdr_lightning.memory.traces.typical_seconds import steady


def recorded(seconds):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 8)
    trace = record(lambda: net(x).sum())
    linear = [i for i, op in enumerate(trace.ops) if op.name == "aten.addmm.default"]
    return trace.with_costs([seconds[linear.index(i)] if i in linear else 1.0 for i in range(len(trace.ops))], {})


def linear_seconds(trace):
    return [op.seconds for op in trace.ops if op.name == "aten.addmm.default"]


def test_equal_ops_take_equally_long():
    assert linear_seconds(steady([recorded([2.0, 4.0, 9.0])])) == [3.0, 3.0, 9.0]
    several = steady([recorded([2.0, 4.0, 9.0]), recorded([6.0, 5.0, 7.0]), recorded([50.0, 0.0, 8.0])])
    assert linear_seconds(several) == [4.5, 4.5, 8.0]


def test_pythons_time_is_a_median_too():
    traces = [replace(recorded([2.0, 2.0, 9.0]), python_s_per_replay=seconds) for seconds in (1.0, 7.0, 3.0)]
    assert steady(traces).python_s_per_replay == 3.0


def test_nothing_else_changes():
    trace = recorded([2.0, 2.0, 9.0])
    assert steady([trace]) == trace


def test_recordings_of_different_steps_are_refused():
    other = record(lambda: nn.Linear(2, 2)(torch.ones(1, 2)).sum())
    for traces in ([], [recorded([1.0, 1.0, 1.0]), other]):
        with pytest.raises(ConfigError, match="same ops"):
            steady(traces)
