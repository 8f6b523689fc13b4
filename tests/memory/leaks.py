"""Counts what a step may leave behind, with the garbage collector switched off."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import torch

from ctdr_lightning.basics.torch_private import DispatchKey, is_key_excluded, n_dispatch_modes, top_saved_tensors_hooks
from ctdr_lightning.memory.values.tensors import has_storage
from ctdr_lightning.memory.values.value import Handle, Held, Node, Value

ENGINE = (Value, Node, Handle, Held)


def engine_objects() -> Counter[str]:
    """The engine's objects that are alive, by class."""
    return Counter(type(o).__name__ for o in gc.get_objects() if issubclass(type(o), ENGINE))


def tensor_bytes() -> int:
    """Bytes of all storages that some Python tensor holds."""
    storages = {}
    for o in gc.get_objects():
        # a sparse tensor of an earlier test may be alive: it has no storage
        if type(o) in (torch.Tensor, torch.nn.Parameter) and has_storage(o):
            storages[o.untyped_storage()._cdata] = o.untyped_storage().nbytes()
    return sum(storages.values())


def left_behind(step: Callable[[], object], times: int = 5) -> tuple[Counter[str], int]:
    """What ``times`` steps leave behind, without the collector's help: engine objects, and tensors' bytes.

    The first step may leave what every step leaves (gradients), so it is not counted.
    """
    gc.collect()
    gc.disable()
    frozen = gc.get_freeze_count()
    gc.freeze()  # what was there before is not looked at again and again
    try:
        step()
        objects, n_bytes = engine_objects(), tensor_bytes()
        for _ in range(times):
            step()
        return engine_objects() - objects, tensor_bytes() - n_bytes
    finally:
        if not frozen:  # else the suite's imports would be looked at from now on
            gc.unfreeze()
        gc.enable()


def assert_nothing_is_installed() -> None:
    """No dispatch mode, no saved-tensor hooks, no module hooks, gradients and autograd on."""
    assert n_dispatch_modes() == 0
    assert top_saved_tensors_hooks(True) is None
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.is_grad_enabled()
    assert not is_key_excluded(DispatchKey.AutogradCPU)
