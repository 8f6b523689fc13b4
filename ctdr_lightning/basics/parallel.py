"""Layers are independent: several at a time, one thread each.

Small eigenproblems gain little from many threads inside, and on a busy machine threads that wait for each other make
them ten times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ctdr_lightning.basics.progress_bar import track

T = TypeVar("T")
R = TypeVar("R")
# Chosen, not tuned: each worker holds the tensors of one layer's factorization.
_MOST_WORKERS = 8


def each(
    function: Callable[[T], R], items: Sequence[T], label: str, *, progress: bool = True, parallel: bool = True
) -> list[R]:
    """Apply a function to every item, in order of the items, on as many threads as torch may use.

    Args:
        function: Called on each item; must draw no random number and measure no time.
        items: Independent of each other.
        label: Name of the work, for the progress bar.
        progress: Whether to show one.
        parallel: False does one after another, with all threads inside: for weights on an accelerator.
    """
    if not parallel:
        return list(track(map(function, items), label, total=len(items), enabled=progress))
    n_threads = torch.get_num_threads()
    workers = min(n_threads, _MOST_WORKERS)
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(track(pool.map(function, items), label, total=len(items), enabled=progress))
        finally:
            torch.set_num_threads(n_threads)
