"""Low-rank training from scratch: cut untrained, cut when the spectra have settled, or not at all, at equal epochs.

Four networks are trained from their initialisation under a one-cycle schedule: the convolutions C, the MLP-Mixer X and
the residual net R of `trained_nets`, on digits, and a character GPT of two blocks, G. A row a network and way, each
over the seeds. Seconds are those of the training thread: of all steps, and of the whole fit with cuts, choices of ranks
and BatchNorm re-estimation, without validation. The last way is a dense run of as many whole epochs, with a schedule of
that length, as fit into the time that the steps of the run with ``cut_epochs="auto"`` and the same seed took.

The constants of the criterion were chosen by the scores of G, and the ranks of X and C; R judges them.

Three networks with BatchNorm are also trained under budgets that no plan of the whole batch keeps, by a budget and no
other argument: with batches in parts that BatchNorm normalises by themselves, and where that is forbidden.

    python -m benchmarks.from_scratch C R U --ways "no budget" "budget" "budget, BatchNorm whole"
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median, stdev
from time import thread_time
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from benchmarks.harness import Benchmark, table
from benchmarks.one_number import Peaks
from benchmarks.trained_nets import BY_ADAM, TASKS, CharacterGPT, Net, library_text
from ctdr_lightning import CTDRCallback, Memory, Recovery

RANK = 0.25


class Setting(NamedTuple):
    """One network's training.

    Args:
        epochs: In all.
        batches: Of an epoch, drawn without replacement; 0 for all.
    """

    epochs: int
    batches: int = 0


SETTINGS = {"C": Setting(10), "X": Setting(20), "G": Setting(10, 40), "R": Setting(10), "U": Setting(10)}
AUTO, SHORTER = 'cut_epochs="auto"', "dense, fewer epochs"
WAYS = ("dense", "cut at 0", "cut at half", AUTO, SHORTER)
UNBOUND, IN_PARTS, WHOLE = BUDGETED = ("no budget", "budget", "budget, BatchNorm whole")
# Of the dense peak: below the least of all plans of the whole batch, above that of some cut.
SHARES = {"C": 0.36, "R": 0.3, "U": 0.37}


@dataclass(frozen=True)
class Row:
    """One network trained in one way.

    Attributes:
        scores: Held-out accuracy of each seed in percent after the last epoch; of text the mean loss in nats.
        losses: Held-out mean cross-entropy of each seed.
        cuts: Epoch before which each seed's run was cut; -1 for none.
        epochs: Epochs of each seed's run.
        steps: Thread time of the steps of each seed's run, in that of its dense run.
        seconds: The same of the whole fit, cuts included.
        ratio: Times fewer parameters in the end.
        budget: Share of the dense peak; 0 without a budget.
    """

    net: str
    way: str
    scores: list[float]
    losses: list[float]
    cuts: list[int]
    epochs: list[int]
    steps: list[float]
    seconds: list[float]
    ratio: float
    budget: float = 0.0


class Run(NamedTuple):
    """One training: score, cross-entropy, epoch of the cut, epochs, thread seconds of steps and fit, parameters."""

    score: float
    loss: float
    cut: int
    epochs: int
    steps_s: float
    fit_s: float
    parameters: int


class Scratch(LightningModule):
    """A network that is trained from its initialisation.

    Args:
        net: The task and its untrained model.
        rate: Highest learning rate.
        steps: Optimizer steps of the run.
    """

    def __init__(self, net: Net, rate: float, steps: int) -> None:
        super().__init__()
        self.task, self.net, self.rate, self.steps = net, net.model, rate, steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of augmented inputs."""
        return self.task.loss(self.net, (self.task.augment(batch[0]), batch[1]))

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, Any]]]:
        """AdamW for transformers and mixers, SGD with momentum elsewhere; one cycle."""
        weights = self.net.parameters()
        if self.task.name in BY_ADAM:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=self.rate, weight_decay=0.01)
        else:
            optimizer = torch.optim.SGD(weights, lr=self.rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, self.steps, pct_start=0.15)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Clock(Callback):
    """Adds up the thread time of steps, from the batch on the device to the optimizer's update."""

    def __init__(self) -> None:
        self.steps_s, self._started_s = 0.0, 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self._started_s = thread_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """A step is over."""
        self.steps_s += thread_time() - self._started_s


def train(name: str, way: str, number: int, epochs: int) -> Run:
    """Train one network in one way, and score it."""
    torch.manual_seed(number)
    net, rate = _untrained(name)
    loader = _loader(net, SETTINGS[name].batches)
    module = Scratch(net, rate, epochs * len(loader))
    clock, ours = Clock(), _callback(name, way, epochs)
    trainer = _trainer(epochs, [clock, *filter(None, [ours])])
    torch.manual_seed(number)
    started_s = thread_time()
    trainer.fit(module, loader)
    fit_s = thread_time() - started_s
    cut = ours.run.coach.progress.stage_epoch if ours is not None and ours.run.coach is not None else -1
    size = sum(p.numel() for p in net.model.parameters())
    return Run(net.score(net.model), _cross_entropy(net), cut, epochs, clock.steps_s, fit_s, size)


def _untrained(name: str) -> tuple[Net, float]:
    """A task with its untrained network, and the highest learning rate."""
    if name != "G":
        net, _, rate = TASKS[name]()
        return net, rate
    texts = library_text(64, 500, 32)
    return Net("G", CharacterGPT(96, 64, width=96, depth=2), *texts, lambda tokens: tokens, 3e-4, is_text=True), 2e-3


def _trainer(epochs: int, callbacks: list[Callback], **options: Any) -> Trainer:
    return Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=5.0, limit_val_batches=0, **options,
    )  # fmt: skip


def _callback(name: str, way: str, epochs: int) -> CTDRCallback | None:
    if way in ("dense", SHORTER, UNBOUND):
        return None
    if way in BUDGETED:
        memory = Memory(batch_norm_in_parts=False if way == WHOLE else None)
        return CTDRCallback(memory_budget=int(SHARES[name] * _dense_bytes(name)), memory=memory, verbose=False)
    cut_epochs: Any = {"cut at half": [epochs // 2], AUTO: "auto"}.get(way)
    return CTDRCallback(rank=RANK, recovery=Recovery(cut_epochs=cut_epochs), policy="keep", verbose=False)


@cache
def _dense_bytes(name: str) -> int:
    """Largest true peak of a batch without the callback."""
    (net, rate), peaks = _untrained(name), Peaks()
    _trainer(1, [peaks], limit_train_batches=8).fit(Scratch(net, rate, 8), _loader(net, 8))
    return peaks.most_bytes


def _loader(net: Net, batches: int) -> DataLoader:
    size = len(net.batches[0][0])
    data = TensorDataset(*map(torch.cat, zip(*net.batches, strict=True)))
    sampler = RandomSampler(data, num_samples=batches * size if batches else None)
    return DataLoader(data, size, sampler=sampler, drop_last=True)


@torch.no_grad()
def _cross_entropy(net: Net) -> float:
    net.model.eval()
    weights = [len(batch[0]) for batch in net.held_out]
    losses = [float(net.loss(net.model, batch)) * len(batch[0]) for batch in net.held_out]
    return sum(losses) / sum(weights)


def figures(nets: Sequence[str] = ("C", "X", "G", "R"), *, seeds: int = 5, ways: Sequence[str] = WAYS) -> Iterator[Row]:
    """Every way of each network, over its seeds.

    Args:
        nets: Which.
        seeds: How many initialisations.
        ways: Which.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name in nets:
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for number in range(seeds):
            for way in ways:
                runs[way].append(train(name, way, number, _epochs(name, way, runs, number)))
        yield from (_row(name, way, runs) for way in ways)


def _epochs(name: str, way: str, runs: dict[str, list[Run]], number: int) -> int:
    """Epochs of a run: those of the setting, or as many dense ones as take the time of the warm run."""
    epochs = SETTINGS[name].epochs
    if way != SHORTER:
        return epochs
    return max(1, min(epochs, int(epochs * runs[AUTO][number].steps_s / runs["dense"][number].steps_s)))


def _row(name: str, way: str, runs: dict[str, list[Run]]) -> Row:
    own, dense = runs[way], runs["dense" if way in WAYS else UNBOUND]
    scores, losses, cuts, epochs, *_ = (list(column) for column in zip(*own, strict=True))
    pairs = list(zip(own, dense, strict=True))
    steps, seconds = ([run.steps_s / x.steps_s for run, x in pairs], [run.fit_s / x.fit_s for run, x in pairs])
    budget = SHARES[name] if way in (IN_PARTS, WHOLE) else 0.0
    ratio = dense[0].parameters / own[0].parameters
    return Row(name, way, scores, losses, cuts, epochs, steps, seconds, ratio, budget)


def _score(row: Row) -> str:
    spread = stdev(row.scores) if len(row.scores) > 1 else 0.0
    digits = 3 if row.net == "G" else 2
    return f"{mean(row.scores):.{digits}f} ± {spread:.{digits}f}" + (" nats" if row.net == "G" else " %")


def _budget_line(row: Row) -> str:
    cells = [row.net, row.way, f"{row.budget:.2f}" if row.budget else "", _score(row), f"{mean(row.losses):.4f}"]
    return " | ".join([*cells, f"{median(row.steps):.2f}", f"{median(row.seconds):.2f}", f"{row.ratio:.1f}"])


def _line(row: Row) -> str:
    score = _score(row)
    cuts = ", ".join(str(cut) for cut in row.cuts) if max(row.cuts) >= 0 else ""
    epochs = f"{min(row.epochs)}" if min(row.epochs) == max(row.epochs) else f"{min(row.epochs)} to {max(row.epochs)}"
    cells = [row.net, row.way, score, f"{mean(row.losses):.4f}", epochs, cuts, f"{median(row.steps):.2f}"]
    return " | ".join([*cells, f"{median(row.seconds):.2f}", f"{row.ratio:.1f}"])


HEAD = (
    "net |  | score | cross-entropy | epochs | cut before epoch | time of the steps | with the choice of ranks | "
    "times fewer parameters"
)
BUDGET_HEAD = (
    "net |  | budget / dense peak | score | cross-entropy | time of the steps | with the choice | "
    "times fewer parameters"
)
TABLES = {
    "table": table(Row, HEAD, _line, lambda row: row.way in WAYS),
    "budget": table(Row, BUDGET_HEAD, _budget_line, lambda row: row.way in BUDGETED),
}
CHOICES = {"nets": SETTINGS, "ways": (*WAYS, *BUDGETED)}
BENCHMARK = Benchmark("from_scratch", figures, {"rows": Row}, TABLES, CHOICES, ("net", "way"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
