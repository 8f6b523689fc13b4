"""The bytes that optimizers take, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Bytes of optimizers.

    Attributes:
        state: Bytes of the state that they keep, once they have stepped.
        temporary: Further bytes that a step has allocated at once.
        standing: Bytes of these that remain while the step has forward and backward run again (LBFGS).
    """

    state: int = 0
    temporary: int = 0
    standing: int = 0

    @property
    def total(self) -> int:
        """State and temporaries."""
        return self.state + self.temporary


NO_OPTIMIZER = OptimizerBytes()
