import time

import torch

from ctdr_lightning.memory.tape.clock import CpuClock, ModelClock


def test_wall_time():
    clock = CpuClock()
    out, seconds, temp_bytes = clock.run(lambda a, b=0: time.sleep(0.02) or a + b, (1,), {"b": 2})
    assert out == 3
    assert seconds >= 0.02
    assert temp_bytes == 0
    assert clock.seconds(seconds) == seconds


def test_modelled_time():
    clock = ModelClock(lambda func, args, kwargs, out: 7.0 + out)
    assert clock.run(torch.add, (1, 2), {}) == (3, 10.0, 0)
    assert clock.seconds(10.0) == 10.0
