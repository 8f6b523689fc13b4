"""Linear programs over shares from 0 to 1, relaxed or whole, on HiGHS (Huangfu and Hall, 2018) through scipy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

Terms = Iterable[tuple[int, float]]


@dataclass(frozen=True)
class Solution:
    """Numbers for the variables of a program.

    Attributes:
        bound: No solution costs less.
        values: One number a variable.
        cost: Their cost.
    """

    bound: float
    values: np.ndarray
    cost: float


class LinearProgram:
    """Minimise a cost over variables between 0 and 1 under ``sum(coefficient * variable) <= limit``."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self._costs: list[float] = []
        self._lowest: list[float] = []
        self._highest: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._coefficients: list[float] = []

    def variable(self, cost: float = 0.0, *, fixed: bool = False, whole: bool = False) -> int:
        """Add a variable; returns its index.

        Args:
            cost: Cost of the value 1.
            fixed: Whether it must be 1.
            whole: Whether only 0 and 1 will do where the program is solved in whole numbers.
        """
        self._costs.append(cost)
        self._lowest.append(float(fixed))
        self._highest.append(1.0)
        self._whole.append(whole)
        return len(self._costs) - 1

    @property
    def n_variables(self) -> int:
        """Number of variables."""
        return len(self._costs)

    def forbid(self, variable: int) -> None:
        """Say that a variable must be 0."""
        self._highest[variable] = 0.0

    def is_forbidden(self, variable: int) -> bool:
        """Whether a variable must be 0."""
        return self._highest[variable] == 0.0

    def at_most(self, terms: Terms, limit: float) -> int:
        """Add a constraint; returns its index in ``limits``."""
        for column, coefficient in terms:
            self._rows.append(len(self.limits))
            self._columns.append(column)
            self._coefficients.append(coefficient)
        self.limits.append(limit)
        return len(self.limits) - 1

    def relax(self) -> Solution | None:
        """Solve in shares; None where not even shares exist.

        The bound is computed from the dual prices rather than taken from the solver, so that it holds whatever the
        solver's tolerances were (Neumaier and Shcherbina, Mathematical Programming 99, 2004).
        """
        if not self._costs:
            return self._empty()
        matrix, costs, limits = self._matrix(), np.array(self._costs), np.array(self.limits)
        lowest, highest = np.array(self._lowest), np.array(self._highest)
        bounds = np.column_stack([lowest, highest])
        found = linprog(costs, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
        if found.status == 2:
            return None
        if found.status != 0:  # the solver gave up: only the fixed variables are known
            return Solution(float(costs @ lowest), lowest, float("inf"))
        prices = np.maximum(-found.ineqlin.marginals, 0)
        reduced = costs + matrix.T @ prices
        bound = np.where(reduced > 0, reduced * lowest, reduced * highest).sum() - limits @ prices
        return Solution(float(bound), found.x, float(found.fun))

    def solve(self, time_limit_s: float, gap: float = 1e-4, n_nodes: int | None = None) -> Solution | None:
        """Solve in whole numbers; None where nothing was found in time or nothing exists.

        Args:
            time_limit_s: When to stop.
            gap: Share of the best possible cost at which to stop.
            n_nodes: After how many nodes of the search tree to stop, whatever the clock says; None for no limit.
        """
        if not self._costs:
            return self._empty()
        nodes = {} if n_nodes is None else {"node_limit": n_nodes}
        found = milp(
            np.array(self._costs),
            constraints=LinearConstraint(self._matrix(), -np.inf, np.array(self.limits)),
            bounds=Bounds(np.array(self._lowest), np.array(self._highest)),
            integrality=np.array(self._whole, dtype=int),
            options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": gap, **nodes},
        )
        if found.x is None:
            return None
        return Solution(float(found.mip_dual_bound or 0.0), found.x, float(found.fun))

    def _empty(self) -> Solution | None:
        return Solution(0.0, np.zeros(0), 0.0) if min(self.limits, default=0.0) >= 0 else None

    def _matrix(self) -> csr_matrix:
        shape = (len(self.limits), len(self._costs))
        return csr_matrix((self._coefficients, (self._rows, self._columns)), shape=shape)
