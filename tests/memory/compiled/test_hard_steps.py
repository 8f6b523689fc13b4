"""Hard steps, compiled: whatever a plan drops and makes again, they leave the same as without one, to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from ctdr_lightning.memory import RECOMPUTE, RECOMPUTE_EACH
from ctdr_lightning.memory.compiled.backend import CompileBackend
from tests.in_turn import in_turn
from tests.memory.hard_steps import HARD
from tests.memory.harness import Bench

# Written after the forward by somebody else than its graph: torch notices, and the step ends in its error.
REFUSED = {"a_queue_in_a_buffer", "a_backward_hook_that_writes_a_buffer"}

# dynamo runs their forward eagerly, or what it compiles of them has no backward.
NO_GRAPH = {
    "an_exception_that_is_caught", "gru_both_ways", "hooks_for_saved_tensors_inside", "lstm", "packed_sequences",
    "sparse_product", "stochastic_depth",
}  # fmt: skip
# Reads its counter as a number, which parts the step into graphs of one layer each.
NOTHING_TO_DROP = {"batch_norm_averaging_all"}


def dropping(seed):
    """A policy that drops everything that may be dropped; which of it stays once it is back is drawn."""

    def choose(step, budget):
        drawn = random.Random(seed)
        return {v: drawn.choice([RECOMPUTE, RECOMPUTE_EACH]) for v in sorted(step.trace.droppable)}

    return choose


def compiled(bench, backend):
    torch._dynamo.reset()
    bench.reset()
    run = Bench(bench.model, torch.compile(bench.step, backend=backend), bench.backward)
    try:
        return [run.run() for _ in range(2)]
    except Exception as error:
        return str(error).splitlines()[0]


SPECIAL = [name for name in HARD if name in REFUSED | NO_GRAPH | NOTHING_TO_DROP]
REST = [name for name in HARD if name not in SPECIAL]  # each takes two compilations


@pytest.mark.parametrize("name", [*SPECIAL, *in_turn(REST, (), *[pytest.mark.exhaustive] * 2)])
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_that_drop_everything(name):
    torch.manual_seed(0)
    net, *rest = HARD[name]()
    bench = Bench(net.train(), *rest)
    want = compiled(bench, "aot_eager")
    backend = CompileBackend("1GiB", engine="aot_eager", policy=dropping(0))
    found = compiled(bench, backend)
    if isinstance(want, str):
        assert isinstance(found, str)
        return
    graphs = backend.graphs.values()
    assert not any(graph.reason for graph in graphs)
    assert bool(graphs) == (name not in NO_GRAPH)
    dropped = [graph.plan is not None and not graph.plan.keeps_all for graph in graphs]
    assert any(dropped) == (name not in NO_GRAPH | NOTHING_TO_DROP)
    if name in REFUSED:
        assert "modified by an inplace operation" in found
        return
    assert not isinstance(found, str), found
    assert [mine.differs_from(theirs) for mine, theirs in zip(found, want, strict=True)] == [[], []]
