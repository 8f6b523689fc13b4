"""Three jobs that a new user brings: a ConvNeXt in bf16, a GPT of bytes that accumulates, a U-Net.

Each trains from scratch on data that packages ship, with dropout, AdamW, a schedule and a metric of its own: without
the callback, and with ``CTDRCallback(memory_budget=...)`` and no other argument. Peaks are true ones by the profiler,
of the batches of the first epoch; times are medians of thread time over the later epochs, relative to those of dense
fits before and after. The same seed begins each fit, so that an exact fit ends with the dense fit's weights.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from torch.utils.data import DataLoader

from benchmarks.harness import Benchmark, table
from benchmarks.one_number import MIB, Peaks, Times
from benchmarks.user_jobs import JOBS, Job
from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import CTDRError

_ACCUMULATION_SHARE = 0.55
_VERDICT = re.compile(r"Budget of .+ kept: (\w+(?: measured)?)")


@dataclass(frozen=True)
class Row:
    """One job under one budget.

    Attributes:
        job: Its name.
        accumulate: Batches whose gradients are added up.
        share: The budget over the dense peak.
        dense_bytes: Largest true peak of a batch without the callback.
        budget_bytes: The budget.
        peak_bytes: Largest true peak of a batch; where the budget is refused, the least that its error names.
        dense_metric: Of the last validation without the callback.
        model: The marked row of the table of options, "in parts", or what the error says.
        metric: Of the last validation; None where the budget is refused.
        same_weights: Whether all weights and buffers end as those of the dense fit, to the bit.
        slowdown: Median time of a batch over the dense fit's.
        verdict: Of the closing summary on the budget: "yes", "no", "not measured".
    """

    job: str
    accumulate: int
    share: float
    dense_bytes: int
    budget_bytes: int
    peak_bytes: int
    dense_metric: float
    model: str
    metric: float | None = None
    same_weights: bool = False
    slowdown: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class Fit:
    """A fit that is over.

    Attributes:
        module: Trained.
        metric: Of the last validation.
        peak_bytes: Largest true peak of a batch.
        batch_s: Median thread time of a batch.
        verdict: On the budget.
    """

    module: LightningModule
    metric: float
    peak_bytes: int
    batch_s: float
    verdict: str

    def ends_as(self, other: Fit) -> bool:
        """Whether all weights and buffers are another fit's, to the bit."""
        mine, theirs = self.module.state_dict(), other.module.state_dict()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


class _Listener(logging.Handler):
    """Hears the closing summary."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict = ""

    def emit(self, record: logging.LogRecord) -> None:
        found = _VERDICT.search(record.getMessage())
        self.verdict = found[1] if found else self.verdict


def fitted(job: Job, accumulate: int, *callbacks: Callback, profiled: int = 1) -> Fit:
    """A fit, from the same seed as any other of the job.

    Args:
        job: What is fitted.
        accumulate: Batches whose gradients are added up.
        callbacks: Of the trainer.
        profiled: Epochs whose peaks are measured; without them, the fit has one epoch, for its times.
    """
    seed_everything(1, verbose=False)
    module, (train, held_out) = job.module(), job.data()
    peaks, times, listener = Peaks(first_counted=accumulate + 2, epochs=profiled), Times(), _Listener()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    epochs = job.epochs if profiled else 1
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, precision=job.precision, accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0, callbacks=[*callbacks, peaks, times], **quiet,
    )  # fmt: skip
    # The logger that Lightning writes to: `pytorch_lightning`, where it is imported as well, puts its own there.
    logger = rank_zero_module.log
    logger.addHandler(listener)
    try:
        trainer.fit(module, DataLoader(train, job.size, shuffle=True), DataLoader(held_out, 4 * job.size))
    finally:
        logger.removeHandler(listener)
    metric = float(trainer.callback_metrics["val/metric"])
    later_s = times.seconds[profiled * len(times.seconds) // epochs :]
    return Fit(module, metric, peaks.most_bytes, median(later_s), listener.verdict)


def measured(name: str, accumulate: int, share: float, dense: Fit) -> Row:
    """A job under a budget, by the callback with no other argument."""
    job, budget = JOBS[name], int(share * dense.peak_bytes)
    callback = CTDRCallback(memory_budget=budget)
    print(f"\n== {name}, accumulate {accumulate}, {share:g} of {dense.peak_bytes / MIB:.1f} MiB ==", flush=True)
    known = (name, accumulate, share, dense.peak_bytes, budget)
    try:
        fit = fitted(job, accumulate, callback)
    except CTDRError as error:
        return Row(*known, getattr(error, "least_peak_bytes", 0), dense.metric, str(error))
    dense_s = (dense.batch_s + fitted(job, accumulate, profiled=0).batch_s) / 2
    options = callback.fit.options if callback.fit is not None else ()
    model = next((option.model for option in options if option.is_chosen), "in parts")
    return Row(
        *known, fit.peak_bytes, dense.metric, model, fit.metric, fit.ends_as(dense), fit.batch_s / dense_s, fit.verdict
    )  # fmt: skip


def figures(
    *,
    jobs: str = "ConvNeXt GPT U-Net",
    shares: Sequence[float] = (_ACCUMULATION_SHARE, 0.37),
    accumulated: Sequence[int] = (1, 2, 4, 8),
) -> Iterator[Row]:
    """Every budget of each job, then the GPT with other numbers of accumulated batches under the first budget.

    Args:
        jobs: Their names.
        shares: Budgets over the dense peak.
        accumulated: Batches whose gradients the GPT adds up.
    """
    for name in jobs.split():
        accumulate = JOBS[name].accumulate
        others = [n for n in accumulated if n != accumulate] if name == "GPT" else []
        for n_batches, asked in [(accumulate, shares), *((n, shares[:1]) for n in others)]:
            dense = fitted(JOBS[name], n_batches)
            for share in asked:
                yield measured(name, n_batches, share, dense)


def _cells(row: Row) -> str:
    known = f"{row.share:g} | {row.dense_bytes / MIB:.1f} MiB | {row.dense_metric:.4f}"
    if row.metric is None:
        return f"{known} | refused, least {row.peak_bytes / row.dense_bytes:.2f} | | | |"
    model = "all layers" if row.model == "dense" else row.model
    change = "equal" if row.same_weights else f"{row.metric - row.dense_metric:+.4f}"
    kept = "yes" if row.peak_bytes <= row.budget_bytes else "no"
    measured = f"{row.peak_bytes / row.budget_bytes:.3f} | x{row.slowdown:.2f} | {kept}, said: {row.verdict}"
    return f"{known} | {model} | {row.metric:.4f}, {change} | {measured}"


def _is_job(row: Row) -> bool:
    return row.accumulate == JOBS[row.job].accumulate


def _is_gpt(row: Row) -> bool:
    return row.job == "GPT" and row.share == _ACCUMULATION_SHARE


_HEAD = "budget | dense peak | dense metric | chosen | metric | peak / budget | time | kept"
TABLES = {
    "jobs": table(Row, f"job | {_HEAD}", lambda row: f"{row.job} | {_cells(row)}", _is_job),
    "accumulation": table(Row, f"accumulated | {_HEAD}", lambda row: f"{row.accumulate} | {_cells(row)}", _is_gpt),
}
BENCHMARK = Benchmark("new_user", figures, {"rows": Row}, TABLES, key=("job", "accumulate", "share"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
