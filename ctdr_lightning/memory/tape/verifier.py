"""Compares recomputed values with the tensors that autograd saved, so that no gradient is wrong in silence.

A value that a plan drops is fingerprinted when autograd saves it and again when it comes back: replayed, brought back
from another place, or decoded. All are compared when the backward is over, on a GPU with one synchronisation. Where
they differ the backward ends in an error, so that its gradients are not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError, ReplayError
from ctdr_lightning.basics.torch_private import OpOverload, graph_task_id, queue_callback
from ctdr_lightning.memory.values.fingerprint import Fingerprint, differing, of_signs, of_tensor
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.value import ABOUT, SIGNS, Value, root_of

VERIFY = ("first", "always", "never")
# A verified step takes up to a third more: one in 500 is below 0.1 % of the time.
STEPS_BETWEEN = 500
NOT_REPEATABLE = (
    "a kernel that gives other bits each time, an operator with a state of its own, or a write that torch does not see"
)
Blame = Callable[[set[int], set[int]], ReplayError]


def check_verify(verify: str) -> str:
    """The value, where it is one of ``VERIFY``.

    Raises:
        ConfigError: If it is another.
    """
    if verify not in VERIFY:
        raise ConfigError(f"verify={verify!r} is unknown.", f"Give one of {', '.join(map(repr, VERIFY))}.")
    return verify


@dataclass
class Proof:
    """Under which settings the steps of one plan were seen to be right.

    Attributes:
        settings: Those under which a step was verified.
        n_steps: Steps so far.
    """

    settings: set[Hashable] = field(default_factory=set)
    n_steps: int = 0

    def due(self, verify: str, settings: Hashable) -> bool:
        """Whether the step that begins is to be verified."""
        self.n_steps += 1
        again = settings not in self.settings or self.n_steps % STEPS_BETWEEN == 0
        return verify == "always" or (verify == "first" and again)


class Verifier:
    """Verifies one step.

    Args:
        blame: From the identities of values that came back wrong, and of those that came back right, to the error.
        passed: Called when a backward is over and everything in it came back right.
        at_once: Whether each value is compared as it comes back: where gradients are used inside the backward.
    """

    def __init__(self, blame: Blame, passed: Callable[[], None] = lambda: None, *, at_once: bool = False) -> None:
        self._blame, self._passed, self._at_once = blame, passed, at_once
        self._right: set[int] = set()
        self._pending: list[tuple[int, tuple[Fingerprint, Fingerprint]]] = []
        self._tasks: set[int] = set()
        self._lock = threading.Lock()  # backwards of two devices run in two threads

    def saved(self, value: Value, tensor: Tensor, identity: int) -> None:
        """Autograd saves a value that may be dropped.

        Args:
            value: The value.
            tensor: Its contents.
            identity: Its id in the error.
        """
        if value.contents is None and not _is_workspace(root_of(value)):
            found = _fingerprint(value.comes_back, tensor)
            value.contents = None if found is None else (value.comes_back, tensor.shape, found)
            value.identity = identity

    def returned(self, value: Value, tensor: Tensor) -> None:
        """Autograd receives a saved value: one that was held throughout needs no check.

        Raises:
            ReplayError: If it came back with other contents.
        """
        if value.contents is None or not value.remade:
            return
        value.remade = False
        how, shape, before = value.contents
        after = _fingerprint(how, tensor) if tensor.shape == shape else None
        if after is None:
            raise self._blame({value.identity}, self._right)
        with self._lock:
            self._pending.append((value.identity, (before, after)))
        task = graph_task_id()
        if self._at_once or task == -1:
            self._settle()
        if task not in self._tasks and task != -1:
            self._tasks.add(task)
            queue_callback(self._backward_done)

    def _settle(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        wrong = {pending[place][0] for place in differing([pair for _, pair in pending])}
        self._right |= {identity for identity, _ in pending} - wrong
        if wrong:
            raise self._blame(wrong, self._right)

    def _backward_done(self) -> None:
        self._settle()
        self._passed()


def _is_workspace(value: Value) -> bool:
    node = value.node
    return node is not None and node.place_of(value) in _workspaces(node.func)


def _workspaces(func: Any) -> tuple[int, ...]:
    return traits(func).workspaces if isinstance(func, OpOverload) else ()


def _fingerprint(how: str, tensor: Tensor) -> Any:
    if how == ABOUT:
        return None  # a lossy codec was asked for
    return of_signs(tensor) if how == SIGNS else of_tensor(tensor)


def numeric_settings() -> Hashable:
    """The global settings under which the same call may give other bits."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, _matmul_precision(), *autocast,
    )  # fmt: skip


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer where its newer settings were used too
        return str(torch.backends.cuda.matmul.fp32_precision)
