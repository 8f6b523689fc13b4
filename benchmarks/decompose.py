"""Solvers against tensorly's at equal error, and a whole ResNet-50.

On one thread, seconds and relative error of each decomposition of a synthetic 512 x 512 x 3 x 3 kernel (power-law
spectra, 5 % noise) for our solvers and tensorly's, the least of a few runs in turns; then the time to decompose
ResNet-50 whole on all cores, by each rank rule.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import tensorly as tl
import torch
from tensorly.decomposition import parafac, partial_tucker
from tensorly.decomposition import tensor_train as tensorly_tt
from torch import Tensor

from benchmarks.harness import Benchmark, table
from benchmarks.steps import in_turns
from benchmarks.vision_import import import_torchvision
from ctdr_lightning import decompose
from ctdr_lightning.decomposition.algorithms.cp import cp
from ctdr_lightning.decomposition.algorithms.rebuild import rebuild
from ctdr_lightning.decomposition.algorithms.svd import svd
from ctdr_lightning.decomposition.algorithms.tt import tensor_train as our_tt
from ctdr_lightning.decomposition.algorithms.tucker import tucker
from ctdr_lightning.decomposition.algorithms.vbmf import evbmf_rank

SWEEPS = 10
N_THREADS = torch.get_num_threads()
Fit = Callable[[], Any]


@dataclass(frozen=True)
class Solved:
    """Processor seconds and relative error of one decomposition, ours and tensorly's; None where there is none."""

    name: str
    ours_s: float
    ours_error: float | None = None
    theirs_s: float | None = None
    theirs_error: float | None = None

    @property
    def ratio(self) -> str:
        """Times that tensorly takes."""
        return f"{self.theirs_s / self.ours_s:.1f}x" if self.theirs_s else ""


@dataclass(frozen=True)
class Whole:
    """Seconds that a whole network takes: the arguments as written, by the clock and by the processor."""

    arguments: str
    wall_s: float
    processor_s: float
    compression: float


def kernel(n_out: int, n_in: int, n_taps: int = 9, power: float = 0.7) -> Tensor:
    """A tensor whose channel spectra fall as those of trained convolutions do, and five percent of noise."""
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(n_out, n_in, n_taps, generator=generator)
    for mode in (0, 1):
        size = t.shape[mode]
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        t = torch.tensordot(t, basis * torch.arange(1, size + 1) ** -power, dims=([mode], [1])).movedim(-1, mode)
    return t / t.norm() + 0.05 * torch.randn(t.shape, generator=generator) / math.sqrt(t.numel())


def least_seconds(fits: Sequence[Fit], rounds: int) -> list[tuple[float, Any]]:
    """The least processor seconds and last result of each fit, run in turns: a busy machine counts little."""
    results: dict[Fit, Any] = {}
    runs = [lambda fit=fit: results.__setitem__(fit, fit()) for fit in fits]
    return [(thread_s, results[fit]) for fit, (_, thread_s) in zip(fits, in_turns(runs, rounds, min), strict=True)]


def error_of(result: Any, tensor: Tensor) -> float:
    """Relative error of a decomposition."""
    return float((rebuild(result).reshape(tensor.shape) - tensor).norm() / tensor.norm())


def tensorly_fits(n: int, r: int, t: Tensor, grid: Tensor, matrix: Tensor) -> dict[str, Fit]:
    taps = torch.eye(t.shape[2])

    def tucker_() -> Any:
        (core, factors), _ = partial_tucker(t, rank=[r, r], modes=[0, 1])
        return tl.tucker_tensor.TuckerTensor((core, [*factors, taps]))

    def svd_() -> Any:
        left, values, right = tl.truncated_svd(matrix, n_eigenvecs=n // 4)
        return tl.cp_tensor.CPTensor((values, [left, right.T]))

    return {
        "tucker": tucker_,
        "cp": lambda: parafac(t, r, n_iter_max=SWEEPS, init="svd", tol=0),
        "cp4": lambda: parafac(grid, r, n_iter_max=SWEEPS, init="svd", tol=0),
        "tt": lambda: tensorly_tt(grid.permute(1, 2, 3, 0), rank=[1, r, 3 * r, r, 1]),
        "svd": svd_,
    }


def solvers(n: int, rounds: int) -> Iterator[Solved]:
    """Every solver on an n x n x 3 x 3 kernel at rank n / 4."""
    r, t = n // 4, kernel(n, n)
    grid, matrix = t.reshape(n, n, 3, 3), t[..., 4].contiguous()
    theirs = tensorly_fits(n, r, t, grid, matrix)
    train = grid.permute(1, 2, 3, 0)
    rows: dict[str, tuple[Tensor, str, Fit]] = {
        f"Tucker-2, ranks {r}": (t, "tucker", lambda: tucker(t, (r, r))),
        f"CP, 3 factors, R = {r}, {SWEEPS} sweeps": (t, "cp", lambda: cp(t, r, SWEEPS, 0.0, 0)),
        f"CP, 4 factors, R = {r}, {SWEEPS} sweeps": (grid, "cp4", lambda: cp(grid, r, SWEEPS, 0.0, 0)),
        f"TT ({r}, {3 * r}, {r})": (train, "tt", lambda: our_tt(train, (r, 3 * r, r))),
        f"SVD {n} x {n}, rank {n // 4}": (matrix, "svd", lambda: svd(matrix, n // 4)),
    }
    for title, (tensor, name, ours) in rows.items():
        (ours_s, mine), (theirs_s, other) = least_seconds([ours, theirs[name]], rounds)
        yield Solved(title, ours_s, error_of(mine, tensor), theirs_s, error_of(other, tensor))
    ((ours_s, conditioned),) = least_seconds([lambda: cp(t, r)], 1)
    yield Solved("CP as used: to convergence, corrected", ours_s, error_of(conditioned, t))
    ((ours_s, rank),) = least_seconds([lambda: evbmf_rank(t.flatten(1))], rounds)
    yield Solved(f"EVBMF {n} x {9 * n} (rank {rank})", ours_s)


def resnet50() -> Iterator[Whole]:
    """Seconds that ResNet-50 takes whole, by each rank rule."""
    net = import_torchvision().models.resnet50()
    quarter = {"rank": 0.25, "allocate": "parameters"}
    for arguments in ({"rank": 0.5}, {"rank": 0.25}, {"rank": "error=0.5"}, quarter, {"rank": 64, "method": "tucker"}):
        model = copy.deepcopy(net)
        wall_s, processor_s = perf_counter(), process_time()
        report = decompose(model, progress=False, **arguments)
        wall_s, processor_s = perf_counter() - wall_s, process_time() - processor_s
        shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
        yield Whole(shown, wall_s, processor_s, report.compression)


def figures(*, size: int = 512, rounds: int = 3) -> Iterator[Solved | Whole]:
    """Both tables.

    Args:
        size: Channels of the kernel.
        rounds: Runs of each solver; the least counts.
    """
    warnings.simplefilter("ignore")  # of tensorly, and of hard cuts, which are asked for here
    with tl.backend_context("pytorch", local_threadsafe=True):
        yield from solvers(size, rounds)
    torch.set_num_threads(N_THREADS)
    yield from resnet50()


SOLVED = "{name} | {ours_s:.3f} | {ours_error:.4f} | {theirs_s:.3f} | {theirs_error:.4f} | {ratio}"
# Seconds by the clock are left out: on a busy machine they tell of other work.
WHOLE = "`{arguments}` | {processor_s:.1f} | {compression:.2f}x"
TABLES = {
    "solvers": table(Solved, " | ours s | error | tensorly s | error | ", SOLVED),
    "whole": table(Whole, "ResNet-50 whole | processor s | fewer parameters", WHOLE),
}
BENCHMARK = Benchmark("decompose", figures, {"solvers": Solved, "whole": Whole}, TABLES)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
