import pytest
import torch
from torch import nn

from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_recipes.measure import MemoryUse, measure_memory, measure_seconds, one_thread, training_tensors

KIB = 1024


def _bytes(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8)


def test_every_allocation_and_release_is_seen():
    resident = torch.zeros(1000, 1000)

    def step():
        first = _bytes(1024 * KIB)
        second = _bytes(2048 * KIB)
        del first
        third = _bytes(512 * KIB)
        del second, third

    use = measure_memory(step, lambda: [resident])
    above = [level - 4_000_000 for level in use.live_bytes]
    assert above == [n * KIB for n in (1024, 3072, 2048, 2560, 512, 0)]
    assert use.peak_bytes == 4_000_000 + 3072 * KIB


def test_gradients_of_the_step_before_are_counted_until_they_are_freed():
    layer = nn.Linear(256, 256, bias=False)
    weight_bytes = 256 * 256 * 4
    layer(torch.ones(1, 256)).sum().backward()

    def step():
        loss = layer(torch.ones(1, 256)).sum()
        layer.zero_grad(set_to_none=True)
        loss.backward()

    use = measure_memory(step, lambda: [layer.weight, layer.weight.grad])
    assert use.live_bytes[-1] == 2 * weight_bytes
    assert min(use.live_bytes) < 2 * weight_bytes
    assert use.peak_bytes >= 2 * weight_bytes


def test_time_starts_at_the_measured_step_and_never_runs_backwards():
    use = measure_memory(lambda: _bytes(KIB), list)
    assert list(use.seconds) == sorted(use.seconds)
    assert 0 <= use.seconds[0] < 10


def test_a_step_is_stretched_to_another_duration():
    use = MemoryUse((0.0, 1.0, 4.0), (1, 2, 1)).lasting(2.0)
    assert use == MemoryUse((0.0, 0.5, 2.0), (1, 2, 1))


def test_steps_are_timed_in_turns():
    order = []
    seconds = measure_seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 4
    assert seconds.keys() == {"a", "b"}
    assert all(value > 0 for value in seconds.values())


def test_thread_count_is_put_back_after_an_error():
    torch.set_num_threads(2)
    with pytest.raises(KeyError):
        _fail_on_one_thread()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def _fail_on_one_thread():
    with one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError


def test_training_tensors_are_weights_gradients_buffers_and_adams_moments():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    weights, statistics, counters = 4 * 64 * 4, 2 * 8 * 4, 8 + 4
    assert storage_bytes(training_tensors(model, optimizer)) == weights + statistics + counters


def test_a_storage_shared_by_views_counts_once():
    base = torch.zeros(100)
    assert storage_bytes([base, base[:10], base.view(10, 10)]) == 400
