"""Lightning's changes to the classes of data loaders, taken back where it leaves them behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import BatchSampler, DataLoader


@contextmanager
def loader_classes_kept() -> Iterator[None]:
    """Put ``DataLoader``, ``BatchSampler`` and their subclasses back as they were, where the block raises.

    Lightning 2.6 exchanges their ``__init__`` while it asks for a loader, and leaves the other one in place where that
    raises. Loaders that are made later are then built anew with wrong arguments: ``predict`` ended with "got multiple
    values for argument 'batch_size'".

    Example:
        >>> with loader_classes_kept():
        ...     loader = DataLoader([1, 2, 3])
    """
    before = {kind: dict(vars(kind)) for base in (DataLoader, BatchSampler) for kind in _with_subclasses(base)}
    try:
        yield
    except BaseException:
        for kind, names in before.items():
            _put_back(kind, names)
        raise


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for each in below:
        yield from _with_subclasses(each)


def _put_back(kind: type, names: dict[str, object]) -> None:
    for name in set(vars(kind)) - set(names):
        delattr(kind, name)
    for name, value in names.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
