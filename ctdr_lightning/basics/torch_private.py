"""The private names of torch that this package uses: imported here once, checked here once, and used nowhere else.

torch has no public name for what they give. The names were read in the sources of torch 2.7.1, 2.8.0, 2.13.0 and
2.15.0; 2.8 is the first release that has them all. Where a name is missing the import fails with one sentence, before
any training starts. Private attributes of torch's objects cannot be imported, so they are checked by name at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import ProfilerConfig, ProfilerState

OLDEST_TORCH = "2.8"


def unusable_torch(missing: str, found: str) -> ImportError:
    """Build the error for a torch that lacks a name.

    Args:
        missing: The name, or the text of the failed import.
        found: The version of torch that is installed.

    Returns:
        One sentence: the oldest torch that works, or, for a newer one, the name that it no longer has.
    """
    oldest = tuple(map(int, OLDEST_TORCH.split(".")))
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < oldest:
        return ImportError(f"ctdr_lightning needs torch {OLDEST_TORCH} or newer; found {found}.")
    return ImportError(f"ctdr_lightning does not work with torch {found} ({missing}); install an older one.")


try:
    # Keys of the dispatcher, and guards that take some of them out of a call's way. No public call reaches below
    # autograd: `detach()` in Python gives a tensor a version counter of its own there, so that later writes in place
    # would go unnoticed.
    from torch._C import DispatchKey, DispatchKeySet
    from torch._C import _AutoDispatchBelowAutograd as BelowAutograd
    from torch._C import _current_graph_task_id as graph_task_id  # -1 outside of a backward; torch's checkpoint asks so
    from torch._C import _DisableTorchDispatch as NoTorchDispatch
    from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_key_excluded
    from torch._C import _ExcludeDispatchKeyGuard as ExcludeKeys
    from torch._C import _len_torch_dispatch_stack as n_dispatch_modes
    from torch._C import _set_grad_enabled as set_grad_enabled  # the public class does this and builds an object first
    from torch._C import _SetExcludeDispatchKeyGuard as SetKeyExcluded

    # The older profiler writes down the allocations of its own thread alone. The public one is one for the whole
    # process: to start it beside a profiler of the user's ends that one, and kills the process while that one warms up.
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy

    # The public `saved_tensors_hooks` can be entered and left, but not asked which hooks are on top: without an answer
    # the hooks could not leave for the ops that keep everything (2.7 has no such name, which sets the floor).
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
    from torch._C._profiler import _ExperimentalConfig

    # Where `torch.cond` and its kind compile themselves; no public hook is told of it.
    from torch._higher_order_ops import utils as higher_order_utils
    from torch._ops import OpOverload  # the type of an aten op

    # Fake tensors carry shapes and no data: a plan needs neither a GPU nor memory.
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeCopyMode,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )

    # Dispatch modes have no public name. To push and pop one takes half the time of `with mode:` (1.7 us instead of
    # 3.4), which counts where the tape leaves and comes back many times a step.
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
    from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

    # Nests of tensors: 2.13 has no public name for them yet.
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
except ImportError as error:
    raise unusable_torch(str(error), torch.__version__) from error

# What a fake tensor cannot do, as it has no values; each holds the op as ``func``.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# All autocast keys that this build knows: a replay runs below autocast on every device, as the recorded calls did.
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)
for _name in ("CUDA", "XPU", "MPS", "HPU", "PrivateUse1"):
    if hasattr(DispatchKey, f"Autocast{_name}"):
        AUTOCAST_KEYS = AUTOCAST_KEYS.add(getattr(DispatchKey, f"Autocast{_name}"))

# Private attributes, read where they are needed as a call in between would cost as much as the question.
#   _version  an object's count of writes in place: the only sign of a write that there is
#   _base, _is_view()  what a tensor is a view of
#   _cdata  a storage's identity (`data_ptr()` of two empty storages is the same)
#   _schema, _overloadname, _overloadpacket  what an op reads, writes and returns: `torch.library` has no reader
_ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, ("_version", "_base", "_is_view")),
    (torch.UntypedStorage, ("_cdata",)),
    (torch.ops.aten.relu.default, ("_schema", "_overloadname", "_overloadpacket")),
)
for _owner, _names in _ATTRIBUTES:
    for _name in _names:
        if not hasattr(_owner, _name):
            raise unusable_torch(f"no attribute {_name}", torch.__version__)


try:
    # Frames that Dynamo leaves alone, with all that they call.
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    _UNCOMPILED: _FrameExecStrategy | None = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
except ImportError:  # then torch's own way does
    _UNCOMPILED = None


class OpMode(TorchDispatchMode):
    """A dispatch mode that sees an op for less: 6.5 us instead of 8.

    torch wraps ``__torch_dispatch__`` so that ``torch.compile`` never looks into it, which costs 1.5 us an op. Here the
    function itself is marked, once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # asked when a subclass is made: whether to wrap
        return _UNCOMPILED is None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("__torch_dispatch__")
        if _UNCOMPILED is not None and own is not None:
            set_code_exec_strategy(own.__code__, _UNCOMPILED)


def allocations_of(run: Callable[[], object]) -> list[int]:
    """Run something in a thread of its own, beside whatever profiler there is, and write down its memory.

    Args:
        run: What is run; it finds none of the calling thread's modes.

    Returns:
        Bytes of each allocation on the processor in their order; of each release, negative ones.
    """

    def watched() -> list[int]:
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(config)
        try:
            run()
        finally:
            records = _disable_profiler_legacy()
        return [e.cpu_memory_usage() for thread in records for e in thread if e.kind() == "memory_alloc"]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(watched).result()


def profiler_events(profiler: Any) -> list[Any]:
    """Return the raw events of a finished ``torch.profiler.profile``; its public ``events()`` drops ``[memory]``."""
    return profiler.profiler.kineto_results.events()


def dump_cuda_memory(path: str) -> None:
    """Write CUDA's memory history for pytorch.org/memory_viz; torch documents the call in spite of its underscore."""
    torch.cuda.memory._dump_snapshot(path)


def replaces_scheduled_step(step: Any) -> None:
    """Tell learning rate schedulers that this function does what their own wrapper of an optimizer's step does.

    Without the mark a scheduler that was made before warns that the step was overridden.
    """
    step._wrapped_by_lr_sched = True


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell a learning rate scheduler that the optimizer has stepped, as its own wrapper of the step does.

    Without it the scheduler warns that it was stepped first; torch has no public name for the mark.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


__all__ = [
    "AUTOCAST_KEYS",
    "NEEDS_VALUES",
    "OLDEST_TORCH",
    "BelowAutograd",
    "DispatchKey",
    "ExcludeKeys",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "NoTorchDispatch",
    "OpMode",
    "OpOverload",
    "SetKeyExcluded",
    "TorchDispatchMode",
    "allocations_of",
    "current_dispatch_mode",
    "dump_cuda_memory",
    "graph_task_id",
    "higher_order_utils",
    "is_key_excluded",
    "mark_stepped",
    "n_dispatch_modes",
    "no_dispatch_modes",
    "pop_dispatch_mode",
    "profiler_events",
    "push_dispatch_mode",
    "replaces_scheduled_step",
    "set_grad_enabled",
    "top_saved_tensors_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
