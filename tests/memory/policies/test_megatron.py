"""Selective recomputation on its ground: a transformer layer with unfused attention."""

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import KEEP, POLICIES, RECOMPUTE, Budget, record, simulate
from ctdr_lightning.memory.policies.megatron import recompute_outputs
from ctdr_lightning.memory.traces.op_kinds import is_attention_core, is_cheap, is_weighted

WIDTH, HEADS, BATCH = 32, 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / 8).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def traced(length):
    torch.manual_seed(0)
    net, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(BATCH, length, WIDTH)
    return record(lambda: net(x).sum())


def kept_bytes(trace, actions):
    saved = {trace.values[v].storage for v in trace.saved if actions.get(v) != RECOMPUTE}
    return sum(trace.storages[s].n_bytes for s in saved)


def test_what_grows_with_the_square_of_the_sequence_is_recomputed():
    """The paper's Equation 2: s b h (34 + 5 a s / h) bytes a layer become 34 s b h."""
    plain, selective = [], []
    for length in (32, 64, 128):
        trace = traced(length)
        plain.append(kept_bytes(trace, {}))
        selective.append(kept_bytes(trace, recompute_outputs(trace, is_attention_core)))
    assert plain[2] - 2 * plain[1] == 4 * (plain[1] - 2 * plain[0]) > 0
    assert selective[2] == pytest.approx(2 * selective[1], rel=0.001)
    assert selective[1] == pytest.approx(2 * selective[0], rel=0.001)


def test_it_is_much_cheaper_than_recomputing_everything():
    """The paper: 2.7 % of the operations for the 175-billion model, against 36 % for whole layers."""
    trace = traced(32)
    trace = trace.with_costs([1.0 if is_weighted(op) else 0.02 for op in trace.ops], {})
    core = simulate(trace, recompute_outputs(trace, is_attention_core)).recompute_seconds
    everything = simulate(trace, recompute_outputs(trace, lambda op: True)).recompute_seconds
    assert core < 0.1 * everything


def test_levels_rise_with_the_budget_s_tightness():
    trace = traced(64)
    assert POLICIES["megatron"](trace, Budget(peak_bytes=simulate(trace).peak_bytes)).actions == {}
    core = recompute_outputs(trace, is_attention_core)
    assert POLICIES["megatron"](trace, Budget(peak_bytes=simulate(trace, core).peak_bytes)).actions == core
    for actions in (core, POLICIES["megatron"](trace, Budget()).actions):
        again = {v for v, action in actions.items() if action == RECOMPUTE}
        held = {v for v, action in actions.items() if action == KEEP}
        assert again
        assert held
        assert not any(is_weighted(trace.ops[trace.values[v].op]) for v in again)
        assert all(is_weighted(trace.ops[trace.values[v].op]) for v in held)


def test_the_residual_stream_stays():
    trace = traced(8)
    sums = {v for v in trace.saved if trace.ops[trace.values[v].op].name == "aten.add.Tensor"}
    assert sums
    assert sums.isdisjoint(POLICIES["megatron"](trace, Budget()).actions)


def test_kinds_of_ops():
    trace = traced(8)
    kinds = {op.name.split(".")[1]: (is_weighted(op), is_attention_core(op), is_cheap(op)) for op in trace.ops}
    assert kinds["addmm"] == (True, False, False)
    assert kinds["bmm"] == kinds["_softmax"] == (False, True, False)
    assert kinds["gelu"] == kinds["native_layer_norm"] == (False, False, True)
