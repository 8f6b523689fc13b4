"""Solvers against tensorly's at equal error, and a whole ResNet-50.

``python -m benchmarks.decompose`` prints, on one thread, seconds and relative error of each decomposition of a
synthetic 512 x 512 x 3 x 3 kernel (power-law spectra, 5 % noise) for our solvers and tensorly's, the least of a few
runs in turns; then the time to decompose ResNet-50 whole on all cores, by each rank rule.

``FOLDER/decompose.json`` keeps the figures; `benchmarks.documents` makes a table of a committed copy of it.
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import tensorly as tl
import torch
from tensorly.decomposition import parafac, partial_tucker
from tensorly.decomposition import tensor_train as tensorly_tt
from torch import Tensor

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.vision_import import import_torchvision
from ctdr_lightning import decompose
from ctdr_lightning.decomposition.algorithms.cp import cp
from ctdr_lightning.decomposition.algorithms.rebuild import rebuild
from ctdr_lightning.decomposition.algorithms.svd import svd
from ctdr_lightning.decomposition.algorithms.tt import tensor_train as our_tt
from ctdr_lightning.decomposition.algorithms.tucker import tucker
from ctdr_lightning.decomposition.algorithms.vbmf import evbmf_rank

SWEEPS = 10
Fit = Callable[[], Any]


@dataclass(frozen=True)
class Solved:
    """Processor seconds and relative error of one decomposition, ours and tensorly's; None where there is none."""

    name: str
    ours_s: float
    ours_error: float | None = None
    theirs_s: float | None = None
    theirs_error: float | None = None


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


def least_seconds(fits: dict[str, Fit], rounds: int) -> dict[str, tuple[float, Any]]:
    """The least processor seconds and last result of each fit, run in turns: a busy machine counts little."""
    found = dict.fromkeys(fits, (math.inf, None))
    for _ in range(rounds):
        for name, fit in fits.items():
            start_s = thread_time()
            result = fit()
            found[name] = (min(found[name][0], thread_time() - start_s), result)
    return found


def compare(title: str, tensor: Tensor, fits: dict[str, Fit], rounds: int) -> Solved:
    """Print one row: seconds and error of ours and tensorly's."""
    cells: list[float] = []
    for seconds, result in least_seconds(fits, rounds).values():
        cells += [seconds, float((rebuild(result).reshape(tensor.shape) - tensor).norm() / tensor.norm())]
    row = Solved(title, *cells)
    print(f"{title:40s} {cells[0]:8.3f} {cells[1]:8.4f}   {cells[2]:8.3f} {cells[3]:8.4f}   {_ratio(row)}", flush=True)
    return row


def _ratio(row: Solved) -> str:
    return f"{row.theirs_s / row.ours_s:.1f}x" if row.theirs_s else ""


def tensorly_fits(n: int, r: int, t: Tensor, grid: Tensor, matrix: Tensor) -> dict[str, Fit]:
    def wrapped(function: Fit) -> Fit:
        def run() -> Any:
            with tl.backend_context("pytorch", local_threadsafe=True):
                return function()

        return run

    taps = torch.eye(t.shape[2])

    def tucker_() -> Any:
        (core, factors), _ = partial_tucker(t, rank=[r, r], modes=[0, 1])
        return tl.tucker_tensor.TuckerTensor((core, [*factors, taps]))

    def svd_() -> Any:
        left, values, right = tl.truncated_svd(matrix, n_eigenvecs=n // 4)
        return tl.cp_tensor.CPTensor((values, [left, right.T]))

    return {
        "tucker": wrapped(tucker_),
        "cp": wrapped(lambda: parafac(t, r, n_iter_max=SWEEPS, init="svd", tol=0)),
        "cp4": wrapped(lambda: parafac(grid, r, n_iter_max=SWEEPS, init="svd", tol=0)),
        "tt": wrapped(lambda: tensorly_tt(grid.permute(1, 2, 3, 0), rank=[1, r, 3 * r, r, 1])),
        "svd": wrapped(svd_),
    }


def solvers(n: int, rounds: int) -> list[Solved]:
    """Print the table of solvers for an n x n x 3 x 3 kernel at rank n / 4."""
    r, t = n // 4, kernel(n, n)
    grid, matrix = t.reshape(n, n, 3, 3), t[..., 4].contiguous()
    theirs = tensorly_fits(n, r, t, grid, matrix)
    train = grid.permute(1, 2, 3, 0)
    print(f"{'':40s} {'ours s    error':>17s}   {'tensorly s error':>17s}")
    rows: dict[str, tuple[Tensor, str, Fit]] = {
        f"Tucker-2, ranks {r}": (t, "tucker", lambda: tucker(t, (r, r))),
        f"CP, 3 factors, R = {r}, {SWEEPS} sweeps": (t, "cp", lambda: cp(t, r, SWEEPS, 0.0, 0)),
        f"CP, 4 factors, R = {r}, {SWEEPS} sweeps": (grid, "cp4", lambda: cp(grid, r, SWEEPS, 0.0, 0)),
        f"TT ({r}, {3 * r}, {r})": (train, "tt", lambda: our_tt(train, (r, 3 * r, r))),
        f"SVD {n} x {n}, rank {n // 4}": (matrix, "svd", lambda: svd(matrix, n // 4)),
    }
    found = [
        compare(title, tensor, {"ours": ours, "tensorly": theirs[name]}, rounds)
        for title, (tensor, name, ours) in rows.items()
    ]
    conditioned = least_seconds({"ours": lambda: cp(t, r)}, 1)["ours"]
    error = float((rebuild(conditioned[1]) - t).norm() / t.norm())
    found.append(Solved("CP as used: to convergence, corrected", conditioned[0], error))
    seconds, rank = least_seconds({"ours": lambda: evbmf_rank(t.flatten(1))}, rounds)["ours"]
    found.append(Solved(f"EVBMF {n} x {9 * n} (rank {rank})", seconds))
    for row in found[-2:]:
        print(f"{row.name:40s} {row.ours_s:8.3f} {row.ours_error or math.nan:8.4f}")
    return found


def resnet50() -> list[Whole]:
    """Print the seconds that ResNet-50 takes whole."""
    net, found = import_torchvision().models.resnet50(), []
    print(f"\nResNet-50 whole, {torch.get_num_threads()} threads")
    for rank, arguments in (
        (0.5, {}), (0.25, {}), ("error=0.5", {}), (0.25, {"allocate": "parameters"}), (64, {"method": "tucker"}),
    ):  # fmt: skip
        model = copy.deepcopy(net)
        wall_s, processor_s = perf_counter(), process_time()
        report = decompose(model, rank=rank, progress=False, **arguments)
        wall_s, processor_s = perf_counter() - wall_s, process_time() - processor_s
        shown = ", ".join(f"{name}={value!r}" for name, value in {"rank": rank, **arguments}.items())
        found.append(Whole(shown.replace("'", '"'), wall_s, processor_s, report.compression))
        taken = f"{wall_s:8.2f} s ({processor_s:.2f} s of processor time)"
        print(f"{shown:40s} {taken}   {report.compression:.2f}x fewer parameters", flush=True)
    return found


def table(text: str, part: str) -> str:
    """One part of a ``decompose.json`` as a Markdown table: ``solvers`` or ``whole``.

    Seconds by the clock are left out: on a busy machine they tell of other work.
    """
    if part == "whole":
        head = ["ResNet-50 whole", "processor s", "fewer parameters"]
        rows = [
            [f"`{row.arguments}`", f"{row.processor_s:.1f}", f"{row.compression:.2f}x"]
            for row in rows_of(text, part, Whole)
        ]
        return markdown(text, [head, *rows])
    cells = [
        [row.name, *map(_cell, (row.ours_s, row.ours_error, row.theirs_s, row.theirs_error), "3434"), _ratio(row)]
        for row in rows_of(text, part, Solved)
    ]
    return markdown(text, [["", "ours s", "error", "tensorly s", "error", ""], *cells])


def _cell(number: float | None, digits: str) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="channels of the kernel")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each solver, the least counts")
    parser.add_argument("--folder", type=Path, default=Path("outputs/decompose"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of tensorly, and of hard cuts, which are asked for here
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    solved = solvers(options.size, options.rounds)
    torch.set_num_threads(n_threads)
    write_figures(options.folder / "decompose.json", solvers=solved, whole=resnet50())


if __name__ == "__main__":
    main()
