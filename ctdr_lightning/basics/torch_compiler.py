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
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V
except ImportError as error:
    raise ConfigError(
        f"Compiled models are planned with torch 2.9 or newer; found {torch.__version__} ({error}).",
        "Install another torch, or train without torch.compile.",
    ) from error


WORKSPACE = "ctdr_workspace_bytes"  # the note of a graph's node on the memory that its kernel takes and frees again
# Inductor makes one kernel of calls up to 64 apart, which holds what the later ones make for as long. At 64 and 16 a
# transformer's replays took 0.44 to 0.49 of its peak where 0.39 was planned and a residual net's 0.56 for 0.46; at 8
# they took 0.39 and 0.50.
_FUSED_WITHIN = 8


def size_hint(size: Any) -> Any:
    """The number that a symbolic size had when its graph was traced; anything else is itself."""
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def compile_id() -> tuple[int, int]:
    """The number of the Python frame that is compiled, and how often it was before; -1 for both outside of one."""
    found = CompileContext.current_compile_id()
    if found is None or found.frame_id is None or found.frame_compile_id is None:
        return -1, -1
    return found.frame_id, found.frame_compile_id


@contextmanager
def inductor_with(
    partition: CustomPartitionerFn, scheduled: Callable[[bool, int], None], options: Mapping[str, Any]
) -> Iterator[None]:
    """While entered, inductor parts joint graphs with a function and tells how much memory its schedules take.

    The caches of whole graphs rest meanwhile: what comes from them was never scheduled. Those of kernels do not.

    Args:
        partition: Parts a joint graph.
        scheduled: Called for each graph with whether it is a backward, and with its peak: buffers that it reads and
            may free, those that it makes, and its kernels' workspaces. It may raise to end the compilation.
        options: Further settings of inductor.
    """
    reorder = schedules.reorder_for_peak_memory

    def reorder_and_tell(nodes: Any, by_name: Any, fused: Any, inputs: Any, outputs: Any, *rest: Any) -> Any:
        order = reorder(nodes, by_name, fused, inputs, outputs, *rest)
        _, at = schedules.estimate_peak_memory(order, schedules.get_freeable_input_buf(order, inputs), outputs)
        during = [n_bytes + _workspace_bytes(node) for n_bytes, node in zip(at, order, strict=False)]
        scheduled(bool(V.graph.is_backward), max(during, default=0))
        return order

    settings = {**options, "custom_partitioner_fn": partition, "fx_graph_cache": False, "reorder_for_peak_memory": True}
    with (
        patch.object(schedules, "reorder_for_peak_memory", reorder_and_tell),
        patch.object(Scheduler, "are_long_distant_nodes", _are_far_apart),
        aot_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(settings),
    ):
        yield


def _are_far_apart(scheduler: Any, one: Any, other: Any) -> bool:
    return max(abs(one.min_order - other.max_order), abs(other.min_order - one.max_order)) > _FUSED_WITHIN


def _workspace_bytes(scheduled: Any) -> int:
    kernels = [part.node for part in scheduled.get_nodes() if part.node is not None]
    return max((origin.meta.get(WORKSPACE, 0) for kernel in kernels for origin in kernel.get_origins()), default=0)


__all__ = [
    "WORKSPACE",
    "CustomPartitionerFn",
    "aot_autograd",
    "boxed_nop",
    "compile_fx",
    "compile_id",
    "extract_graphs",
    "fx_graph_cse",
    "inductor_with",
    "is_tangent",
    "is_weight_or_input",
    "list_mode_options",
    "raise_getitems",
    "size_hint",
    "torch_partition",
]
