"""Mutations of the code under test, in memory only: a text of a function is replaced by another and run."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: What is taken away.
        owner: Module or class whose function it is.
        function: Its name.
        old: Text that must be there.
        new: What stands in its place.
    """

    name: str
    owner: Any
    function: str
    old: str
    new: str

    def apply(self, monkeypatch) -> None:
        """Put the changed function in the place of the right one."""
        plain = inspect.getattr_static(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(plain))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} is {source.count(self.old)} times in {source}"
        module = self.owner if isinstance(self.owner, ModuleType) else inspect.getmodule(self.owner)
        found: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), vars(module), found)
        monkeypatch.setattr(self.owner, self.function, found[self.function])
