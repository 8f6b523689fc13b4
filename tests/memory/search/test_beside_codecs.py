"""Recomputation beside codecs, in one plan: as much of it as the codecs leave to do, whatever the ops take."""

import random

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import plan
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.search.others import free_codecs
from ctdr_lightning.memory.simulator.actions import Recompute
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.machine import CodecCost
from tests.in_turn import in_turn
from tests.memory.harness import Bench

COSTS = [
    CodecCost(name, c.exact, c.needs, c.payload_bits, c.side_bits, c.drops_zeros, 1e-10, 1e-10)
    for name, c in CODECS.items()
    if c.exact
]
N_BLOCKS = 6


def dropouts():
    """Each block saves its output and a mask of the same size, of which a codec leaves a bit a number."""
    torch.manual_seed(0)
    layers = [part for _ in range(N_BLOCKS) for part in (nn.Linear(32, 32), nn.Dropout())]
    x = torch.randn(4096, 32)
    return Bench(nn.Sequential(*layers), lambda net: net(x).square().mean())


@pytest.fixture(scope="module")
def recorded():
    return dropouts().record()


@pytest.mark.slow
@pytest.mark.parametrize("seed", in_turn(range(6), (), pytest.mark.exhaustive))
def test_values_are_recomputed_only_for_what_codecs_leave_above_the_budget(recorded, seed):
    drawn = random.Random(seed)
    seconds = [1e-4 * drawn.lognormvariate(0, 1) for _ in recorded.ops]
    trace = recorded.with_costs(seconds, {}).with_machine([], COSTS)
    codecs = free_codecs(trace)
    assert len(codecs) == N_BLOCKS
    one_value = trace.value_bytes(next(iter(codecs)))
    compressed_peak_bytes = Simulator(trace, codecs).peak_bytes
    made = plan(trace, compressed_peak_bytes - one_value // 2, "auto")
    assert made.away == codecs
    assert sum(isinstance(action, Recompute) for action in made.actions.values()) == 1
