"""The private names of torch's compiler: as in `torch_private`, but imported only where something is compiled.

AOTAutograd and its partitioners have no public names. To import them takes seconds, and they change with each release:
the names were read in the sources of torch 2.9.0, 2.13.0 and 2.15.0, and 2.9 is the first release that has them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ctdr_lightning.basics.errors import ConfigError

try:
    # Forward, backward and their joint graph come from AOTAutograd, which takes a function that parts the joint graph.
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop  # the graphs as they are, their inputs freed as they go
    from torch._functorch import config as aot_config
    from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
    from torch._functorch.partitioners import (
        _extract_fwd_bwd_modules,
        _is_primal,
        _is_tangent,
        min_cut_rematerialization_partition,
    )
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
except ImportError as error:
    raise ConfigError(
        f"Compiled models are planned with torch 2.9 or newer; found {torch.__version__} ({error}).",
        "Install another torch, or train without torch.compile.",
    ) from error

extract_graphs, is_weight_or_input, is_tangent = _extract_fwd_bwd_modules, _is_primal, _is_tangent
torch_partition = min_cut_rematerialization_partition


def size_hint(size: Any) -> int:
    """The number that a symbolic size had when its graph was traced; a plain one is itself."""
    return int(size.node.hint) if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


@contextmanager
def partitioned_by(partition: CustomPartitionerFn | None) -> Iterator[None]:
    """While entered, inductor parts joint graphs with this function."""
    with inductor_config.patch(custom_partitioner_fn=partition):
        yield


__all__ = [
    "CustomPartitionerFn",
    "aot_autograd",
    "aot_config",
    "boxed_nop",
    "compile_fx",
    "extract_graphs",
    "fx_graph_cse",
    "is_tangent",
    "is_weight_or_input",
    "partitioned_by",
    "raise_getitems",
    "size_hint",
    "torch_partition",
]
