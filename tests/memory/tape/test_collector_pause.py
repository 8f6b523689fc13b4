import gc

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import Tape, record
from ctdr_lightning.memory.tape.collector_pause import CollectorPause
from tests.memory.harness import everything_dropped, planned


@pytest.fixture(autouse=True)
def collecting():
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_left_as_it_was_found(before):
    (gc.enable if before else gc.disable)()
    with CollectorPause():
        assert not gc.isenabled()
    assert gc.isenabled() is before


def test_a_guided_forward_pauses_the_collector_and_an_exception_ends_that():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    trace = record(lambda: net(x).sum())
    seen = []

    def fail(*_):
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    net[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), Tape(planned(trace, everything_dropped(trace))):
        net(x)
    assert seen == [False]
    assert gc.isenabled()
