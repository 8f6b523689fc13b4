import time

import pytest
import torch

from ctdr_lightning.basics.thread_clock import computing_clock, now_s
from ctdr_lightning.memory.tape.clock import CpuClock, ModelClock


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def slept(a, b=0):
    time.sleep(0.02)
    return a + b


@pytest.mark.usefixtures("two_threads")
def test_wall_time_where_torch_computes_on_several_threads():
    clock = CpuClock()
    out, seconds, temp_bytes = clock.run(slept, (1,), {"b": 2})
    assert out == 3
    assert seconds >= 0.02
    assert temp_bytes == 0
    assert clock.seconds(seconds) == seconds


def test_the_threads_own_time_where_torch_computes_on_one():
    assert CpuClock().run(slept, (1,), {})[1] < 0.02  # waiting takes none
    start = time.thread_time()
    seconds = CpuClock().run(lambda: sum(range(300_000)), (), {})[1]
    assert 0 < seconds <= time.thread_time() - start


def test_modelled_time():
    clock = ModelClock(lambda func, args, kwargs, out: 7.0 + out)
    assert clock.run(torch.add, (1, 2), {}) == (3, 10.0, 0)
    assert clock.seconds(10.0) == 10.0


def test_waiting_counts_where_a_gpu_computes():
    assert computing_clock("cuda") is time.perf_counter
    start_s = now_s("cuda")
    time.sleep(0.02)
    assert now_s("cuda") - start_s >= 0.02
