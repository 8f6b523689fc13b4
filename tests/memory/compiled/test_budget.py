"""Compiled steps under a budget: within it, as predicted, and the same to the bit as graphs without a plan."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from benchmarks.steps import step_peak_bytes
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory.compiled import partition
from ctdr_lightning.memory.compiled.backend import CompileBackend, ctdr
from tests.in_turn import in_turn
from tests.memory.compiled.nets import NETS, Step
from tests.memory.compiled.test_hard_steps import dropping


@pytest.fixture(scope="module")
def plain():
    """Each net's step with its plain gradients and peak, compiled without a plan."""
    found = {}
    for name in NETS:
        step = Step(name)
        run = step.compiled("aot_eager")
        found[name] = step, step.gradients(run), step_peak_bytes(step.net, run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.8, 0.65, 0.5])
@pytest.mark.parametrize("name", NETS)
def test_a_step_keeps_to_its_budget_to_the_bit(plain, name, share):
    step, want, peak_bytes = plain[name]
    backend = CompileBackend(step.standing_bytes + int(share * peak_bytes), engine="aot_eager")
    run = step.compiled(backend)
    try:
        found = step.gradients(run)
    except Exception as error:
        least = error.__cause__ if isinstance(error.__cause__, InfeasibleBudgetError) else error.inner_exception
        assert isinstance(least, InfeasibleBudgetError)
        assert share < 0.65
        return
    assert all(map(torch.equal, found, want))
    (graph,) = backend.graphs.values()
    true_bytes = step_peak_bytes(step.net, run) + step.standing_bytes
    assert true_bytes <= graph.peak_bytes <= backend.budget_bytes
    assert true_bytes >= 0.98 * graph.peak_bytes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
@pytest.mark.parametrize("name", NETS)
def test_plans_at_random_are_exact_and_no_larger_than_predicted(plain, name, seed):
    step, want, _ = plain[name]
    backend = CompileBackend("1GiB", engine="aot_eager", policy=dropping(seed))
    run = step.compiled(backend)
    assert all(map(torch.equal, step.gradients(run), want))
    (graph,) = backend.graphs.values()
    assert graph.plan.actions
    assert step_peak_bytes(step.net, run) + step.standing_bytes <= graph.peak_bytes


def test_the_graphs_of_one_step_share_the_budget():
    body, head = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64)
    x = torch.randn(32, 64)

    def step():
        hidden = body(x)
        torch._dynamo.graph_break()
        return head(hidden.sin()).square().mean()

    torch._dynamo.reset()
    backend = CompileBackend("1MiB", engine="aot_eager")
    torch.compile(step, backend=backend)().backward()
    first, second = backend.graphs.values()
    assert second.plan.trace.resident_bytes > first.held_bytes > 0
    assert "graphs: 2, by a plan: 2" in backend.summary()
    torch._dynamo.reset()
    tight = CompileBackend(second.peak_bytes - first.held_bytes // 2, engine="aot_eager")
    with pytest.raises(Exception, match=r"No plan of policy 'auto' fits the budget"):
        torch.compile(step, backend=tight)().backward()


def test_several_graphs_of_one_frame_share_the_budget():
    """DDP's optimizer parts a frame's graph into one for each bucket."""
    net, x = nn.Linear(64, 64), torch.randn(32, 64)
    backend = CompileBackend("1MiB", engine="aot_eager")
    before = CompileBackend("1MiB", engine="aot_eager")

    def twice(gm, inputs):
        backend(gm, inputs)
        return backend(gm, inputs)

    for chosen in (before, twice):
        torch._dynamo.reset()
        torch.compile(net, backend=chosen)(x).sum().backward()
    (alone,), (first, second) = before.graphs.values(), backend.graphs.values()
    assert first.peak_bytes == alone.peak_bytes
    assert second.peak_bytes == alone.peak_bytes + first.held_bytes


def test_a_graph_without_a_backward_is_no_graph_of_the_step():
    net, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
    torch._dynamo.reset()
    backend = CompileBackend("1MiB", engine="aot_eager")
    step = torch.compile(net, backend=backend)
    with torch.no_grad():
        step(x)
    assert not backend.graphs
    step(x).sum().backward()
    known = dict(backend.graphs)
    with torch.no_grad():
        step(x[:4])
    assert known
    assert backend.graphs == known


def test_a_call_that_refuses_noise_is_planned_by_its_roofline():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def step(x):
        weights = net(x).softmax(-1)
        return (weights * torch.multinomial(weights.detach(), 16)).sum()

    torch._dynamo.reset()
    backend = CompileBackend("1MiB", engine="aot_eager")
    torch.compile(step, backend=backend)(torch.randn(8, 16)).backward()
    assert [graph.reason for graph in backend.graphs.values()] == [""]


def test_sizes_that_are_not_fixed_are_planned_as_compiled_and_said_to_be():
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    torch._dynamo.reset()
    backend = CompileBackend("4MiB", engine="aot_eager", policy=dropping(0))
    step = torch.compile(net, backend=backend, dynamic=True)
    with pytest.warns(UserWarning, match="not fixed"):
        step(torch.randn(8, 16)).sum().backward()
    for rows in (12, 5):
        x = torch.randn(rows, 16)
        net.zero_grad()
        step(x).sum().backward()
        found = net[0].weight.grad.clone()
        net.zero_grad()
        net(x).sum().backward()
        assert torch.allclose(found, net[0].weight.grad, atol=1e-6)


def test_what_cannot_be_planned_is_left_to_torch_with_the_reason(monkeypatch):
    def broken(*args, **options):
        raise ValueError("no fake kernel")

    monkeypatch.setattr(partition, "JointGraph", broken)
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    torch._dynamo.reset()
    backend = CompileBackend("1MiB", engine="aot_eager")
    with pytest.warns(UserWarning, match="torch parts a compiled graph.*no fake kernel"):
        torch.compile(net, backend=backend)(x).sum().backward()
    assert net.weight.grad is not None


def test_the_backend_is_found_by_its_name():
    net = nn.Linear(8, 8)
    torch._dynamo.reset()
    options = {"memory_budget": "1MiB", "engine": "aot_eager"}
    torch.compile(net, backend="ctdr", options=options)(torch.randn(4, 8)).sum().backward()
    assert net.weight.grad is not None


@pytest.mark.parametrize("options", [None, {"policy": "auto"}])
def test_a_budget_must_be_given(options):
    with pytest.raises(ConfigError, match="needs a budget"):
        ctdr(None, (), options=options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "jit"}, "'jit'"),
        ({"engine": "aot_eager", "mode": "max-autotune-no-cudagraphs"}, "takes no mode"),
        ({"mode": "reduce-overhead"}, "CUDA graphs"),
        ({"triton.cudagraphs": True}, "CUDA graphs"),
    ],
)
def test_bad_arguments_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        CompileBackend("1MiB", **options)


def test_nothing_is_imported_before_something_is_compiled():
    code = "import sys, ctdr_lightning; assert not any(n.startswith('torch._inductor') for n in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "share", [pytest.param(0.65, marks=pytest.mark.slow), *in_turn([1.0, 0.8], pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", NETS)
def test_inductor_keeps_to_the_budget(name, share):
    step = Step(name)
    run = step.compiled("inductor")
    want = step.gradients(run)
    peak_bytes = step_peak_bytes(step.net, run)
    backend = CompileBackend(step.standing_bytes + int(share * peak_bytes))
    mine = step.compiled(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = step.gradients(mine)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, want, strict=True))
    assert step_peak_bytes(step.net, mine) + step.standing_bytes <= backend.budget_bytes


@pytest.mark.slow
def test_inductor_counts_results_that_the_caller_holds():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 512)), torch.randn(256, 32)
    standing_bytes = sum(t.nbytes for t in (*net.parameters(), x))
    torch._dynamo.reset()
    backend = CompileBackend("4MiB")
    step = torch.compile(net, backend=backend)

    def run():
        result = step(x)
        result.backward(torch.ones_like(result))
        return result  # which is alive as long as the backward runs

    run()
    (graph,) = backend.graphs.values()
    assert step_peak_bytes(net, run) + standing_bytes <= graph.peak_bytes
