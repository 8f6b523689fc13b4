from itertools import pairwise

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import KEEP, RECOMPUTE, Tape, plan, record, simulate
from ctdr_lightning.memory.policies.sqrt import balanced_cuts, segment_actions
from ctdr_lightning.memory.search.chain import find_chain
from tests.memory.graphs import Node, chain, dense_block, graph_trace, residual, u_net
from tests.memory.harness import Bench


def test_a_chain_is_cut_everywhere():
    trace = graph_trace(chain([4, 8, 4, 8]))
    found = find_chain(trace)
    assert [stage.output for stage in found.stages[:3]] == [0, 1, 2]
    assert not found.held
    assert [stage.forward_seconds for stage in found.stages] == pytest.approx([1.0] * len(found.stages))


def test_stages_cover_the_forward_once():
    for nodes in (chain([4] * 7), residual(3), u_net(3), dense_block(5)):
        trace = graph_trace(nodes)
        found = find_chain(trace)
        stages = found.stages
        assert stages[0].first == 0
        assert stages[-1].last == len(trace.forward_ops) - 1
        assert all(b.first == a.last + 1 for a, b in pairwise(stages))
        inside = [v for s in stages for v in (*s.inner, *([s.output] if s.output >= 0 else []))]
        assert len(inside) == len(set(inside))
        assert set(trace.saved) <= found.cached
        assert found.cached & trace.droppable <= set(inside) <= trace.droppable
        backward = sum(op.seconds for op in trace.ops if op.backward)
        assert sum(s.backward_seconds for s in stages) == pytest.approx(backward)


def test_residual_blocks_are_stages():
    found = find_chain(graph_trace(residual(4)))
    outputs = [stage.output for stage in found.stages if stage.output >= 0]
    assert {4, 8, 12} <= set(outputs), "the activation behind each sum"
    assert not set(outputs) & {1, 2, 5, 6}, "inside a block the shortcut crosses too"


def test_a_graph_without_cuts_is_one_stage():
    assert len(find_chain(graph_trace(dense_block(6))).stages) <= 2


def test_small_values_may_cross():
    nodes = [Node((), 1000), Node((0,), 2), Node((0,), 1000), Node((2,), 1000), Node((1, 3), 1000), Node((4,), 1000)]
    found = find_chain(graph_trace(nodes))
    assert found.held == {1}
    assert {2, 3} <= {stage.output for stage in found.stages}
    assert found.actions({0}, {0, 1})[1] == KEEP


def test_what_is_written_over_is_no_cut():
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))])
    trace = record(lambda: net(torch.ones(4, 8).cumsum(0)).sum())
    outputs = {stage.output for stage in find_chain(trace).stages}
    assert trace.unholdable
    assert not outputs & trace.unholdable


def test_actions_by_stage():
    found = find_chain(graph_trace(residual(3)))
    actions = found.actions(kept_stages={1}, dropped_stages={0, 1, 2})
    assert actions[found.stages[1].output] == KEEP
    assert actions[found.stages[0].output] == RECOMPUTE
    assert all(actions[v] == RECOMPUTE for v in found.stages[2].inner)


def test_balanced_cuts():
    found = find_chain(graph_trace(chain([4] * 16)))
    cuts = balanced_cuts(found, 4)
    assert len(cuts) == 3
    assert cuts == sorted(cuts)
    assert {b - a for a, b in pairwise(cuts)} <= {3, 4, 5}
    assert balanced_cuts(found, 1) == []
    assert segment_actions(found, []).keys() <= set(found.stages[0].inner) | {found.stages[0].output}


@pytest.mark.parametrize("n", [16, 64, 256])
def test_sqrt_of_the_memory_for_one_more_forward(n):
    """Chen et al.: n layers in O(sqrt(n)) memory for at most one more forward pass."""
    trace = graph_trace(chain([8] * n))
    timeline = simulate(trace, plan(trace, policy="sqrt"))
    assert timeline.peak_bytes <= 8 * (3 * n**0.5 + 2)
    forward = sum(op.seconds for op in trace.ops if not op.backward)
    assert timeline.recompute_seconds <= forward


def test_the_chain_of_a_net_is_found_whatever_its_modules():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.b(self.a(x).exp().tanh())

    net = nn.ModuleList([Block() for _ in range(9)])
    x = torch.randn(64, 16)

    def step(net):
        h = x
        for block in net:
            h = block(h)
        return h.sum()

    bench = Bench(net, step)
    want, trace = bench.run(), bench.record()
    stages = find_chain(trace).stages
    assert len(stages) >= 9
    made = plan(trace, policy="sqrt")
    assert made.peak_bytes < simulate(trace).peak_bytes
    assert not bench.run(Tape(made)).differs_from(want)
