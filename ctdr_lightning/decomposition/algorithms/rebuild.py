"""From factors back to the tensor, by tensorly."""

from __future__ import annotations

import tensorly as tl
from tensorly.cp_tensor import CPTensor, cp_to_tensor
from tensorly.tt_tensor import TTTensor, tt_to_tensor
from tensorly.tucker_tensor import TuckerTensor, tucker_to_tensor
from torch import Tensor


def rebuild(factors: CPTensor | TuckerTensor | TTTensor) -> Tensor:
    """The tensor that a decomposition represents."""
    with tl.backend_context("pytorch", local_threadsafe=True):
        if isinstance(factors, CPTensor):
            return cp_to_tensor(factors)
        return tucker_to_tensor(factors) if isinstance(factors, TuckerTensor) else tt_to_tensor(factors)
