"""Two gloo ranks: under FSDP2, DDP and tensor parallelism a plan leaves what the plain step leaves, on every rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.memory.harness import Bench, check, everything_dropped, planned


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    """Residual blocks, an old output used again much later, a nested block, and layers of the root's own."""

    def __init__(self, norm: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, width), norm(width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.outer = nn.Sequential(nn.Linear(width, width), Block(width), nn.Tanh())
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        start = self.norm(self.first(x)).relu_()
        hidden = early = self.blocks[0](start)
        for block in self.blocks[1:]:
            hidden = block(hidden).tanh()
        hidden = self.outer(hidden * early.sigmoid())
        return self.last(hidden.exp())


def _sharded(norm: type[nn.Module], **options) -> nn.Module:
    net = Net(norm)
    for unit in (*net.blocks, net.outer[1], net.outer):
        fully_shard(unit, **options)
    return fully_shard(net, **options)


def _step(net: nn.Module) -> torch.Tensor:
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    return net(inputs).float().square().mean()


def _check_peak(bench: Bench) -> None:
    """The recorded lives of storages, gathered weights among them, are those that are counted."""
    trace = bench.record()
    trace = replace(trace, ops=tuple(replace(op, temp_bytes=0) for op in trace.ops))  # the meter sees no workspaces
    measured = min(bench.peak_bytes() for _ in range(3))  # a thread of gloo's may free a buffer late
    assert planned(trace, {}).peak_bytes - trace.resident_bytes == measured


def _check_fsdp() -> None:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for norm, options in ((nn.BatchNorm1d, {}), (nn.LayerNorm, {"mp_policy": half})):
        torch.manual_seed(0)
        bench = Bench(_sharded(norm, **options).train(), _step)
        check(bench, seeds=4)
        trace = bench.record()
        crossing = [v for v in trace.values if v.pin == "crosses an FSDP unit"]
        assert len(crossing) >= 7
        assert not planned(trace, everything_dropped(trace)).keeps_all
        assert all(isinstance(p, DTensor) for p in bench.model.parameters())
        if not options:  # reduced in another dtype than computed, gradients pass through a buffer inside of gloo
            _check_peak(bench)


class Repeated(nn.Module):
    """One unit that runs twice: its weights are gathered twice in the forward and twice in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 16), Block(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.block(self.block(self.first(x)).tanh()).sigmoid())


def _check_fsdp_gathers() -> None:
    for options in ({}, {"shard_placement_fn": lambda weight: Shard(weight.ndim - 1)}):
        torch.manual_seed(0)
        net = Repeated()
        fully_shard(net.block, **options)
        bench = Bench(fully_shard(net, **options).train(), _step)
        check(bench, seeds=2)
        _check_peak(bench)
        trace = bench.record()
        made_by = {trace.ops[trace.values[v].op].name for v in trace.droppable}
        assert "aten.addmm.default" in made_by, "weights are back when a unit's backward runs"


def _check_ddp() -> None:
    for options in ({}, {"gradient_as_bucket_view": True, "static_graph": True}):
        torch.manual_seed(0)
        bench = Bench(DistributedDataParallel(Net(nn.BatchNorm1d).train(), **options), _step)
        for _ in range(3):  # the first steps settle the buckets: their ops differ
            bench.run()
        check(bench, seeds=4)


def _check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), Block(16)).train()
    styles = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(),
        "4.wide": ColwiseParallel(),
        "4.narrow": RowwiseParallel(),
    }
    bench = Bench(parallelize_module(net, mesh, styles), lambda net: net(torch.ones(6, 8).cumsum(0)).square().mean())
    check(bench, seeds=4)
    trace = bench.record()
    assert not any("DTensor" in op.pin for op in trace.ops)
    made_by = {trace.ops[trace.values[v].op].name for v in trace.droppable if trace.values[v].saves}
    assert {"aten.addmm.default", "aten.gelu.default", "aten.tanh.default"} <= made_by
    _check_peak(bench)


class Attention(nn.Module):
    """Heads of this rank alone, written in place, and a sum in which sequences are split."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        return torch.relu_(self.out(mixed) + x)


def _check_sequence_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(8, 16), Attention(), Block(16), nn.Linear(16, 4)).train()
    split, whole = Shard(1), Replicate()
    styles = {
        "0": ColwiseParallel(output_layouts=split),
        "1.norm": SequenceParallel(),
        "1.qkv": ColwiseParallel(input_layouts=split, output_layouts=whole),
        "1.out": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "2.norm": SequenceParallel(),
        "2.wide": ColwiseParallel(input_layouts=split),
        "2.narrow": RowwiseParallel(output_layouts=split),
        "3": ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    net = parallelize_module(net, mesh, styles)
    check(Bench(net, lambda net: net(torch.ones(3, 6, 8).cumsum(1)).square().mean()), seeds=4)


def _check_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(nn.Linear(8, 16), Block(16), nn.Tanh(), Block(16), nn.Linear(16, 4)).train()
    for block in (net[1], net[3]):
        parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    check(Bench(fully_shard(net, mesh=mesh["data"]), _same_everywhere), seeds=4)


def _same_everywhere(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(6, 8).cumsum(0)).square().mean()


CHECKS = {
    "fsdp": _check_fsdp,
    "fsdp gathers": _check_fsdp_gathers,
    "ddp": _check_ddp,
    "tensor parallel": _check_tensor_parallel,
    "sequence parallel": _check_sequence_parallel,
    "two dimensions": _check_two_dimensions,
}


RANKS = {"two dimensions": 4}


def _worker(rank: int, name: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS.get(name, 2))
    try:
        CHECKS[name]()
    finally:
        dist.destroy_process_group()
    # A gloo thread that still frees a tensor aborts an interpreter that ends meanwhile (pytorch pull request 179291).
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "fsdp gathers")) for n in CHECKS])
def test_a_plan_leaves_what_the_plain_step_leaves(name: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_worker, (name, str(tmp_path / "store")), nprocs=RANKS.get(name, 2))
