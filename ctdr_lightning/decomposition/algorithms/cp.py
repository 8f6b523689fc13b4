"""CP decomposition that can be fine-tuned: alternating least squares, then error-preserving correction.

ALS: Carroll and Chang 1970; used for convolutions by Lebedev et al., arXiv 1412.6553. Its components may diverge and
cancel (the best rank-R CP need not exist), and a network with such factors does not train. The correction is that of
Phan et al., arXiv 1901.11188 (EPC) and 2008.05441: among all factors with a given error take those least sensitive to
noise. Reproduced: the sensitivity objective and the alternating constrained updates, each solved in closed form.
Changed: the error bound is the ALS error times a stated slack above one (strict preservation after a converged ALS
barely helps), and ALS stops early.

Complexity: O(N R) a mode for N entries, plus one R x R solve (ALS) or eigenproblem (correction) a mode and sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from tensorly.cp_tensor import CPTensor
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import leading_basis, working

SWEEPS = 50
TOLERANCE = 1e-4
CORRECTIONS = 12
SLACK = 1.01
_BISECTIONS = 60

Update = Callable[[Tensor, Tensor, list[Tensor], int], Tensor]


def cp(
    tensor: Tensor,
    rank: int,
    sweeps: int = SWEEPS,
    tolerance: float = TOLERANCE,
    corrections: int = CORRECTIONS,
    slack: float = SLACK,
) -> CPTensor:
    """CP of a tensor (n_1, ..., n_d), conditioned and norm-balanced.

    Args:
        tensor: Any float dtype and device; at least two modes.
        rank: Number of components.
        sweeps: Most ALS sweeps.
        tolerance: ALS stops when a sweep lowers the relative error by less than this share of it.
        corrections: Sweeps of error-preserving correction; 0 leaves ALS factors, balanced.
        slack: Error the correction may reach, as a multiple of the ALS error.

    Returns:
        Weights of one and factors (n_k, rank), in the dtype of ``tensor``.
    """
    if rank >= exact_rank(tensor.shape):
        factors = _exact(tensor, rank)
    else:
        order = sorted(range(tensor.ndim), key=lambda mode: -tensor.shape[mode])
        t = tensor.detach().permute(order).to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()
        found = _correct(t, balance(_als(t, _start(t, rank), sweeps, tolerance)), corrections, slack)
        factors = [found[order.index(mode)] for mode in range(tensor.ndim)]
    weights = torch.ones(rank, dtype=tensor.dtype, device=tensor.device)
    return CPTensor((weights, [factor.to(tensor.dtype) for factor in balance(factors)]))


def exact_rank(shape: Sequence[int]) -> int:
    """A rank at which every tensor of this shape is exact: one component an entry of all modes but the largest."""
    return math.prod(shape) // max(shape)


def balance(factors: Sequence[Tensor]) -> list[Tensor]:
    """Share each component's norm equally over its factors (n_k, R)."""
    norms = torch.stack([factor.norm(dim=0) for factor in factors])
    share = norms.log().mean(0).exp()
    return [factor * (share / norm.clamp_min(1e-30)) for factor, norm in zip(factors, norms, strict=True)]


def degeneracy(factors: Sequence[Tensor], tensor: Tensor) -> float:
    """Norm of the components taken apart over that of the tensor: 1 to 3 is healthy, above 5 they cancel each other."""
    norms = torch.stack([working(factor).square().sum(0) for factor in factors])
    return float(norms.prod(0).sum().sqrt() / working(tensor).norm().clamp_min(1e-30))


def sensitivity(factors: Sequence[Tensor]) -> float:
    """Expected squared change of the tensor for unit noise on every entry of the factors (arXiv 2008.05441)."""
    energy = torch.stack([working(factor).square().sum(0) for factor in factors])
    sizes = [len(factor) for factor in factors]
    others = [torch.cat((energy[:mode], energy[mode + 1 :])).prod(0).sum() for mode in range(len(factors))]
    return float(sum(size * other for size, other in zip(sizes, others, strict=True)))


def _exact(tensor: Tensor, rank: int) -> list[Tensor]:
    longest = max(range(tensor.ndim), key=lambda mode: tensor.shape[mode])
    sizes = [size for mode, size in enumerate(tensor.shape) if mode != longest]
    hot = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes)).T
    factors = [torch.eye(size)[:, column].to(tensor) for size, column in zip(sizes, hot, strict=True)]
    factors.insert(longest, tensor.detach().movedim(longest, 0).flatten(1))
    return [torch.nn.functional.pad(factor, (0, rank - factor.shape[1])) for factor in factors]


def _start(tensor: Tensor, rank: int) -> list[Tensor]:
    """HOSVD bases, filled up with fixed pseudo-random columns where a mode is smaller than the rank."""
    generator = torch.Generator().manual_seed(0)
    factors = []
    for mode in range(tensor.ndim):
        matrix = working(tensor.movedim(mode, 0).flatten(1))
        basis = leading_basis(matrix, min(rank, *matrix.shape))
        fill = torch.randn(len(matrix), rank - basis.shape[1], generator=generator) / math.sqrt(len(matrix))
        factors.append(torch.cat((basis.to(tensor), fill.to(tensor)), 1))
    return factors


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    product = factors[0]
    for factor in factors[1:]:
        product = (product[:, None] * factor[None]).flatten(0, 1)
    return product


def _others(items: Sequence[Tensor], mode: int) -> list[Tensor]:
    return [item for other, item in enumerate(items) if other != mode]


def _sweep(tensor: Tensor, factors: list[Tensor], update: Update) -> list[Tensor]:
    """Renew every factor once: ``update`` gets the right side (n, R) and Gram matrix (R, R) of a mode, in double.

    The tensor is read twice a sweep, whatever its order: once for the longest mode, and once to project it on that
    mode's new factor, from which all other right sides follow.
    """
    factors = list(factors)
    projected = tensor
    for mode in range(tensor.ndim):
        grams = torch.stack([working(factor).T @ working(factor) for factor in _others(factors, mode)])
        others = _khatri_rao(factors[1:]) if mode == 0 else None
        right = _contract(projected, factors, mode) if others is None else tensor.flatten(1) @ others
        factors[mode] = update(working(right), grams.prod(0), factors, mode).to(tensor)
        if mode == 0:
            projected = (factors[0].T @ tensor.flatten(1)).reshape(-1, *tensor.shape[1:])
    return factors


def _contract(projected: Tensor, factors: Sequence[Tensor], mode: int) -> Tensor:
    """Right side (n_mode, R) from the projection (R, n_2, ..., n_d)."""
    axes = "abcdefgh"[: len(factors) - 1]
    others = [f"{axis}r" for other, axis in enumerate(axes, start=1) if other != mode]
    equation = f"{','.join([f'r{axes}', *others])}->{axes[mode - 1]}r"
    return torch.einsum(equation, projected, *_others(factors, mode)[1:])


def _als(tensor: Tensor, factors: list[Tensor], sweeps: int, tolerance: float) -> list[Tensor]:
    energy = float(working(tensor).square().sum())
    fitted = 0.0

    def solve(right: Tensor, gram: Tensor, _factors: list[Tensor], _mode: int) -> Tensor:
        nonlocal fitted
        gram.diagonal().add_(1e-10 * gram.diagonal().mean().clamp_min(1e-30))
        solved = torch.linalg.solve(gram, right.T).T
        fitted = float((right * solved).sum())
        return solved

    last = math.inf
    for _ in range(sweeps):
        factors = balance(_sweep(tensor, factors, solve))
        error = math.sqrt(max(energy - fitted, 0.0) / max(energy, 1e-300))
        if last - error < tolerance * error:
            break
        last = error
    return factors


def _correct(tensor: Tensor, factors: list[Tensor], sweeps: int, slack: float) -> list[Tensor]:
    """Alternate over modes: the factor least sensitive to noise whose squared error stays under the bound."""
    energy = float(working(tensor).square().sum())
    bound = math.inf

    def relax(right: Tensor, gram: Tensor, factors: list[Tensor], mode: int) -> Tensor:
        nonlocal bound
        if math.isinf(bound):
            bound = slack**2 * _squared_error(energy, right, gram, working(factors[0]))
        return _least_sensitive(right, gram, _penalty(factors, mode), energy, bound)

    for _ in range(sweeps):
        factors = balance(_sweep(tensor, factors, relax))
    return factors


def _squared_error(energy: float, right: Tensor, gram: Tensor, factor: Tensor) -> float:
    return energy - 2 * float((right * factor).sum()) + float((factor @ gram * factor).sum())


def _penalty(factors: Sequence[Tensor], mode: int) -> Tensor:
    """Weight (R,) of each squared column norm of one factor in the sensitivity."""
    norms = [working(factor).square().sum(0) for factor in _others(factors, mode)]
    sizes = [len(factor) for factor in _others(factors, mode)]
    one = torch.ones_like(norms[0])
    terms = [size * torch.stack([one, *_others(norms, i)]).prod(0) for i, size in enumerate(sizes)]
    return torch.stack(terms).sum(0).clamp_min(1e-30)


def _least_sensitive(right: Tensor, gram: Tensor, penalty: Tensor, energy: float, bound: float) -> Tensor:
    """Minimise sum_r penalty_r ||a_r||^2 with squared error at most ``bound``: a ridge, its strength by bisection.

    In the eigenbasis of the scaled Gram matrix the error is a scalar function of the strength, so a step costs O(R).
    """
    scale = penalty.rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * gram * scale)
    values = values.clamp_min(0)
    rotated = (right * scale) @ vectors
    energies = rotated.square().sum(0).cpu()
    spectrum = values.cpu()

    def squared_error(strength: float) -> float:
        inverse = 1 / (spectrum + strength)
        return energy - 2 * float((energies * inverse).sum()) + float((energies * spectrum * inverse.square()).sum())

    top = max(float(values[-1]), 1e-30)
    low, high = math.log(top * 1e-14), math.log(top * 1e3)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if squared_error(math.exp(middle)) <= bound else (low, middle)
    return (rotated / (values + math.exp(low))) @ vectors.T * scale
