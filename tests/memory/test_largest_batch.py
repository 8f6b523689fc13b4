"""The largest batch, against trying every batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory import largest_batch, plan, record, record_fake, simulate
from ctdr_lightning.memory.allocator.reserved import runs_within
from ctdr_lightning.memory.largest_batch import SHARE, largest, max_batch
from ctdr_lightning.memory.policies import POLICIES

pytestmark = pytest.mark.usefixtures("short_searches")

WIDTH = 64


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 400))
def test_the_largest_number(answer, known, most):
    known, asked = min(known, answer, most), []

    def holds(n):
        asked.append(n)
        return n <= answer

    assert largest(holds, known, most) == min(answer, most)
    assert len(asked) <= 20
    assert all(known < n <= most for n in asked)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_the_largest_number_from_one_nearby_to_a_share(answer, known, near):
    known, asked = min(known, answer), []

    def holds(n):
        asked.append(n)
        return n <= answer

    found = largest(holds, known, 3000, near, SHARE)
    assert answer - max(1, SHARE * answer) < found <= answer
    assert len(asked) <= 20


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def inputs(size):
    return torch.empty(size, WIDTH)


def loss(net, x):
    return net(x).square().mean()


def recorded(net, size):
    net.zero_grad()
    batch = torch.ones(size, WIDTH)
    return record(lambda: loss(net, batch))


@pytest.mark.exhaustive
def test_it_is_what_trying_every_batch_finds(net):
    budget = 500_000
    found = max_batch(net, inputs, loss, budget)
    plain = []
    for size in range(1, 200):
        plain += [size] if simulate(recorded(net, size)).peak_bytes <= budget else []
    assert max(plain) * (1 - SHARE) <= found.plain_size <= max(plain)
    assert found.size > found.plain_size
    assert found.plan.peak_bytes <= budget
    assert plan(recorded(net, found.size), budget).peak_bytes <= budget
    for policy in POLICIES:
        with pytest.raises(InfeasibleBudgetError):
            plan(recorded(net, 1 + round(found.size * (1 + SHARE))), budget, policy)


@pytest.mark.slow
def test_what_is_there_all_along_counts_and_nothing_is_touched(net):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    roomy = max_batch(net, inputs, loss, "600KB", "sqrt")
    tight = max_batch(net, inputs, loss, "700KB", "sqrt", static_bytes=100_000)
    assert tight.size == pytest.approx(roomy.size, rel=SHARE)
    assert tight.plain_size == pytest.approx(roomy.plain_size, rel=SHARE)
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_on_a_gpu_it_is_the_batch_that_the_allocator_holds(monkeypatch):
    """The tensors of a larger one would fit, but not what is reserved for them."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    torch.manual_seed(0)
    wide = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())))

    def wide_inputs(size):
        return torch.empty(256 * size, 512)

    budget = 100 << 20
    by_tensors = max_batch(wide, wide_inputs, loss, budget, "sqrt")
    on_gpu = max_batch(wide, wide_inputs, loss, budget, "sqrt", device="a100")
    assert runs_within(on_gpu.plan.trace, on_gpu.plan.actions, budget)
    assert on_gpu.plan.trace.device == "cuda"
    plain = plan(record_fake(wide, wide_inputs(on_gpu.plain_size), loss, device="a100"), policy="keep")
    assert plain.reserved.reserved_bytes <= budget
    assert not runs_within(by_tensors.plan.trace, by_tensors.plan.actions, budget)
    assert on_gpu.plain_size <= on_gpu.size < by_tensors.size


@pytest.mark.slow
def test_on_a_gpu_plans_are_made_with_room_for_the_allocators_pieces(monkeypatch):
    torch.manual_seed(0)
    layers = [
        nn.Sequential(
            nn.Conv2d(8 * 2 ** (i // 2), 8 * 2 ** ((i + 1) // 2), 3, padding=1, stride=1 + i % 2),
            nn.BatchNorm2d(8 * 2 ** ((i + 1) // 2)),
            nn.ReLU(),
        )
        for i in range(8)
    ]
    halving = nn.Sequential(*layers)

    def found():
        return max_batch(halving, lambda n: torch.empty(n, 8, 64, 64), loss, "200MiB", device="a100", progress=False)

    with_room = found()
    assert runs_within(with_room.plan.trace, with_room.plan.actions, 200 << 20)
    monkeypatch.setattr(largest_batch._Search, "_with_room", lambda self, size, known: known)
    assert with_room.size > found().size >= with_room.plain_size


def test_one_sample_that_the_allocator_does_not_hold_names_what_it_reserves(net):
    with pytest.raises(InfeasibleBudgetError, match=r"its tensors take 2\d\d\.\d KiB.* reserves 2\.0 MiB") as caught:
        max_batch(net, inputs, loss, "1MiB", "sqrt", most=4, device="a100")
    assert max_batch(net, inputs, loss, caught.value.least_peak_bytes, "sqrt", most=2, device="a100").size >= 1


def test_a_policy_that_has_no_plan_for_what_is_too_large_is_asked_for_less(net):
    def strict(step, budget):
        made = POLICIES["sqrt"](step, budget)
        if made.peak_bytes > budget.peak_bytes:
            raise InfeasibleBudgetError("too large", "", least_peak_bytes=made.peak_bytes)
        return made

    found = max_batch(net, inputs, loss, "600KB", strict)
    assert found.size == pytest.approx(max_batch(net, inputs, loss, "600KB", "sqrt").size, rel=SHARE)
    assert found.size > found.plain_size


def test_a_limit_and_a_budget_for_nothing(net):
    assert max_batch(net, inputs, loss, "1GB", most=5).size == 5
    with pytest.raises(InfeasibleBudgetError, match="Not even one sample"):
        max_batch(net, inputs, loss, 1000)


@pytest.mark.slow
def test_few_batches_are_recorded_and_the_answer_is_one_of_them(net):
    seen = []

    def counted(size):
        seen.append(size)
        return inputs(size)

    found = max_batch(net, counted, loss, 500_000)
    assert len(set(seen)) <= 6
    assert {found.size, found.plain_size} <= set(seen)
    assert found.plan.trace.meta == record_fake(net, inputs(found.size), loss).meta, "not a foreseen one"


@pytest.mark.slow
def test_sizes_that_no_known_batch_tells_of_are_recorded(net):
    """From 24 samples on each takes twice as much: what was foreseen from 2 and 16 is too little."""

    def kinked(net, x):
        return loss(net, torch.cat([x, x]) if len(x) > 24 else torch.cat([x, x[:0]]))

    budget = 300_000
    found = max_batch(net, inputs, kinked, budget)
    assert found.plan.peak_bytes <= budget
    plain = [n for n in range(1, 60) if simulate(record_fake(net, inputs(n), kinked)).peak_bytes <= budget]
    assert max(plain) * (1 - SHARE) <= found.plain_size <= max(plain)
    with pytest.raises(InfeasibleBudgetError):
        plan(record_fake(net, inputs(1 + round(found.size * (1 + SHARE))), kinked), budget)


@pytest.mark.slow
def test_the_largest_batch_in_so_much_time():
    """Where a plan may take any time the batch is larger, and where it may take none it is the plain one."""
    deep = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Conv1d(16, 16, 3, padding=1), nn.Tanh())))

    def sample(size):
        return torch.empty(size, 16, 4096)

    found = [max_batch(deep, sample, loss, "256MiB", device="a100", max_slowdown=times) for times in (1.0, 1.2, None)]
    assert found[0].size == found[0].plain_size < found[1].size < found[2].size
    for each, most in zip(found, (1.0, 1.2), strict=False):
        assert each.plan.seconds <= most * each.plan.trace.seconds
    assert found[2].plan.seconds > 1.2 * found[2].plan.trace.seconds


@pytest.mark.slow
def test_a_sample_that_takes_too_long_is_refused_with_the_time_that_it_takes():
    torch.manual_seed(0)
    deep = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Conv1d(4, 4, 3, padding=1), nn.Tanh())))

    def step(net, x):
        return net(x).square().mean()

    def sample(size):
        return torch.empty(size, 4, 4096)

    plain = simulate(record_fake(deep, sample(1), step)).peak_bytes
    with pytest.raises(InfeasibleBudgetError, match=r"in 1 of the time of a plain step.*\n.*max_slowdown=1\.\d"):
        max_batch(deep, sample, step, int(0.6 * plain), max_slowdown=1.0)
    with pytest.raises(ConfigError, match="max_slowdown must be a number, at least 1"):
        max_batch(deep, sample, step, plain, max_slowdown=0.5)
