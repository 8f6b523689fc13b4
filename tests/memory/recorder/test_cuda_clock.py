"""Times and workspaces of kernels, on a card that keeps its host's time apart from its own."""

import pytest
import torch

from ctdr_lightning.basics.gpu_memory import begin_interval, highest
from ctdr_lightning.memory.recorder.cuda_clock import CudaClock
from ctdr_lightning.memory.values.op_traits import may_run_twice
from tests.virtual_cuda.card import FIRST_S, KERNEL_S, Card, Kernels

aten = torch.ops.aten
A, B = torch.ones(8, 8), torch.ones(8, 8)


@pytest.fixture
def card(monkeypatch):
    return Card().install(monkeypatch)


def times(clock, calls):
    """Seconds by the clock of a list of calls."""
    measured = [clock.run(func, args, {})[1] for func, args in calls]
    return [clock.seconds(m) for m in measured]


def test_kernels_are_timed_and_not_their_launches(card):
    calls = [(aten.mm.default, (A, B)), (aten.relu.default, (A,))] * 3
    with Kernels(card, {"aten.mm.default": 3e-6}):
        assert times(CudaClock(), calls) == pytest.approx([3e-6, KERNEL_S] * 3, rel=1e-6, abs=2e-6)


def test_a_first_call_runs_again(card):
    with Kernels(card) as ran:
        (seconds,) = times(CudaClock(), [(aten.mm.default, (A, B))])
    assert seconds < FIRST_S / 100
    assert ran.calls == ["aten.mm.default"] * 2


def test_a_first_call_that_may_not_run_again_takes_the_time_of_those_alike(card):
    x, drawn = torch.zeros(8, 8), torch.zeros(8)
    calls = [(aten.add_.Tensor, (x, A)), (aten.bernoulli_.float, (drawn, 0.5))] * 2
    with Kernels(card) as ran:
        assert max(times(CudaClock(), calls)) < FIRST_S / 100
    assert len(ran.calls) == 4
    assert torch.equal(x, 2 * A)


def test_a_call_that_writes_without_saying_so_runs_once():
    """The backward of a recurrent layer of cuDNN writes into the reserve: run twice, it gave wrong gradients."""
    assert not may_run_twice(aten._cudnn_rnn_backward.default, (A, [B]), {})
    assert may_run_twice(aten.mm.default, (A, B), {})


def test_running_statistics_are_updated_once(card):
    mean, var = torch.zeros(8), torch.ones(8)
    once = mean.clone(), var.clone()
    call = (torch.arange(64.0).view(8, 8), None, None)
    aten.native_batch_norm.default(*call, *once, True, 0.1, 1e-5)
    with Kernels(card):
        CudaClock().run(aten.native_batch_norm.default, (*call, mean, var, True, 0.1, 1e-5), {})
    assert torch.equal(mean, once[0])
    assert torch.equal(var, once[1])


def test_a_call_that_is_alone_and_may_not_run_again_takes_its_own_time(card):
    with Kernels(card):
        (seconds,) = times(CudaClock(), [(aten.add_.Tensor, (torch.zeros(8, 8), A))])
    assert seconds == pytest.approx(FIRST_S, rel=0.1)


def test_an_op_that_is_handed_over_slowly_gets_a_longer_queue(card):
    with Kernels(card, hand_over_s=1e-3) as ran:
        (seconds,) = times(CudaClock(), [(aten.mm.default, (A, B))])
    assert seconds == pytest.approx(KERNEL_S, abs=2e-6)
    assert len(ran.calls) == 3


def test_what_raised_or_ran_before_the_clock_has_no_events(card):
    clock = CudaClock()
    assert clock.seconds(0.0) == 0.0
    assert clock.seconds(3e-5) == 3e-5


def test_workspaces_are_told_and_peaks_outlive_them(card):
    card.allocate(1 << 20)
    card.free(1 << 20)
    with Kernels(card, workspaces={"aten.mm.default": 4096}):
        clock = CudaClock()
        for _ in range(2):
            out, _, temp_bytes = clock.run(aten.mm.default, (A, B), {})
            assert temp_bytes == 4096
            del out
    assert highest().allocated_peak == 1 << 20
    begin_interval()
    assert highest().allocated_peak == 0


def test_a_pointwise_op_asks_the_allocator_nothing(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", None)
    with Kernels(card):
        assert CudaClock().run(aten.relu.default, (A,), {})[2] == 0
