import gc

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.torch_private import n_dispatch_modes
from ctdr_lightning.memory import Tape, plan
from ctdr_lightning.memory.values.live_bytes import LiveBytes, PeakMeter, active_trackers, tell_trackers
from tests.memory.harness import Bench


def test_live_bytes_follow_births_and_deaths():
    live = LiveBytes()
    x = torch.zeros(100)
    live.track([x, x[10:], None, 3])
    assert live.now == live.peak == 400
    y = torch.zeros(50)
    live.track([y])
    assert live.now == 600
    view = x[:1]
    del x
    assert live.now == 600, "a view holds the storage"
    del view, y
    assert live.now == 0
    assert live.peak == 600


def test_ignored_tensors_are_never_counted():
    live = LiveBytes()
    x = torch.zeros(100)
    live.ignore([x, None])
    live.track([x, x.view(10, 10)])
    assert live.now == live.peak == 0


def test_sparse_tensors_are_passed_over():
    live = LiveBytes()
    live.track([torch.eye(3).to_sparse()])
    live.ignore([torch.eye(3).to_sparse()])
    assert live.now == 0


def test_a_tracker_dies_before_its_tensors():
    x = torch.zeros(100)
    live = LiveBytes()
    live.track([x])
    del live
    gc.collect()
    del x


def test_replays_are_told_to_trackers_while_they_are_entered():
    x = torch.zeros(100)
    tell_trackers([x])
    with LiveBytes() as live:
        tell_trackers([x])
    assert live.now == 400
    assert live not in active_trackers()


def test_peak_meter_sees_forward_backward_and_given_outputs():
    weight = torch.zeros(100, requires_grad=True)
    given = torch.zeros(100)
    with PeakMeter() as meter:
        y = weight.exp()
        with torch.no_grad():
            torch.add(given, 1, out=given)
        y.sum().backward()
        del y
    assert meter.live.now == 400, "the gradient"
    assert meter.live.peak == 808, "y, the sum and its gradient, and the gradient"


def test_peak_meter_leaves_when_the_block_raises():
    with pytest.raises(ValueError, match="stop"), PeakMeter() as meter:
        raise ValueError("stop")
    assert meter.live not in active_trackers()
    assert n_dispatch_modes() == 0


def test_peak_meter_sees_replays():
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(512, 64)
    bench = Bench(net, lambda net: net(x).sum())
    made = plan(bench.record(), policy="sqrt")
    peaks = []
    for guard in (None, Tape(made)):
        with PeakMeter() as meter:
            bench.run(guard)
        peaks.append(meter.live.peak)
    layer = 512 * 64 * 4
    assert peaks[0] >= 6 * layer
    assert peaks[1] < peaks[0]
