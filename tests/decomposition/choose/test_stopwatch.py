"""The micro-benchmark of one layer."""

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.decomposition.choose import stopwatch
from tests.decomposition.cases import geometry_of, layer_and_input


def test_benchmark_runs_once_a_shape_and_draws_no_random_number():
    layer = nn.Conv2d(8, 8, 3, padding=1)
    job = stopwatch.Job(geometry_of(layer), "tucker", (2, 2), (2, 8, 12, 12), torch.float32, torch.device("cpu"), True)
    state = torch.get_rng_state()
    stopwatch.step_seconds.cache_clear()
    dense_s, small_s = stopwatch.step_seconds(job)
    assert 0 < dense_s < 10
    assert 0 < small_s < 10
    assert stopwatch.step_seconds(job) == (dense_s, small_s)
    assert stopwatch.step_seconds.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["linear", "embedding", "conv1d groups=1", "conv_transpose3d groups=2"])
def test_benchmark_runs_every_kind(name):
    layer, x = layer_and_input(name)
    method = METHODS["svd"]
    ranks = method.uniform(geometry_of(layer), 2)
    job = stopwatch.Job(geometry_of(layer), "svd", ranks, tuple(x.shape), torch.float32, torch.device("cpu"), False)
    assert min(stopwatch.step_seconds(job)) > 0
