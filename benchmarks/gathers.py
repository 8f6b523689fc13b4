"""FSDP2 units whose weights stay gathered: all freed, all kept, and chosen unit by unit, at equal budgets.

Two processes train on gloo on this machine, one thread each. Its processes exchange weights through memory, so each
gather is slowed down: it sleeps for the time that a link of a given rate would take. A step is the time of a whole
batch, its optimizer included: the median of some. Peaks are measured in two further batches.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Benchmark, table
from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory import Plan
from ctdr_lightning.memory.account.gathers import StayingUnits, choose_staying
from ctdr_lightning.memory.traces.gathers import gathers_of, without_seconds
from ctdr_lightning.trainer.training_step import unit_weights

MIB = 2**20
RANKS, SETTLED, METERED = 2, 5, 2  # the first batches are recorded, watched and verified
WAYS = ("all freed", "all kept", "chosen")
# FSDP2 calls this; before torch 2.13 under its older name.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@dataclass(frozen=True)
class Row:
    """One way at one budget.

    Attributes:
        net: Name of the net.
        share: The budget over the unplanned peak with all units freed.
        way: All freed, all kept, or chosen.
        budget_bytes: The budget.
        kept: Units whose weights stay.
        units: Units that could.
        peak_bytes: Measured.
        step_s: Seconds of a step.
        equal: Whether the losses are those of the first way.
        predicted_s: Seconds of a step that the plan predicts, with the gathers that it waits for.
    """

    net: str
    share: float
    way: str
    budget_bytes: int
    kept: int
    units: int
    peak_bytes: int
    step_s: float
    equal: bool
    predicted_s: float | None = None


class Net(LightningModule):
    """Blocks between a first and a last layer.

    Args:
        first: The first layer.
        blocks: One unit each.
        last: The last layer.
    """

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Shard each block, and the rest."""
        for unit in (*self.blocks, self):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each sample or token."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Classify each sample or token."""
        loss = F.cross_entropy(self(batch[0]).flatten(0, -2), batch[1].flatten())
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def transformer() -> tuple[Net, TensorDataset, int]:
    """Activations take most of its bytes: the net, enough data for any run, samples of a batch."""
    options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(128, 4, 512, 0.0, **options) for _ in range(6)]
    words = torch.randint(500, (512, 97), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(words[:, :-1].clone(), words[:, 1:].clone())
    return Net(nn.Embedding(500, 128), blocks, nn.Linear(128, 500)), data, 8


def mlp() -> tuple[Net, TensorDataset, int]:
    """Weights take most of its bytes: the net, enough data for any run, samples of a batch."""
    blocks = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Tanh(), nn.LayerNorm(256))
        for _ in range(6)
    ]
    images = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, torch.randint(10, (8192,), generator=torch.Generator().manual_seed(1)))
    return Net(nn.Linear(64, 256), blocks, nn.Linear(256, 10)), data, 192


NETS: dict[str, Callable[[], tuple[Net, TensorDataset, int]]] = {"transformer": transformer, "MLP": mlp}

# Shares at which some weights fit and all do not, in nets whose activations leave room for all at larger ones.
_TIGHT = {"transformer": (0.385,)}


class Meter(Callback):
    """Times the settled batches, then has the last ones measured.

    Args:
        ours: The callback whose run is measured.
        rounds: Batches that are timed.
    """

    def __init__(self, ours: CTDRCallback, rounds: int) -> None:
        self._ours, self._rounds, self._start_s = ours, rounds, 0.0
        self.seconds: list[float] = []
        self.peaks: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        if batch_idx >= SETTLED + self._rounds:
            self._ours.run.steps.meters.batch_begins(metered=True)
        self._start_s = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it, or read the peak."""
        if SETTLED <= batch_idx < SETTLED + self._rounds:
            self.seconds.append(perf_counter() - self._start_s)
        measured = self._ours.run.steps.meters.measured
        if batch_idx >= SETTLED + self._rounds and measured is not None:
            self.peaks.append(measured.peak_bytes)


def _slowed(bytes_per_s: float, seen: list[int]) -> Callable[..., Any]:
    gather = getattr(dist, _GATHER)

    def slow(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(output.nbytes)
        found = gather(output, *args, **kwargs)
        sleep(output.nbytes / bytes_per_s)
        return found

    return slow


def _forced(way: str, seconds: dict[str, float]) -> Callable[..., StayingUnits]:
    def choose(account: Any, gathers: Any, gather_s: Mapping[str, float], *args: Any) -> StayingUnits:
        seconds.update(gather_s)
        if way == "chosen":
            return choose_staying(account, gathers, gather_s, *args)
        return StayingUnits(tuple(gather.unit for gather in gathers) if way == "all kept" else ())

    return choose


def _predicted_s(made: Plan, seconds: Mapping[str, float]) -> float:
    """A planned step's seconds: of its ops, of recomputation, of each unit's gather, of those for the backward."""
    again = gathers_of(made.trace)
    ops_s = without_seconds(made.trace, again).seconds + made.wall_seconds - made.trace.seconds
    return ops_s + sum(seconds.values()) + sum(seconds[gather.unit] for gather in again)


def _train(rank: int, port: int, name: str, way: str, budget_bytes: int, rounds: int, rate: float, path: str) -> None:
    """One process of a run; the first one writes what it has measured."""
    world = {"WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in world.items()})
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    net, data, batch_size = NETS[name]()
    ours = CTDRCallback(rank=None, memory_budget=budget_bytes, verbose=False)
    meter, n_steps = Meter(ours, rounds), SETTLED + rounds + METERED
    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, _GATHER, _slowed(rate, seen := [])))
        stack.enter_context(patch.object(unit_weights, "choose_staying", _forced(way, gather_s := {})))
        trainer = Trainer(
            callbacks=[ours, meter], strategy=strategy, devices=RANKS, accelerator="cpu", max_steps=n_steps,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            log_every_n_steps=1000,
        )  # fmt: skip
        trainer.fit(net, DataLoader(data, batch_size))
    if len(seen) < n_steps * len(net.blocks):
        raise RuntimeError(f"FSDP2 does not gather by torch.distributed.{_GATHER}: no gather was slowed down")
    if rank == 0:
        kept = len(ours.run.memory.units.key)
        found = Row(
            name, 1.0, way, budget_bytes, kept, len(net.blocks), max(meter.peaks), median(meter.seconds), equal=True,
            predicted_s=_predicted_s(ours.run.memory.session.plan, gather_s),
        )  # fmt: skip
        Path(path).write_text(json.dumps([asdict(found), net.losses]))


def trained(name: str, way: str, budget_bytes: int, rounds: int, rate: float) -> tuple[Row, list[float]]:
    """Train in two processes.

    Args:
        name: Of the net.
        way: One of ``WAYS``.
        budget_bytes: The budget.
        rounds: Batches that are timed.
        rate: Bytes per second of the link.

    Returns:
        The measurements, and the losses.
    """
    with socket.socket() as probe, TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port, path = probe.getsockname()[1], Path(folder) / "row.json"
        probe.close()
        arguments = (port, name, way, budget_bytes, rounds, rate, str(path))
        torch.multiprocessing.spawn(_train, arguments, nprocs=RANKS)
        row, losses = json.loads(path.read_text())
    return Row(**row), losses


def figures(
    nets: tuple[str, ...] = tuple(NETS),
    *,
    shares: tuple[float, ...] = (1.05, 0.85),
    rounds: int = 7,
    rate: float = 2e7,
) -> Iterator[Row]:
    """Measure each net, at given budgets and at its own tight one.

    Args:
        nets: Names of nets.
        shares: Budgets over the unplanned peak with all units freed.
        rounds: Batches that are timed.
        rate: Bytes per second of the link that each gather is slowed down to.
    """
    for name in nets:
        whole, losses = trained(name, "all freed", 2**40, 1, 1e12)
        for share in (*shares, *_TIGHT.get(name, ())):
            for way in WAYS:
                row, found = trained(name, way, int(share * whole.peak_bytes), rounds, rate)
                yield replace(row, share=share, equal=found[: len(losses)] == losses)


def _line(row: Row) -> str:
    peak = f"{row.peak_bytes / MIB:.1f} MiB" + ", over it" * (row.peak_bytes > row.budget_bytes)
    budget = f"{row.net} | {row.share:.2f}: {row.budget_bytes / MIB:.1f} MiB"
    predicted = "not noted" if row.predicted_s is None else f"{1000 * row.predicted_s:.0f} ms"
    return f"{budget} | {row.way} | {row.kept} of {row.units} | {peak} | {1000 * row.step_s:.0f} ms | {predicted}"


TABLE = table(Row, "net | budget | way | units that stay | measured peak | step | predicted step", _line)
BENCHMARK = Benchmark(
    "gathers", figures, {"rows": Row}, {"table": TABLE}, choices={"nets": NETS}, key=("net", "share", "way")
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
