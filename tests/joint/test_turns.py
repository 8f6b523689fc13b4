"""Real steps: run, measured, and timed in turns."""

import time
from itertools import cycle

import pytest
import torch
from torch import nn

from ctdr_lightning import plan, record, simulate
from ctdr_lightning.basics.gpu_memory import highest
from ctdr_lightning.joint.turns import RealStep, in_turns
from tests.joint import parts
from tests.virtual_cuda.card import Card, Kernels


class Told:
    """A step whose seconds are told."""

    def __init__(self, *seconds):
        self.runs, self.timed, self._seconds = 0, 0, cycle(seconds)

    def run(self):
        self.runs += 1

    def seconds(self):
        self.timed += 1
        return next(self._seconds)


def test_the_ratio_is_the_median_over_pairs():
    first, second = Told(1.0, 2.0, 1.0), Told(1.5, 3.0, 9.0)
    found = in_turns(first, second)
    assert (found.first_s, found.second_s, found.ratio) == (1.0, 3.0, 1.5)
    assert (first.runs, second.runs) == (1, 1)  # to warm up
    assert first.timed == second.timed == 3


def test_short_steps_are_timed_more_often():
    short = Told(0.01), Told(0.02)
    assert in_turns(*short).ratio == pytest.approx(2.0)
    assert short[0].timed == 9


def test_a_step_under_its_plan_peaks_lower_and_has_the_same_gradients():
    net, batch = parts.network(dropout=0.0), parts.batches()[0]
    plain = RealStep(net, lambda: parts.step(net, batch))
    most = plain.watched().peak_bytes
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    trace = record(lambda: parts.step(net, batch))
    made = plan(trace, int(0.9 * simulate(trace).peak_bytes))
    watched = RealStep(net, plain.forward, made).watched()
    assert watched.diverged == ""
    assert watched.peak_bytes < most
    assert watched.seconds > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected, strict=True))


def test_a_step_that_differs_from_its_plan_says_where():
    net, (images, labels) = parts.network(), parts.batches()[0]
    trace = record(lambda: parts.step(net, (images, labels)))
    made = plan(trace, policy="sqrt")
    assert RealStep(net, lambda: parts.step(net, (images[:8], labels[:8])), made).run()


def on_card(monkeypatch):
    monkeypatch.setattr(RealStep, "_device", torch.device("cuda", 0))
    return Card().install(monkeypatch)


def test_a_gpus_step_takes_the_time_in_which_its_host_waits(monkeypatch):
    on_card(monkeypatch)
    x = torch.ones(2, requires_grad=True)
    step = RealStep(nn.Linear(2, 2), lambda: time.sleep(0.02) or x.sum())
    assert step.seconds() >= 0.02


def test_a_gpus_peak_so_far_outlives_a_watched_step(monkeypatch):
    card, x = on_card(monkeypatch), torch.ones(1000, requires_grad=True)
    card.allocate(10**6)
    card.free(10**6)
    with Kernels(card):
        peak_bytes = RealStep(nn.Linear(2, 2), lambda: (2 * x).sum()).watched().peak_bytes
    assert 4000 <= peak_bytes < 20_000
    assert highest().allocated_peak == 10**6
