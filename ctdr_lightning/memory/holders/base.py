"""The protocols of a holder and of its tickets.

A holder is asked from the thread of the step alone. It moves bytes elsewhere: on threads of its own, or on a stream of
its own. Every buffer on the device is allocated and freed by the asking thread, so that the step's peak depends on when
it asks, never on how fast a link is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ctdr_lightning.basics.registry import Registry


@dataclass(frozen=True, slots=True)
class HolderOptions:
    """Options for making holders.

    Attributes:
        folder: Where the disk's file is; None takes the system's folder for temporary files.
        limit_bytes: Most bytes that a holder may hold; None for no limit.
        device: Type of the device on which the step runs.
    """

    folder: Path | None = None
    limit_bytes: int | None = None
    device: str = "cpu"


class Parcel(Protocol):
    """Tensors on their way out, away, or on their way back.

    Attributes:
        n_bytes: Bytes that it takes where it waits.
    """

    n_bytes: int

    def gone(self) -> None:
        """Wait until the sources are no longer read: from now on they may be freed or written over.

        Raises:
            OffloadError: If they could not be written.
        """
        ...

    def start(self) -> list[Tensor]:
        """Allocate where the tensors will land and start to bring them back; once is enough.

        Returns:
            Where they land; nobody may read it before ``fetch``.
        """
        ...

    def fetch(self) -> list[Tensor]:
        """Wait until they are back.

        Returns:
            The tensors with their contents, flat, in the order in which they were put.

        Raises:
            OffloadError: If they could not be read.
        """
        ...


class Holder(Protocol):
    """A place off the device.

    A holder may have a method ``trim(keep_bytes)`` as well: from now on it needs no more than that.

    Attributes:
        device_bytes: Bytes of the device's memory that it takes all along, staging buffers.
    """

    device_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most that it held so far."""
        ...

    def put(self, tensors: Sequence[Tensor]) -> Parcel:
        """Start to move tensors out.

        Args:
            tensors: Flat and contiguous. Nobody may write to them until the parcel is ``gone``.

        Raises:
            OffloadError: If there is no room for them.
        """
        ...

    def close(self) -> None:
        """Finish or give up pending work and release everything."""
        ...


HOLDERS: Registry[Callable[[HolderOptions], Holder]] = Registry("holder", group="ctdr_lightning.holders")


class Holders(Mapping[str, Holder]):
    """Holders by name, each made when it is first asked for.

    Args:
        options: How they are made.

    Example:
        >>> holders = Holders(HolderOptions(device="cpu"))
        >>> sorted(holders)
        ['disk', 'host']
        >>> holders.close()
    """

    def __init__(self, options: HolderOptions | None = None) -> None:
        self.options = options or HolderOptions()
        self._made: dict[str, Holder] = {}

    def __getitem__(self, name: str) -> Holder:
        if name not in self._made:
            self._made[name] = HOLDERS[name](self.options)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(HOLDERS)

    def __len__(self) -> int:
        return len(HOLDERS)

    @property
    def made(self) -> tuple[Holder, ...]:
        """Those that were asked for."""
        return tuple(self._made.values())

    @property
    def most_pinned_bytes(self) -> int:
        """The most host memory that they had pinned, each by itself."""
        return sum(getattr(holder, "most_pinned_bytes", 0) for holder in self._made.values())

    def trim(self, keep_bytes: Mapping[str, int]) -> None:
        """Release memory that no step needs any more.

        Args:
            keep_bytes: The most that a step puts into each, by name; 0 for a holder that is not listed.
        """
        for name, holder in self._made.items():
            trim = getattr(holder, "trim", None)
            if trim is not None:
                trim(keep_bytes.get(name, 0))

    def close(self) -> None:
        """Close those that were made."""
        while self._made:
            self._made.popitem()[1].close()


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a flat tensor; shape ``(n_bytes,)``, no copy."""
    return tensor.view(torch.uint8)
