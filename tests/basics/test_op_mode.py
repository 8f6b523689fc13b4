"""Our dispatch modes beside `torch.compile`: their own frames are never compiled, although torch does not wrap them."""

import torch
from torch import nn

from ctdr_lightning.basics.torch_private import OpMode
from ctdr_lightning.memory import RECOMPUTE, Plan, Tape, record, simulate


class Counting(OpMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def broken(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def compiled_and_counted():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(broken, backend=backend), graphs


def test_the_function_itself_is_marked():
    assert not hasattr(Counting.__torch_dispatch__, "__wrapped__"), "torch wraps it: 1.5 us an op"


def test_compiled_code_runs_under_a_mode_and_the_mode_is_not_compiled():
    run, graphs = compiled_and_counted()
    x = torch.linspace(0, 1, 5)
    expected = run(x)
    assert len(graphs) == 2
    with Counting() as mode:
        found = run(x)
    assert torch.equal(found, expected)
    assert mode.names == ["aten.sin.default", "aten.cos.default"]
    assert len(graphs) == 2, "nothing new was compiled"


def test_what_first_runs_under_a_mode_runs_as_it_is():
    run, _ = compiled_and_counted()
    x = torch.linspace(0, 1, 5)
    with Counting() as mode:
        found = run(x)
    assert torch.equal(found, broken(x))
    assert mode.names[-2:] == ["aten.sin.default", "aten.cos.default"]


def test_a_plan_is_carried_out_around_compiled_code_with_a_break():
    run, _ = compiled_and_counted()
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.linspace(0, 1, 8).view(2, 4)

    def step():
        return net[2](run(net[:2](x))).square().sum()

    step().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    trace = record(step)
    net.zero_grad()
    with Tape(Plan("drop", simulate(trace, dict.fromkeys(trace.droppable, RECOMPUTE)))) as tape:
        loss = step()
    loss.backward()
    assert not tape.diverged
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), expected, strict=True))
