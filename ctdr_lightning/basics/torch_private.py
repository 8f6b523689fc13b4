"""The private names of torch that this package uses: imported here once, checked here once, and used nowhere else.

torch has no public equivalent for them. The names were read in the sources of torch 2.7.1, 2.8.0, 2.13.0 and
2.15.0; 2.8 is the first release that has them all. Where a name is missing the import fails with one sentence, before
any training starts. Private attributes of torch's objects cannot be imported, so they are checked by name at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

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
    # Keys of the dispatcher, and guards against some of them. No public call reaches below autograd: `detach()` in
    # Python gives a tensor a version counter of its own there, so that later writes in place would go unnoticed.
    from torch import _foreach_copy_ as foreach_copy_  # many tensors with one launch; `copy_` is one each
    from torch._C import DisableTorchFunctionSubclass as NoTorchFunction
    from torch._C import DispatchKey, DispatchKeySet
    from torch._C import _are_functorch_transforms_active as is_transformed  # whose tensors look like ordinary ones
    from torch._C import _AutoDispatchBelowAutograd as BelowAutograd
    from torch._C import _current_autograd_node as current_autograd_node  # whose backward runs in this thread
    from torch._C import _current_graph_task_id as graph_task_id  # -1 outside of a backward; torch's checkpoint asks so
    from torch._C import _DisableTorchDispatch as NoTorchDispatch
    from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_key_excluded
    from torch._C import _ExcludeDispatchKeyGuard as ExcludeKeys
    from torch._C import _len_torch_dispatch_stack as n_dispatch_modes
    from torch._C import _set_grad_enabled as set_grad_enabled  # the public class does this and builds an object first
    from torch._C import _SetExcludeDispatchKeyGuard as SetKeyExcluded

    # The older profiler records the allocations of its own thread alone. The public one is process-wide: starting it
    # ends a profiler that the user runs, and kills the process if that one is in its warm-up.
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy

    # Whether the backward under way may be asked for again: gradients that were made before it are scaled in place
    # where it may not, which saves a copy as large as the weight.
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph

    # The public `saved_tensors_hooks` can be entered and left, but not asked which hooks are on top: without an answer
    # the hooks could not leave for the ops that keep everything (2.7 has no such name, which sets the floor).
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
    from torch._C._profiler import _ExperimentalConfig

    # `torch.cond` and its kind compile themselves here; no public hook sees it.
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

    # The last Python frame below the engine: it is the caller of the engine's own requests, whereas a hook's request
    # has the hook as its caller. Callbacks at the end of a backward have no public name; DDP and FSDP use this one.
    from torch.autograd.graph import _engine_run_backward
    from torch.autograd.variable import Variable

    # A kernel that does nothing for a number of cycles.
    from torch.cuda import _sleep as keep_gpu_busy

    # While one is held, no other storage gets the address of a storage that is gone.
    from torch.multiprocessing.reductions import StorageWeakRef

    # The store of the process group: public functions make stores, and none returns the one that is in use.
    if torch.distributed.is_available():
        from torch.distributed.distributed_c10d import _get_default_store

    # Hooks of all modules: they can be added and removed by who added them, but not suspended.
    from torch.nn.modules.module import _global_forward_hooks as hooks_after_modules
    from torch.nn.modules.module import _global_forward_pre_hooks as hooks_before_modules

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

ENGINE_CODE = _engine_run_backward.__code__
queue_callback = Variable._execution_engine.queue_callback  # type: ignore[attr-defined]

# Raised where a fake tensor would need values; each holds the op as ``func``.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# All autocast keys that this build knows: a replay runs below autocast on every device, as the recorded calls did.
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)
for _name in ("CUDA", "XPU", "MPS", "HPU", "PrivateUse1"):
    if hasattr(DispatchKey, f"Autocast{_name}"):
        AUTOCAST_KEYS = AUTOCAST_KEYS.add(getattr(DispatchKey, f"Autocast{_name}"))

# Private attributes, read where they are needed as a call in between would cost as much as the question.
#   _version  an object's count of writes in place: the only sign of a write that there is
#   _base, _is_view()  the tensor that a view refers to
#   _indices(), _values()  the parts of a sparse tensor; the public ones ask for a coalesced one, which is a copy
#   _is_zerotensor()  a tangent of zeros, which forward-mode AD makes without memory: to read its bytes ends the process
#   _make_wrapper_subclass()  a tensor of a shape without data
#   _cdata  a storage's identity (`data_ptr()` of two empty storages is the same)
#   _schema, _overloadname, _overloadpacket  arguments read and written, returns: `torch.library` has no reader
#   _op_dk  one kernel of an op: the composed one, where a decomposition in Python would be taken first
#   _forward_hooks and its kin  a module's hooks: they can be added and removed, but not counted
#   _backward_hooks, _post_accumulate_grad_hooks  a tensor's, which run on its gradient
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_NOT_COUNTED = ("ctdr_lightning.trainer.", "wandb.")  # ours, and those that only draw histograms
_OF_TENSORS = ("_version", "_base", "_is_view", "_indices", "_values", "_is_zerotensor", "_make_wrapper_subclass")
_ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, (*_OF_TENSORS, *_OF_GRADIENTS)),
    (torch.UntypedStorage, ("_cdata",)),
    (torch.nn.Identity(), _HOOKS),
    (torch.ops.aten.relu.default, ("_schema", "_overloadname", "_overloadpacket", "_op_dk")),
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


def hooks_of(module: torch.nn.Module) -> list[Sized]:
    """A module's own collections of hooks, those of its backward included: their lengths tell how many it has."""
    return [getattr(module, name) for name in _HOOKS]


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether functions of the program run on a leaf's gradient in each backward, before it is added up or after."""
    hooks = (hook for name in _OF_GRADIENTS for hook in (getattr(tensor, name) or {}).values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_NOT_COUNTED) for hook in hooks)


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


def start_watching() -> None:
    """Begin to record this thread's allocations and releases on the processor.

    Raises:
        RuntimeError: If a profiler of the user's watches this thread already.
    """
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))


def stop_watching() -> list[int]:
    """End the recording that `start_watching` began.

    Returns:
        Bytes of each allocation on the processor in their order; of each release, negative ones.
    """
    records = _disable_profiler_legacy()
    return [e.cpu_memory_usage() for thread in records for e in thread if e.kind() == "memory_alloc"]


@contextmanager
def operators_replaced(kernels: Mapping[OpOverload, Callable[..., Any]], key: str) -> Iterator[None]:
    """Let functions stand in for aten operators inside the block.

    Args:
        kernels: From an operator to its substitute.
        key: Name of the dispatch key that they are kernels of.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[\\s\\S]*Overriding a previously registered kernel")
            for op, kernel in kernels.items():
                library.impl(op, kernel, key)
        yield
    finally:
        library._destroy()  # torch has no other way to take a kernel back


def as_composite(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the operators that torch composes an operator of; ``decompose()`` takes decompositions in Python first."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def fake_devices_hidden(from_cpp: torch.device) -> Iterator[None]:
    """Let C++ take fake tensors for another device's, while Python goes on to see the device that they stand for.

    C++ asks the tensor's class, where no mode answers; Python takes the attribute that it finds first.

    Args:
        from_cpp: The device that C++ sees.
    """
    own, question = FakeTensor.__torch_dispatch__, torch.ops.prim.device.default

    def device(tensor: FakeTensor) -> torch.device:
        return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device

    def told(args: Any) -> torch.device:
        return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else from_cpp

    def dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return told(args) if func is question else own(func, types, args, kwargs or {})

    replaced = {
        "__torch_dispatch__": classmethod(dispatch),
        "device": property(device),
        "is_cuda": property(lambda tensor: device(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(FakeTensor, name, value, create=True))
        yield


@contextmanager
def cuda_thought_available(capability: tuple[int, int]) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` and modules that ask for a card's compute capability work without a card.

    Args:
        capability: Compute capability of the card; bf16 from (8, 0) on.
    """
    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: capability >= (8, 0)),
        patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
    ):
        yield


def profiler_events(profiler: Any) -> list[Any]:
    """Return the raw events of a finished ``torch.profiler.profile``; its public ``events()`` drops ``[memory]``."""
    return profiler.profiler.kineto_results.events()


def free_unused_pinned_memory() -> None:
    """Unpin the memory that torch caches: the public name came after 2.8, and without it freed memory stays pinned."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def set_cuda_allocator(settings: str) -> None:
    """Give CUDA's allocator all of its settings anew, as in ``PYTORCH_CUDA_ALLOC_CONF``, which torch reads once."""
    first = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # the second name warns where it exists
    (first or torch.cuda.memory._set_allocator_settings)(settings)


def dump_cuda_memory(path: str) -> None:
    """Write CUDA's memory history for pytorch.org/memory_viz; torch documents the call in spite of its underscore."""
    torch.cuda.memory._dump_snapshot(path)


def replaces_scheduled_step(step: Any) -> None:
    """Mark a function as a scheduler's wrapper of a step: without it, one made before warns of an overridden step."""
    step._wrapped_by_lr_sched = True


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a tensor's bytes: itself, or the parts of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return (tensor,)


def group_store() -> Any:
    """Return the key-value store of the default process group; None without other processes, or where it has none."""
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return None if alone or torch.distributed.get_world_size() == 1 else _get_default_store()


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer has stepped, as a scheduler's wrapper does: it warns otherwise that it came first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


__all__ = [
    "AUTOCAST_KEYS",
    "ENGINE_CODE",
    "NEEDS_VALUES",
    "OLDEST_TORCH",
    "BelowAutograd",
    "DispatchKey",
    "ExcludeKeys",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "NoTorchDispatch",
    "NoTorchFunction",
    "OpMode",
    "OpOverload",
    "SetKeyExcluded",
    "StorageWeakRef",
    "TorchDispatchMode",
    "as_composite",
    "cuda_thought_available",
    "current_autograd_node",
    "current_dispatch_mode",
    "dump_cuda_memory",
    "fake_devices_hidden",
    "foreach_copy_",
    "free_unused_pinned_memory",
    "graph_task_id",
    "group_store",
    "has_gradient_hooks",
    "higher_order_utils",
    "hooks_after_modules",
    "hooks_before_modules",
    "hooks_of",
    "is_key_excluded",
    "is_transformed",
    "keep_gpu_busy",
    "keeps_graph",
    "mark_stepped",
    "n_dispatch_modes",
    "no_dispatch_modes",
    "operators_replaced",
    "pop_dispatch_mode",
    "profiler_events",
    "push_dispatch_mode",
    "queue_callback",
    "replaces_scheduled_step",
    "set_grad_enabled",
    "start_watching",
    "stop_watching",
    "strided_parts",
    "top_saved_tensors_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
