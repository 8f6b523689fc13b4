"""The private names of torch's compiler: as in `torch_private`, but imported only where something is compiled.

AOTAutograd, its partitioners and inductor's scheduler have no public names. To import them takes seconds, and they
change with each release: they were read in the sources of torch 2.9.0, 2.13.0 and 2.15.0. 2.9 is the first release that
has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ctdr_lightning.basics.errors import ConfigError

try:
    # Forward, backward and their joint graph come from AOTAutograd, which takes a function that parts the joint graph.
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop  # the graphs as they are, their inputs freed as they go
    from torch._functorch import config as aot_config
    from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
    from torch._functorch.partitioners import _extract_fwd_bwd_modules as extract_graphs
    from torch._functorch.partitioners import _is_primal as is_weight_or_input
    from torch._functorch.partitioners import _is_tangent as is_tangent
    from torch._functorch.partitioners import min_cut_rematerialization_partition as torch_partition
    from torch._guards import CompileContext
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options
    from torch._inductor import memory as schedules
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.virtualized import V
except ImportError as error:
    raise ConfigError(
        f"Compiled models are planned with torch 2.9 or newer; found {torch.__version__} ({error}).",
        "Install another torch, or train without torch.compile.",
    ) from error


def size_hint(size: Any) -> Any:
    """The number that a symbolic size had when its graph was traced; anything else is itself."""
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def frame_id() -> int:
    """The number of the Python frame that is being compiled; compiled once more it keeps its number. -1 outside."""
    found = CompileContext.current_compile_id()
    return -1 if found is None or found.frame_id is None else found.frame_id


@contextmanager
def inductor_with(
    partition: CustomPartitionerFn, scheduled: Callable[[bool, int], None], options: Mapping[str, Any]
) -> Iterator[None]:
    """While entered, inductor parts joint graphs with a function and tells how much memory its schedules take.

    The caches of whole graphs rest meanwhile: what comes from them was never scheduled. Those of kernels do not.

    Args:
        partition: Parts a joint graph.
        scheduled: Called for each graph with whether it is a backward, and with its buffers' peak: those that it reads
            and may free, and those that it makes. It may raise to end the compilation.
        options: Further settings of inductor.
    """
    reorder = schedules.reorder_for_peak_memory

    def reorder_and_tell(nodes: Any, by_name: Any, fused: Any, inputs: Any, outputs: Any, *rest: Any) -> Any:
        order = reorder(nodes, by_name, fused, inputs, outputs, *rest)
        freeable = schedules.get_freeable_input_buf(order, inputs)
        scheduled(bool(V.graph.is_backward), schedules.estimate_peak_memory(order, freeable, outputs)[0])
        return order

    settings = {**options, "custom_partitioner_fn": partition, "fx_graph_cache": False, "reorder_for_peak_memory": True}
    with (
        patch.object(schedules, "reorder_for_peak_memory", reorder_and_tell),
        aot_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(settings),
    ):
        yield


__all__ = [
    "CustomPartitionerFn",
    "aot_autograd",
    "boxed_nop",
    "compile_fx",
    "extract_graphs",
    "frame_id",
    "fx_graph_cse",
    "inductor_with",
    "is_tangent",
    "is_weight_or_input",
    "list_mode_options",
    "raise_getitems",
    "size_hint",
    "torch_partition",
]
