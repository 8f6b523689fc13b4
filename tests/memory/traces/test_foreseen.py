"""A step foreseen from others of its structure has the sizes that it turns out to have, or larger ones, or is not."""

import pytest
import torch
from torch import nn

from ctdr_lightning import record
from ctdr_lightning.memory.traces.foreseen import FORESEEN, foreseen
from ctdr_lightning.memory.traces.trace import Trace


class Attends(nn.Module):
    """Attention over a length that is quadratic in bytes, and a product of all positions."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.inner(x).chunk(3, -1)
        x = self.outer(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return x[:, :-1].flatten(0, 1).tanh().sum()


def images():
    convs = nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*convs)


def lengths(net, sizes):
    net.zero_grad()
    return record(lambda: net(torch.randn(*sizes, 8)))


def pictures(net, sizes):
    net.zero_grad()
    return record(lambda: net(torch.randn(2, 3, *sizes)).square().sum())


def n_bytes(trace: Trace) -> list[int]:
    return [storage.n_bytes for storage in trace.storages]


@pytest.mark.parametrize(
    ("make", "run", "known", "new", "exact"),
    [
        pytest.param(Attends, lengths, [(4, 10), (4, 17)], (4, 31), True, id="a longer one"),
        pytest.param(Attends, lengths, [(4, 10), (4, 17)], (4, 5), True, id="a shorter one"),
        pytest.param(Attends, lengths, [(4, 10), (4, 17), (4, 12)], (4, 14), True, id="between three"),
        pytest.param(Attends, lengths, [(4, 10), (3, 17), (4, 21), (2, 12)], (4, 14), True, id="both dimensions"),
        pytest.param(Attends, lengths, [(4, 10), (4, 17)], (3, 14), False, id="a smaller last batch"),
        pytest.param(Attends, lengths, [(4, 17)], (4, 12), False, id="within the only one"),
        pytest.param(images, pictures, [(16, 24), (32, 20)], (40, 28), True, id="images"),
        pytest.param(images, pictures, [(16, 24), (32, 20)], (21, 35), True, id="odd images"),
    ],
)
def test_sizes_are_what_they_turn_out_to_be(make, run, known, new, exact):
    net = make()
    found, ran = foreseen([(sizes, run(net, sizes)) for sizes in known], new), run(net, new)
    assert found is not None
    assert FORESEEN in found.meta
    assert all(a >= b for a, b in zip(n_bytes(found), n_bytes(ran), strict=True))
    assert (n_bytes(found) == n_bytes(ran)) is exact
    assert found.resident_bytes >= ran.resident_bytes


@pytest.mark.parametrize(("known", "new"), [([], (4, 9)), ([(4, 10)], (4, 17)), ([(4, 10), (4, 17)], (5, 12))])
def test_what_the_known_steps_do_not_tell_is_not_foreseen(known, new):
    net = Attends()
    assert foreseen([(sizes, lengths(net, sizes)) for sizes in known], new) is None
