"""The shortest line, ``CTDRCallback(memory_budget=...)``, on ten trained networks, from 0.8 to 0.3 of the peak.

One thread, the networks of ``trained_nets``, each row a fit of Lightning's with Adam at a learning rate of zero, so
that its score is that of the answer before any training. Peaks are true ones of whole batches of the fit by the
profiler, weights, gradients and Adam's moments included; times are medians of thread time over rounds in which the
answer and the dense step take turns; where batches run in parts, over the batches of one fit each. Choosing is in
seconds by the clock. The dense peak is that of a fit without the callback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import thread_time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils.data import DataLoader

from benchmarks.harness import Benchmark, pivot
from benchmarks.steps import AdamStep, in_turns, keep_freed_memory
from benchmarks.trained_nets import Net, trained
from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory.recorder.profiler import memory_profiler

MIB = 2**20
# Of an epoch. The first batch is recorded under a profiler of its own; the first that is profiled here does not see
# the frees of what was there before it, as the last batch's gradients.
_BATCHES, _FIRST_PROFILED, _FIRST_COUNTED = 32, 2, 3


@dataclass(frozen=True)
class Row:
    """One network under one budget.

    Attributes:
        net: Its letter.
        share: The budget over the dense peak.
        dense_bytes: Largest true peak of a batch without the callback.
        budget_bytes: The budget.
        peak_bytes: Largest true peak of a batch; where the budget is refused, the least that its error names.
        dense_score: In percent, or nats.
        score: The same of the answer, before any training; None where the budget is refused.
        slowdown: Its step over the dense step.
        model: The marked row of the table of options, or "in parts".
        choosing_s: Seconds of the choice.
        exact_slowdown: Predicted for the dense model within this budget; None where no plan of it fits.
    """

    net: str
    share: float
    dense_bytes: int
    budget_bytes: int
    peak_bytes: int
    dense_score: float
    score: float | None = None
    slowdown: float | None = None
    model: str = ""
    choosing_s: float | None = None
    exact_slowdown: float | None = None


class _Module(LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.model, self._task = deepcopy(net.model), (net.loss,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._task[0](self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.0)


class Peaks(Callback):
    """The true peak of each batch: the bytes before it, and the profiler's events meanwhile.

    Args:
        first_counted: The first batch that counts; some before it are profiled, so that frees of what they left count.
        epochs: Later epochs are not profiled.

    Attributes:
        most_bytes: The largest.
    """

    def __init__(self, first_counted: int = _FIRST_COUNTED, epochs: int = 1) -> None:
        self._first_counted, self._epochs = first_counted, epochs
        self.most_bytes = self._standing_bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to profile the batch."""
        if self._profiles(trainer, batch_idx):
            self._standing_bytes = _standing_bytes(pl_module, trainer.optimizers[0], batch)
            self._profiler = memory_profiler()
            self._profiler.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the batch's peak."""
        if not self._profiles(trainer, batch_idx):
            return
        self._profiler.stop()
        if batch_idx >= self._first_counted:
            events = [e for e in profiler_events(self._profiler) if e.name() == "[memory]"]
            ordered = [e.nbytes() for e in sorted(events, key=_start_ns) if e.device_type() == DeviceType.CPU]
            self.most_bytes = max(self.most_bytes, self._standing_bytes + max(accumulate(ordered, initial=0)))

    def _profiles(self, trainer: Any, batch_idx: int) -> bool:
        return trainer.current_epoch < self._epochs and batch_idx >= _FIRST_PROFILED


class Times(Callback):
    """Thread time of each batch.

    Attributes:
        seconds: Of each, in order.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self.seconds.append(-thread_time())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop it."""
        self.seconds[-1] += thread_time()


def _standing_bytes(module: LightningModule, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor]) -> int:
    # not in the callback: one that reads gradients keeps the optimizer's step out of the backward
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    state = [entry for of in optimizer.state.values() for entry in of.values()]
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *gradients, *state, *batch))


def _start_ns(event: Any) -> int:
    return event.start_ns()


def fitted(net: Net, batches: Sequence[Any], callbacks: Iterable[Callback]) -> _Module:
    """A module after a fit of one epoch."""
    module = _Module(net)
    module.train()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[*callbacks], **quiet)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


def trained_for(net: Net, batches: Sequence[Any], callbacks: Iterable[Callback]) -> tuple[_Module, int]:
    """A fit of one epoch; returns the module and the largest peak of its batches."""
    peaks = Peaks()
    return fitted(net, batches, [*callbacks, peaks]), peaks.most_bytes


def measured(net: Net, batches: Sequence[Any], share: float, dense_bytes: int, rounds: int) -> Row:
    """One network under one budget, by the callback with no other argument."""
    dense_score = net.score(net.reestimated(deepcopy(net.model)))
    budget = int(share * dense_bytes)
    callback = CTDRCallback(memory_budget=budget)
    try:
        module, peak = trained_for(net, batches, [callback])
    except CTDRError as error:
        least = getattr(error, "least_peak_bytes", 0)
        return Row(net.name, share, dense_bytes, budget, least, dense_score, model=str(error).splitlines()[0])
    fit, score = callback.fit, net.score(net.reestimated(deepcopy(module.model)))
    if fit is None:
        slowdown = _in_parts(net, batches, budget)
        return Row(net.name, share, dense_bytes, budget, peak, dense_score, score, slowdown, "in parts")
    dense = AdamStep("dense", deepcopy(net.model).train(), batches[0], net.loss)
    ours = AdamStep("ours", module.model.train(), batches[0], net.loss, fit.plan)
    (_, dense_s), (_, ours_s) = in_turns([dense.step, ours.step], rounds, warm_up=True)
    chosen = next(option for option in fit.options if option.is_chosen)
    exact_s = next((row.seconds for row in fit.considered if row.resource == "dense"), 0.0)
    return Row(
        net.name, share, dense_bytes, budget, peak, dense_score, score, ours_s / dense_s, chosen.model, fit.search_s,
        exact_s / fit.dense_s if exact_s else None,
    )  # fmt: skip


def _in_parts(net: Net, batches: Sequence[Any], budget: int) -> float:
    """Time of a batch that runs in parts over that of a plain one."""
    plain, ours = Times(), Times()
    fitted(net, batches, [plain])
    fitted(net, batches, [CTDRCallback(memory_budget=budget), ours])
    return median(ours.seconds[_FIRST_COUNTED:]) / median(plain.seconds[_FIRST_COUNTED:])


def figures(
    *,
    nets: str = "CDGRVULXMH",
    shares: Sequence[float] = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3),
    seed: int = 0,
    rounds: int = 15,
) -> Iterator[Row]:
    """Every budget of each network.

    Args:
        nets: Their letters.
        shares: Budgets over the dense peak.
        seed: Of their training.
        rounds: Behind each time.
    """
    keep_freed_memory()  # else one plan of U took x1.24 in one process and x1.81 in another
    for name in nets:
        net = trained(name, seed)
        size = len(net.batches[0][0])
        # copied: slices of one long text would count as the batch's memory
        batches = [tuple(t.clone() for t in batch) for batch in net.batches if len(batch[0]) == size][:_BATCHES]
        _, dense_bytes = trained_for(net, batches, [])
        for share in shares:
            yield measured(net, batches, share, dense_bytes, rounds)


def _cell(row: Row) -> str:
    if row.score is None:
        return f"no: {row.peak_bytes / row.dense_bytes:.2f}" if row.peak_bytes else "no"
    broken = "" if row.peak_bytes <= row.budget_bytes else f", **peak {row.peak_bytes / row.dense_bytes:.3f}**"
    cut = f", {row.model}, {row.score - row.dense_score:+.2g}"
    change = {"dense": "", "in parts": ", in parts"}.get(row.model, cut)
    return f"x{row.slowdown:.2f}{change}{broken}"


def _line(row: Row) -> str:
    return f"{row.net} | {row.dense_bytes / MIB:.1f} MiB, {row.dense_score:.4g}"


def _longest(rows: Sequence[Row]) -> str:
    return f"{max((row.choosing_s or 0.0 for row in rows), default=0.0):.0f} s"


TABLE = pivot(
    Row, "network | dense", _line, "{share:g}", _cell, right=("longest choice", _longest), by="{net}"
)  # fmt: skip
BENCHMARK = Benchmark("one_number", figures, {"rows": Row}, {"table": TABLE}, key=("net", "share"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
