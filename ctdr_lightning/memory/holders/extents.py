"""Which parts of a preallocated range are taken: first fit, neighbours joined when they are given back."""

from __future__ import annotations

from bisect import insort


class Extents:
    """Free and taken parts of a growing range of bytes.

    Args:
        granule: All parts are multiples of this.

    Attributes:
        size: How long the range is so far.

    Example:
        >>> extents = Extents(granule=4096)
        >>> first, second = extents.take(5000), extents.take(100)
        >>> extents.give_back(first, 5000)
        >>> first, second, extents.take(8000), extents.size
        (0, 8192, 0, 12288)
    """

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.size = 0
        self._free: list[tuple[int, int]] = []

    def round_up(self, n_bytes: int) -> int:
        """Bytes that a part of so many takes."""
        return max(-(-n_bytes // self.granule), 1) * self.granule

    def take(self, n_bytes: int) -> int:
        """Take a part; the range grows where none is free. Returns where it begins."""
        wanted = self.round_up(n_bytes)
        for index, (start, length) in enumerate(self._free):
            if length >= wanted:
                self._free[index : index + 1] = [(start + wanted, length - wanted)] if length > wanted else []
                return start
        start = self.size
        if self._free and sum(self._free[-1]) == self.size:  # the free end is part of what is taken
            start = self._free.pop()[0]
        self.size = start + wanted
        return start

    def give_back(self, start: int, n_bytes: int) -> None:
        """A part is free again."""
        insort(self._free, (start, self.round_up(n_bytes)))
        joined: list[tuple[int, int]] = []
        for begin, length in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((begin, length))
        self._free = joined
