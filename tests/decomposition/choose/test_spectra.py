import math

import pytest
import torch

from ctdr_lightning.decomposition.choose.spectra import look_untrained, stable_rank


def reference(weight):
    values = [torch.linalg.svdvals(group.double()) for group in weight.flatten(2)]
    return sum(float((v**2).sum() / v[0] ** 2) for v in values) / len(values)


@pytest.mark.parametrize("shape", [(1, 40, 24), (1, 24, 40, 3, 3), (3, 6, 5), (1, 1, 7), (1, 2, 2)])
def test_it_is_that_of_the_singular_values(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    low = weight.flatten(2)[:, :, :1] @ weight.flatten(2)[:, :1] * 3 + weight.flatten(2)
    for case in (weight, low):
        assert stable_rank(case) == pytest.approx(reference(case), rel=0.05)
        assert stable_rank(case) == stable_rank(case.clone())
    assert stable_rank(low) == pytest.approx(reference(low), rel=1e-3)


def test_scale_does_not_count_nor_does_precision():
    weight = torch.randn(1, 16, 12, generator=torch.Generator().manual_seed(2))
    assert stable_rank(weight * 1e-3) == pytest.approx(stable_rank(weight), rel=1e-4)
    assert stable_rank(weight.bfloat16()) == pytest.approx(stable_rank(weight), rel=0.02)
    assert stable_rank(torch.zeros(1, 4, 4)) == 0
    assert math.isnan(stable_rank(torch.full((1, 4, 4), torch.inf)))


def test_global_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    stable_rank(torch.ones(1, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def drawn(*shape, init=torch.nn.init.kaiming_uniform_):
    with torch.random.fork_rng():
        torch.manual_seed(sum(shape))
        return init(torch.empty(shape))


INITS = [torch.nn.init.kaiming_uniform_, torch.nn.init.xavier_normal_, torch.nn.init.orthogonal_]


@pytest.mark.parametrize("init", INITS)
def test_networks_as_they_are_drawn_look_untrained(init):
    weights = [drawn(*shape, init=init) for shape in [(16, 16, 3, 3), (64, 32), (128, 10), (10, 128), (4, 4)]]
    assert look_untrained(weights)
    assert look_untrained([*weights, torch.zeros(4, 4)]), "too small to tell"
    assert not look_untrained([*weights, weights[1] + 0.5 * weights[1].std()])
    assert not look_untrained([*weights, torch.full((9, 9), torch.nan)])


def test_a_few_other_layers_do_not_count():
    random = [drawn(64, 32 + i) for i in range(20)]
    sines = torch.outer(torch.arange(64.0), 1 / torch.arange(1.0, 33)).sin()
    zeros = torch.zeros(10, 64)
    assert look_untrained([sines, zeros, zeros, *random, sines])
    assert not look_untrained([*random, sines, sines, sines])


def test_recurrent_weights_count_though_nothing_cuts_them():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lstm = torch.nn.LSTM(16, 32, 2)
    assert look_untrained(lstm.parameters())
    with torch.no_grad():
        lstm.weight_hh_l0 += 0.1
    assert not look_untrained(lstm.parameters())


def test_a_few_layers_do_not_tell():
    assert not look_untrained([])
    assert not look_untrained([drawn(64, 32)] * 2)
