"""The fake kernel of grouped matrix products, the experts of a mixture: torch's own takes bfloat16 alone.

Its real kernels also take single precision. Complexity: none, shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
GROUPED_MM = aten._grouped_mm.default
_ROW_BYTES = 16  # rows of the result begin at multiples of these: GroupedMMUtils.h of torch 2.13


def grouped_mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """A result without contents.

    Groups of the first matrix's rows, of both matrices' inner side or of the second's columns end at the offsets; two
    stacks of matrices have one group a matrix.

    Args:
        args: Those of the operator: ``mat_a`` ([groups,] rows, inner), ``mat_b`` ([groups,] inner, columns), ``offs``.
        kwargs: Those given by name.

    Example:
        >>> a, b = torch.empty(12, 8), torch.empty(3, 8, 10)
        >>> made = grouped_mm((a, b, torch.tensor([4, 8, 12])), {})
        >>> tuple(made.shape), made.stride()
        ((12, 10), (12, 1))
    """
    a, b = args[:2]
    offs: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    groups = [] if a.dim() != b.dim() else [len(a) if a.dim() == 3 else len(offs)]
    step = _ROW_BYTES // dtype.itemsize
    width = -(-columns // step) * step
    strides = (rows * width, width, 1)[-2 - len(groups) :]
    return a.new_empty_strided((*groups, rows, columns), strides, dtype=dtype)
