import copy

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.basics.parallel import each


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("parallel", [True, False])
def test_in_order_and_threads_put_back(two_threads, parallel):
    assert each(lambda n: n * n, range(20), "square", parallel=parallel) == [n * n for n in range(20)]
    assert torch.get_num_threads() == 2


def test_error_comes_through_and_threads_are_put_back(two_threads):
    def fail(n):
        raise ValueError(f"item {n}")

    with pytest.raises(ValueError, match="item 0"):
        each(fail, range(3), "fail")
    assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_the_same_factors_on_any_number_of_threads(two_threads):
    net = nn.Sequential(*(nn.Conv2d(32, 32, 3) for _ in range(4)))
    twin = copy.deepcopy(net)
    decompose(net, rank=0.3, method="cp")
    torch.set_num_threads(1)
    decompose(twin, rank=0.3, method="cp")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
