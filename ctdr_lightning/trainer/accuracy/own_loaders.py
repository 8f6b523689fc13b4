"""A second data loader to draw from; the one that trains is not advanced."""

from __future__ import annotations

import random
from copy import copy, deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def own_loader(loader: Any) -> Any:
    """Copy a loader such that drawing from the copy moves nothing of the original.

    Samplers, random generators and datasets that keep a place are copied with it; the data are shared.

    Args:
        loader: A `DataLoader`, or an object with ``state_dict``; another one is returned unchanged.

    Example:
        >>> loader = DataLoader(range(8), 4, shuffle=True, generator=torch.Generator())
        >>> before = loader.generator.get_state()
        >>> _ = list(own_loader(loader))
        >>> torch.equal(loader.generator.get_state(), before)
        True
    """
    if not isinstance(loader, DataLoader) and not _keeps_its_place(loader):
        return loader
    own = copy(loader)
    done: dict[int, Any] = {}
    if vars(own).get("num_workers"):
        done[id(loader.dataset)] = loader.dataset  # each worker has a copy already
    vars(own).update(_own_parts(own, done))
    if isinstance(own, DataLoader):
        # DataLoader refuses the assignment of the first; the workers of the second are the epoch's
        vars(own).update(persistent_workers=False, _iterator=None)
    return own


def _keeps_its_place(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _own_parts(thing: Any, done: dict[int, Any]) -> dict[str, Any]:
    """Copies of the parts that move when ``thing`` is drawn from, by name; each is copied once."""
    found = {name: (part, _own(part, done)) for name, part in getattr(thing, "__dict__", {}).items()}
    return {name: own for name, (part, own) in found.items() if own is not part}


def _own(part: Any, done: dict[int, Any]) -> Any:
    if id(part) in done:
        return done[id(part)]
    done[id(part)] = part
    if isinstance(part, _GENERATORS):
        done[id(part)] = deepcopy(part)
    elif isinstance(part, Dataset) and _keeps_its_place(part):
        done[id(part)] = _with_shared_data(part)
    elif isinstance(part, Sampler | Dataset):
        moving = _own_parts(part, done)
        if moving or isinstance(part, Sampler | IterableDataset):
            done[id(part)] = copy(part)
            vars(done[id(part)]).update(moving)
    return done[id(part)]


def _with_shared_data(dataset: Any) -> Any:
    """A copy whose place is its own however deep it is kept; tensors, arrays and further datasets are shared."""
    data = [part for part in vars(dataset).values() if isinstance(part, Tensor | np.ndarray | Dataset)]
    try:
        return deepcopy(dataset, {id(part): part for part in data})
    except Exception:  # objects with a file or a lock cannot be copied completely
        return copy(dataset)
