"""Names for policies, methods and codecs: one decorator, entry points, one error that lists the valid names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from ctdr_lightning.basics.errors import ConfigError, meant

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from name to a registered callable.

    Args:
        kind: Kind of entry, in the singular ("policy"); used in errors.
        group: Entry-point group that third-party packages may use, or None.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self._kind = kind
        self._group = group
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its target under ``name``.

        Raises:
            ConfigError: If the name is taken.
        """

        def add(entry: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self._kind} {name!r} is registered already.", "Choose another name.")
            self._entries[name] = entry
            return entry

        return add

    @contextmanager
    def temporarily(self, entries: Mapping[str, T] | None = None) -> Iterator[None]:
        """Register entries for as long as a block lasts, over others of their names.

        Everything else that the block registers is forgotten with it.

        Args:
            entries: Name and entry; none only opens the block.

        Example:
            >>> colours = Registry("colour")
            >>> with colours.temporarily({"red": "#f00"}):
            ...     colours["red"]
            '#f00'
            >>> "red" in colours
            False
        """
        self._load_entry_points()
        before = dict(self._entries)
        self._entries.update({name: self._entry(name, entry) for name, entry in (entries or {}).items()})
        try:
            yield
        finally:
            self._entries = before

    def __getitem__(self, name: str) -> T:
        self._load_entry_points()
        if name in self._entries:
            return self._entries[name]
        near = meant(name, self._entries)
        raise ConfigError(
            f"{self._kind} {name!r} is not known.", f"{near}Valid names: {', '.join(sorted(self._entries))}."
        )

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._load_entry_points()
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        self._load_entry_points()
        return name in self._entries

    def _load_entry_points(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        for point in entry_points(group=group):
            self._entries.setdefault(point.name, self._entry(point.name, point.load()))

    def _entry(self, name: str, found: T) -> T:
        """Convert an entry that a third-party package offers; the base class keeps it unchanged."""
        return found
