"""Which module's forward is running: its dotted path, found without knowing the root beforehand, and its FSDP unit."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ctdr_lightning.basics.torch_private import graph_task_id
from ctdr_lightning.memory.tape.inference_blocks import InferenceBlocks


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was called on a module."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether a module's weights are gathered only around its own forward and backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded where it was never imported
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


class ModulePaths:
    """While entered, knows where the forward is.

    Args:
        root: The module that paths start from; without one, each module that is called from outside of any other.

    Attributes:
        unit: Identity of the innermost FSDP unit whose forward runs; 0 outside of one.
        entered: How many forwards of modules have begun, those in a recomputation of the backward or in a block of
            ``torch.inference_mode`` left out.
        training: How many of these modules were in training mode.
        compiled: Whether one of them is compiled.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root = root
        self.unit = 0
        self.entered = self.training = 0
        self.compiled = False
        self._stack: list[tuple[nn.Module, int]] = []
        self._names: dict[int, str] = {}
        self._named: nn.Module | None = None
        self._path: str | None = None
        self._blocks = InferenceBlocks()

    @property
    def path(self) -> str:
        """Dotted path of the module whose forward runs; empty outside of one."""
        if self._path is None:
            self._path = self._find_path() if self._stack else ""
        return self._path

    def _find_path(self) -> str:
        root = self._root or self._stack[0][0]
        if self._named is not root:
            self._names, self._named = {id(m): name for name, m in root.named_modules()}, root
        found = (name for module, _ in reversed(self._stack) if (name := self._names.get(id(module))))
        return next(found, type(self._stack[0][0]).__name__)

    def __enter__(self) -> ModulePaths:
        self._hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )
        self._blocks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._blocks.__exit__(kind, error, tb)
        for hook in self._hooks:
            hook.remove()
        self._stack.clear()
        self._named, self._path, self.unit = None, None, 0

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if graph_task_id() == -1 and not self._blocks.depth:
            self.entered += 1
            self.training += module.training
        self.compiled |= has_compiled_forward(module)
        if is_fsdp_unit(module):
            self.unit = id(module)
        self._stack.append((module, self.unit))
        self._path = None

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop()[0] is not module:
            pass
        self._path = None
        self.unit = self._stack[-1][1] if self._stack else 0
