"""Rank arguments read, and candidates in their order."""

import math

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.decomposition.choose.rank import RankSpec, explicit, ranked, round_ranks
from tests.decomposition.cases import decay_, geometry_of


@pytest.mark.parametrize(
    ("rank", "rule", "value", "ranks"),
    [
        (0.5, "share", 0.5, ()),
        (16, "fixed", 16.0, ()),
        ((8, 16), "fixed", 8.0, (8, 16)),
        ("error=0.05", "error", 0.05, ()),
        (" energy = .99 ", "energy", 0.99, ()),
        ("vbmf", "vbmf", math.nan, ()),
    ],
)
def test_each_way_to_say_a_rank_is_read(rank, rule, value, ranks):
    found = RankSpec.parse(rank)
    assert (found.rule, found.ranks) == (rule, ranks)
    assert found.value == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("rank", "hint"), [("0.5", "rank=0.5"), ("50%", "rank=0.5"), ("error=x", "error takes"), (0, "whole number from 1")]
)
def test_what_is_nearly_a_rank_is_told_how_to_be_one(rank, hint):
    with pytest.raises(ConfigError) as found:
        RankSpec.parse(rank)
    assert hint in found.value.hint


def test_ranks_are_rounded_down_but_not_to_nothing():
    assert round_ranks((17, 8, 3), 8) == (16, 8, 8)


def test_the_least_error_comes_first_at_equal_parameters_and_the_fewest_parameters_at_equal_error():
    torch.manual_seed(0)
    layer = decay_(nn.Conv2d(16, 24, 3))
    geometry, methods = geometry_of(layer), [METHODS[name] for name in ("tucker", "spatial", "svd")]
    weight = geometry.canonical(layer.weight.detach()).double()
    by_share = ranked(RankSpec.parse(0.3), methods, geometry, weight, 1)
    assert [c.error for c in by_share] == sorted(c.error for c in by_share)
    assert all(c.parameters <= 0.3 * geometry.n_weights for c in by_share)
    by_error = ranked(RankSpec.parse("error=0.2"), methods, geometry, weight, 1)
    assert [c.parameters for c in by_error] == sorted(c.parameters for c in by_error)
    assert all(c.error <= 0.2 for c in by_error)


def test_explicit_ranks_must_be_ones_that_neighbours_can_use():
    geometry = geometry_of(nn.Conv2d(16, 24, 3))
    assert explicit(METHODS["tucker"], geometry, (4, 6), "rank").ranks == (4, 6)
    with pytest.raises(ConfigError, match=r"rank: tucker ranks \[17, 6\] are not in"):
        explicit(METHODS["tucker"], geometry, (17, 6), "rank")
