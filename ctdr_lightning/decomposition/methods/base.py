"""Interface of a decomposition method: its chain of small layers, its solver, and the cost of each rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import spectrum, working
from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.algorithms.vbmf import evbmf_rank
from ctdr_lightning.decomposition.shapes.geometry import Geometry

Ranks = tuple[int, ...]


class KeepDenseError(Exception):
    """A reason to leave one layer dense; never reaches the user as an error."""


@dataclass(frozen=True)
class Candidate:
    """One way to factorize one layer.

    Args:
        method: Its method.
        ranks: Its ranks.
        parameters: Weights it would have, bias aside.
        error: Relative error expected; NaN where nobody looked.
    """

    method: Method
    ranks: Ranks
    parameters: int
    error: float = math.nan


@dataclass(frozen=True)
class RankTable:
    """Every rank worth considering, one row each.

    Args:
        ranks: Shape (n, d), d ranks a row.
        parameters: Shape (n,), weights of the factorized layer, bias aside.
        error: Shape (n,), relative error ``||W - W'|| / ||W||``: exact for an SVD, an upper bound for Tucker and TT.
    """

    ranks: Tensor
    parameters: Tensor
    error: Tensor

    def where(self, mask: Tensor) -> RankTable:
        """The rows where ``mask`` (n,) is true, or the rows of an index."""
        return RankTable(self.ranks[mask], self.parameters[mask], self.error[mask])

    def rounded(self, multiple: int) -> RankTable:
        """The rows whose ranks are multiples, or the most a mode has."""
        if multiple == 1:
            return self
        return self.where(((self.ranks % multiple == 0) | (self.ranks == self.ranks.amax(0))).all(1))

    def candidate(self, method: Method, index: Tensor) -> Candidate:
        """One row as a candidate."""
        ranks = tuple(int(rank) for rank in self.ranks[index])
        return Candidate(method, ranks, int(self.parameters[index]), float(self.error[index]))


@dataclass(frozen=True)
class FactorCost:
    """One small layer at work on one sample.

    Args:
        flops: Operations of its forward, two a multiply-add.
        outputs: Elements it makes.
        weights: Entries of its weight.
    """

    flops: int
    outputs: int
    weights: int


class Method(ABC):
    """One way to write a layer as a chain of smaller ones. Ranks follow the data: input side first."""

    name: ClassVar[str]
    matrix_method: ClassVar[str] = "svd"
    chained: ClassVar[bool] = True

    @abstractmethod
    def supports(self, geometry: Geometry) -> bool:
        """Whether the method says anything about such a layer."""

    @abstractmethod
    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """The small layers, first to last; the last one carries the bias."""

    @abstractmethod
    def unfoldings(self, weight: Tensor) -> list[Tensor]:
        """One matrix a rank whose rank bounds it, from one group's weight (out, in, *kernel)."""

    @abstractmethod
    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Canonical weights (groups, out, in, *kernel) of each factor for one group's weight (out, in, *kernel)."""

    @abstractmethod
    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """The ranks behind the stored weight shapes of the factors."""

    @abstractmethod
    def table(self, geometry: Geometry, weight: Tensor) -> RankTable:
        """Cost and error of every rank for a canonical weight (groups, out, in, *kernel)."""

    def compose(self, geometry: Geometry, ranks: Ranks, weights: Sequence[Tensor]) -> Tensor:
        """The canonical weight that canonical factor weights (groups, out, in, *kernel) represent, differentiable.

        Each spatial axis has more than one tap in one factor only, so composing convolutions is a channel product with
        the kernels broadcast.
        """
        product = weights[0]
        for weight in weights[1:]:
            if weight.shape[0] == product.shape[0]:
                product = torch.einsum("gom...,gmi...->goi...", weight, product)
            else:
                product = product * weight.reshape(*product.shape[:2], 1, *weight.shape[3:])
        return product

    def vbmf(self, weight: Tensor) -> Ranks:
        """Ranks of one group's unfoldings once their noise is taken away."""
        return tuple(evbmf_rank(matrix) for matrix in self.unfoldings(weight))

    def max_ranks(self, geometry: Geometry) -> Ranks:
        """The ranks at which nothing is lost."""
        empty = torch.empty(geometry.group_shape, device="meta")
        return tuple(min(matrix.shape) for matrix in self.unfoldings(empty))

    def feasible(self, geometry: Geometry, ranks: Ranks) -> Ranks:
        """The nearest ranks, none higher, that neighbouring ranks can make use of."""
        return tuple(min(rank, most) for rank, most in zip(ranks, self.max_ranks(geometry), strict=True))

    def n_parameters(self, geometry: Geometry, ranks: Ranks) -> int:
        """Weights of the factorized layer, bias aside."""
        return sum(factor.n_weights for factor in self.factor_geometries(geometry, ranks))

    def at(self, geometry: Geometry, ranks: Ranks) -> Candidate:
        """The candidate with these ranks."""
        return Candidate(self, ranks, self.n_parameters(geometry, ranks))

    def uniform(self, geometry: Geometry, rank: int) -> Ranks:
        """One number for every rank, capped at the layer's own."""
        return self.feasible(geometry, (rank,) * len(self.max_ranks(geometry)))

    def within(self, geometry: Geometry, weight: Tensor, budget: int, multiple: int) -> Candidate:
        """The least error that a number of parameters buys.

        Raises:
            KeepDenseError: If no rank is that cheap.
        """
        table = self.table(geometry, weight).rounded(multiple)
        table = table.where(table.parameters <= budget)
        if not len(table.error):
            raise KeepDenseError(f"no {self.name} rank fits {budget:,} parameters")
        return table.candidate(self, table.error.argmin())

    def reaching(self, geometry: Geometry, weight: Tensor, bound: float, multiple: int) -> Candidate:
        """The fewest parameters whose relative error is at most a bound.

        Raises:
            KeepDenseError: If no rank is that exact.
        """
        table = self.table(geometry, weight).rounded(multiple)
        table = table.where(table.error <= bound)
        if not len(table.error):
            raise KeepDenseError(f"no {self.name} rank reaches a relative error of {bound:.3g}")
        return table.candidate(self, table.parameters.argmin())

    def factorize(self, geometry: Geometry, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Canonical factor weights for a canonical weight: each group solved on its own, then joined."""
        groups = [self.solve(part, ranks, solver) for part in weight]
        return [torch.cat(parts) for parts in zip(*groups, strict=True)]

    def costs(self, geometry: Geometry, ranks: Ranks, axes: tuple[int, ...]) -> list[FactorCost]:
        """Cost of each factor on one sample whose spatial (or, before the features, leading) sizes are ``axes``."""
        found = []
        for factor in self.factor_geometries(geometry, ranks):
            flops, axes = factor.flops(axes), factor.output_axes(axes)
            found.append(FactorCost(flops, factor.out_size * math.prod(axes), factor.n_weights))
        return found

    def n_stored(self, geometry: Geometry, ranks: Ranks, axes: tuple[int, ...]) -> int:
        """Elements that one sample's forward stores for the backward on top of the layer's input."""
        return sum(cost.outputs for cost in self.costs(geometry, ranks, axes)[:-1])


class MatrixMethod(Method):
    """A method with one rank: the SVD of one unfolding."""

    @abstractmethod
    def matrix(self, weight: Tensor) -> Tensor:
        """The unfolding of one group's weight (out, in, *kernel)."""

    def unfoldings(self, weight: Tensor) -> list[Tensor]:
        """The one unfolding."""
        return [self.matrix(weight)]

    def table(self, geometry: Geometry, weight: Tensor) -> RankTable:
        """Tail energies of the singular values, summed over groups: exact."""
        energy = torch.stack([spectrum(self.matrix(part)).square() for part in working(weight)]).sum(0)
        kept = energy.cumsum(0)
        error = (1 - kept / kept[-1].clamp_min(1e-300)).clamp_min(0).sqrt()
        ranks = torch.arange(1, len(energy) + 1)
        return RankTable(ranks[:, None], ranks * self.n_parameters(geometry, (1,)), error.cpu())

    def halves(self, weight: Tensor, rank: int, solver: Solver) -> tuple[Tensor, Tensor]:
        """Factors (rows, rank) and (columns, rank) that share the singular values equally."""
        weights, (left, right) = solver.svd(self.matrix(weight), rank)
        return left * weights.sqrt(), right * weights.sqrt()


def grid(sizes: Sequence[int], most: int = 4096) -> Tensor:
    """Rank tuples (n, d) over 1..size a mode, thinned evenly where there would be too many; the largest are in."""
    limit = max(int(most ** (1 / len(sizes))), 2)
    levels = [torch.linspace(1, size, min(size, limit)).round().long().unique() for size in sizes]
    return torch.cartesian_prod(*levels).reshape(-1, len(sizes))
