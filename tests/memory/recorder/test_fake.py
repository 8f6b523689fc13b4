import threading

import pytest
import torch

from ctdr_lightning.memory import plan, record, record_fake, simulate
from tests.memory.zoo import build

STEPS = {
    "resnet18": (torch.randn(2, 3, 64, 64), lambda net, x: net(x).square().mean()),
    "vision_transformer": (torch.randn(2, 3, 32, 32), lambda net, x: net(x).square().mean()),
    "gpt2": (torch.randint(3, 90, (2, 16)), lambda net, x: net(input_ids=x, labels=x).loss),
    "gru": (torch.randn(3, 12, 8), lambda net, x: net(x)[0].square().mean()),
}


def made_by(trace, values):
    return [trace.values[v].op for v in sorted(values)]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_fake_trace_is_the_real_one_without_the_work(name):
    net, _ = build(name)
    inputs, step = STEPS[name]
    state = {k: v.clone() for k, v in net.state_dict().items()}
    fake = record_fake(net, inputs, step)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    real = record(lambda: step(net, inputs))
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert made_by(fake, fake.saved) == made_by(real, real.saved)
    for policy in ("keep", "sqrt"):
        want = simulate(real, plan(real, policy=policy)).peak_bytes
        assert simulate(fake, plan(fake, policy=policy)).peak_bytes == pytest.approx(want, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_module_on_the_meta_device_gives_the_same_trace(name):
    inputs, step = STEPS[name]
    want = record_fake(build(name)[0], inputs, step)
    with torch.device("meta"):
        net, _ = build(name)
    found = record_fake(net, inputs, step)
    assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))
    assert found.storages == want.storages
    assert [op.name for op in found.ops] == [op.name for op in want.ops]
    assert simulate(found).peak_bytes == simulate(want).peak_bytes


def test_parts_that_are_named_for_a_profiler_are_recorded():
    net, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def step(net, x):
        with torch.profiler.record_function("forward"):
            return net(x).sum()

    fake, real = record_fake(net, x, step), record(lambda: step(net, x))
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]


class Noisy(torch.nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.generator = torch.nn.Linear(4, 4), torch.Generator().manual_seed(5)

    def forward(self, x):
        return self.linear(x + torch.randn(x.shape, generator=self.generator)).square().mean()


def test_what_cannot_be_copied_is_shared():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    net.lock, net.seen = threading.Lock(), net(torch.randn(2, 4))
    assert record_fake(net, torch.randn(3, 4), lambda net, x: net(x).square().mean()).ops


def test_a_generator_of_the_module_s_own_is_left_where_it_is():
    net, x = Noisy(), torch.randn(3, 4)
    fake = record_fake(net, x, lambda net, x: net(x))
    assert torch.equal(net.generator.get_state(), torch.Generator().manual_seed(5).get_state())
    assert [op.name for op in fake.ops] == [op.name for op in record(lambda: net(x)).ops]
