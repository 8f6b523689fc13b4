"""Which parts of a range are taken: first fit, neighbours joined when they are given back."""

from __future__ import annotations

from bisect import insort


class Extents:
    """Free and taken parts of a range of bytes.

    Args:
        granule: All parts are multiples of this.
        size: How long the range is at first, all of it free.

    Attributes:
        size: How long the range is so far.

    Example:
        >>> extents = Extents(granule=4096)
        >>> first, second = extents.take(5000), extents.take(100)
        >>> extents.give_back(first, 5000)
        >>> first, second, extents.take(8000), extents.size
        (0, 8192, 0, 12288)
    """

    def __init__(self, granule: int, size: int = 0) -> None:
        self.granule = granule
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    @property
    def longest_free_bytes(self) -> int:
        """Length of the longest free part."""
        return max((length for _, length in self._free), default=0)

    @property
    def unused(self) -> bool:
        """Whether nothing is taken."""
        return self.longest_free_bytes == self.size

    def round_up(self, n_bytes: int) -> int:
        """Bytes that a part of so many takes."""
        return max(-(-n_bytes // self.granule), 1) * self.granule

    def find(self, n_bytes: int) -> int | None:
        """Take a part without growing. Returns where it begins; None where no free part is long enough."""
        wanted = self.round_up(n_bytes)
        for index, (start, length) in enumerate(self._free):
            if length >= wanted:
                self._free[index : index + 1] = [(start + wanted, length - wanted)] if length > wanted else []
                return start
        return None

    def take(self, n_bytes: int) -> int:
        """Take a part; the range grows where none is free. Returns where it begins."""
        found = self.find(n_bytes)
        if found is not None:
            return found
        start = self.size
        if self._free and sum(self._free[-1]) == self.size:  # the free end is part of the extension
            start = self._free.pop()[0]
        self.size = start + self.round_up(n_bytes)
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
