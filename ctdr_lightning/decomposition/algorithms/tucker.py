"""Tucker decomposition over the two channel modes (Tucker 1966; Kim et al., arXiv 1511.06530).

ST-HOSVD (Vannieuwenhoven et al. 2012) gives the start, HOOI sweeps (De Lathauwer et al. 2000) refine it. The kernel
mode is left whole, as Kim et al. do.

Complexity: O(O I K (O + I)) a sweep for an (O, I, K) tensor.
"""

from __future__ import annotations

import torch
from tensorly.tucker_tensor import TuckerTensor
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import leading_basis, working

_ROUGH = 0.02  # above this relative error single precision finds the same bases, in half the time


def _project(tensor: Tensor, basis: Tensor, mode: int) -> Tensor:
    return torch.tensordot(tensor, basis, dims=([mode], [0])).movedim(-1, mode)


def _unfold(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).flatten(1)


def tucker(tensor: Tensor, ranks: tuple[int, int], sweeps: int = 2) -> TuckerTensor:
    """Tucker-2 of an (O, I, K) tensor over its first two modes.

    Args:
        tensor: Shape (O, I, K), any float dtype and device.
        ranks: (rank of mode O, rank of mode I).
        sweeps: HOOI sweeps after the ST-HOSVD start.

    Returns:
        Core (ranks[0], ranks[1], K), factors (O, ranks[0]), (I, ranks[1]) orthonormal and the identity (K, K).
    """
    t = working(tensor)
    out_basis = leading_basis(_unfold(t, 0), ranks[0])
    narrow = _project(t, out_basis, 0)
    in_basis = leading_basis(_unfold(narrow, 1), ranks[1])
    kept = _project(narrow, in_basis, 1).square().sum()
    if tensor.dtype != torch.float64 and kept < (1 - _ROUGH**2) * t.square().sum():
        t, narrow, in_basis = t.float(), narrow.float(), in_basis.float()
    for _ in range(sweeps):
        out_basis = leading_basis(_unfold(_project(t, in_basis, 1), 0), ranks[0])
        narrow = _project(t, out_basis, 0)
        in_basis = leading_basis(_unfold(narrow, 1), ranks[1])
    taps = torch.eye(t.shape[2], dtype=t.dtype, device=t.device)
    parts = [part.to(tensor.dtype) for part in (_project(narrow, in_basis, 1), out_basis, in_basis, taps)]
    return TuckerTensor((parts[0], parts[1:]))
