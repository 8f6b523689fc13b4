"""SuperNeurons on its ground: segments of cheap layers between convolutions."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, RECOMPUTE, RECOMPUTE_EACH, Budget, Prepared, record, simulate
from ctdr_lightning.memory.policies.superneurons import (
    cheap_segments,
    largest_working_set,
    memory_cost,
    spread,
)


def counted(sequence, images):
    """A step whose every op takes one second, so that seconds count replays."""
    trace = record(lambda: sequence(images).sum())
    return trace.with_costs([1.0] * len(trace.ops), dict.fromkeys(range(len(trace.ops)), 0))


@pytest.fixture(scope="module")
def trace():
    """Convolutions with segments of one and of four cheap layers behind them, all of the same size."""
    torch.manual_seed(0)
    cheap = [nn.Sigmoid(), nn.Tanh(), nn.ELU(), nn.Sigmoid()]
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), *cheap]
    layers += [nn.Conv2d(4, 4, 3, padding=1), *cheap, nn.Conv2d(4, 4, 3, padding=1)]
    return counted(nn.Sequential(*layers), torch.randn(2, 4, 16, 16))


def test_segments_lie_between_checkpoints(trace):
    segments = cheap_segments(Prepared(trace))
    assert [len(s) for s in segments] == [1, 4, 4, 2]  # the last: the sum's gradient
    names = {trace.ops[trace.values[v].op].name.split(".")[1] for s in segments for v in s}
    assert "convolution" not in names


def test_l_i_is_what_an_op_reads_and_writes(trace):
    image = 2 * 4 * 16 * 16 * 4
    assert 3 * image <= largest_working_set(trace) <= 3 * image + 4 * 4 * 9 * 4 + 64


def test_speed_centric_where_the_segment_fits_into_the_largest_working_set(trace):
    limit = largest_working_set(trace)
    chosen = POLICIES["superneurons"](trace, Budget()).actions
    ways = set()
    for segment in cheap_segments(Prepared(trace)):
        want = RECOMPUTE if memory_cost(trace, segment) <= limit else RECOMPUTE_EACH
        assert {chosen[v] for v in segment if trace.values[v].saves} <= {want}
        ways.add(want)
    assert ways == {RECOMPUTE, RECOMPUTE_EACH}


def test_the_paper_s_result_cost_aware_has_the_peak_of_memory_centric_and_recomputes_less():
    torch.manual_seed(0)
    narrow = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid(), nn.Tanh())]
    cheap = [nn.Sigmoid(), nn.Tanh(), nn.Sigmoid(), nn.Tanh()]
    wide = [nn.Conv2d(4, 64, 3, padding=1), *cheap, nn.Conv2d(64, 4, 3, padding=1)]
    trace = counted(nn.Sequential(*narrow, *wide, *narrow), torch.randn(2, 4, 16, 16))
    segments = cheap_segments(Prepared(trace))
    speed = simulate(trace, spread(trace, segments, [RECOMPUTE] * len(segments)))
    memory = simulate(trace, spread(trace, segments, [RECOMPUTE_EACH] * len(segments)))
    cost_aware = simulate(trace, POLICIES["superneurons"](trace, Budget()).actions)
    assert cost_aware.peak_bytes == memory.peak_bytes < speed.peak_bytes < simulate(trace).peak_bytes
    assert speed.recompute_seconds < cost_aware.recompute_seconds < memory.recompute_seconds
    assert speed.recompute_seconds == sum(len([v for v in s if trace.values[v].saves]) for s in segments)


def test_budgets(trace):
    plain = simulate(trace).peak_bytes
    assert POLICIES["superneurons"](trace, Budget(peak_bytes=plain)).actions == {}
    least = simulate(trace, POLICIES["superneurons"](trace, Budget()).actions).peak_bytes
    assert simulate(trace, POLICIES["superneurons"](trace, Budget(peak_bytes=least)).actions).peak_bytes == least
    with pytest.raises(InfeasibleBudgetError) as found:
        POLICIES["superneurons"](trace, Budget(peak_bytes=least - 1))
    assert found.value.least_peak_bytes == least
