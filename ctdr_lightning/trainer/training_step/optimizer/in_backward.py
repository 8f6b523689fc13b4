"""The optimizer's step inside the backward: each parameter is updated as its gradient is ready, which is then freed.

LOMO's fusion of gradient and update (Lv et al., arXiv 2306.09782), for any optimizer of ``torch.optim`` that updates
its parameters one by one. The optimizer's own ``step`` stays: it runs the backward as its closure and finds no gradient
left, so that schedulers, hooks, counters and checkpoints are as ever.

FSDP2 runs the hooks of a sharded parameter after its unit's reduce-scatter, so that the gradient is complete. The
gradients of a unit share one storage, which goes with the last of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.holders.optimizer_state import name_of, updates_one_by_one
from ctdr_lightning.memory.tape.module_paths import is_fsdp_unit
from ctdr_lightning.trainer.modules import has_compiled_step, overrides
from ctdr_lightning.trainer.strategies import is_on_one_device, is_sharded
from ctdr_lightning.trainer.training_step.optimizer.gradient_readers import gradient_reader
from ctdr_lightning.trainer.training_step.optimizer.resident import kept_in

OPTION = "optimizer_step='in_backward'"
_BETWEEN = (
    "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "optimizer_zero_grad",
)  # fmt: skip
_ADDS_UP = "GradientAccumulationScheduler"


Unseen = Callable[[], AbstractContextManager[None]]
Begins = Callable[[Optimizer], None]


class StepInBackward:
    """Updates the parameters of a Trainer's optimizer inside the backward, for as long as it trains.

    Args:
        asked: Whether that is asked for; else nothing is done.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._unseen: Unseen = nullcontext
        self._begins: Begins | None = None
        self._optimizer: Optimizer | None = None
        self._handles: list[Any] = []
        self._open = False
        self._updated: set[Tensor] = set()
        self._units: dict[nn.Module, set[Tensor]] = {}
        self._ran: set[nn.Module] = set()
        self._one_at_a_time = Lock()  # devices have backward threads of their own

    def attach(self, trainer: Any, module: LightningModule, *, keeps_gradients: bool) -> None:
        """Hook every parameter that is trained.

        Args:
            trainer: About to train.
            module: The model.
            keeps_gradients: Whether the gradients of a step are asked for in the next one.

        Raises:
            ConfigError: If something runs between the backward and the optimizer's step, or reads gradients.
        """
        if not self._asked or self._handles:
            return
        reason = hindrance(trainer, module, trainer.optimizers, keeps_gradients=keeps_gradients)
        if reason:
            raise ConfigError(
                f"{OPTION} is not supported here: {reason}.", "Leave optimizer_step out, or remove the obstacle."
            )
        (optimizer,) = trainer.optimizers
        self._optimizer = optimizer
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad:
                    self._handles.append(param.register_post_accumulate_grad_hook(self._hook(index)))
        # while a unit runs its parameters are the gathered ones
        self._units = {unit: set(unit.parameters()) for unit in module.modules() if is_fsdp_unit(unit)}
        self._handles += [unit.register_forward_pre_hook(self._unit_runs) for unit in self._units]

    def release(self) -> None:
        """Remove the hooks; gradients remain until the step again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._units, self._optimizer = [], {}, None

    def step_begins(self) -> None:
        """A training step's forward is about to run."""
        self._ran.clear()

    @contextmanager
    def backward(self, unseen: Unseen | None = None, begins: Begins | None = None) -> Iterator[None]:
        """Around the backward after which the optimizer would step; gradients of any other only add up.

        Args:
            unseen: Pauses the recording of the step during an update.
            begins: Told of the optimizer before each update: from then on the step cannot be repeated.
        """
        self._unseen, self._begins = unseen or nullcontext, begins
        self._updated.clear()
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _unit_runs(self, unit: nn.Module, args: Any) -> None:
        """Refuse a unit whose weights would be gathered for the backward after their update: autograd would not notice.

        A checkpoint runs a unit again inside the backward, but before the update.
        """
        if not torch.is_grad_enabled():
            return
        again = not self._updated.isdisjoint(self._units[unit]) if self._open else unit in self._ran
        if again:
            raise ConfigError(
                f"{OPTION} is impossible: an FSDP unit ({type(unit).__name__}) runs twice in one step, so that the "
                "backward would read its weights after their update.",
                "Make the module a part of a larger unit, or leave optimizer_step out.",
            )
        self._ran.add(unit)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def ready(param: Tensor) -> None:
            if self._open:
                with self._one_at_a_time:
                    self._update(index, param)

        return ready

    def _update(self, index: int, param: Tensor) -> None:
        assert self._optimizer is not None
        if param in self._updated:
            raise ConfigError(
                f"{OPTION} is impossible: a parameter of shape {tuple(param.shape)} got its gradient in two parts, the "
                "second after its update.",
                "Call torch.utils.checkpoint.checkpoint with use_reentrant=False, or leave optimizer_step out.",
            )
        self._updated.add(param)
        if self._begins is not None:
            self._begins(self._optimizer)
        with torch.no_grad(), _alone(self._optimizer, index, param), self._unseen():
            _own_update(self._optimizer)
        if isinstance(param, DTensor):
            increment_version(param)  # for-each and fused updates of shards do not: autograd would miss the write
        param.grad = None


def _own_update(optimizer: Optimizer) -> None:
    """The class's own step, without hooks and schedulers' wrappers: these run once a step."""
    inspect.unwrap(type(optimizer).step)(optimizer)


@contextmanager
def _alone(optimizer: Optimizer, index: int, param: Tensor) -> Iterator[None]:
    """An optimizer that has one parameter for a while."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for place, group in enumerate(groups):
        group["params"] = [param] if place == index else []
    try:
        yield
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def may_step_inside(module: LightningModule, batch: Any, step: Callable[[Any, Any], Tensor]) -> bool:
    """Whether no gradient comes in two parts, and none is computed from a parameter after its update.

    One step shows it, on a copy of the module whose tensors have no contents.

    Args:
        module: The model, or a copy.
        batch: As ``step`` takes it.
        step: From module and batch to the loss.
    """

    def watched(twin: LightningModule, inputs: Any) -> Tensor:
        left: set[Tensor] = {param for param in twin.parameters() if param.requires_grad}

        def updated(param: Tensor) -> None:
            left.remove(param)
            increment_version(param)
            param.grad = None

        for param in left:
            param.register_post_accumulate_grad_hook(updated)
        return step(twin, inputs)

    try:
        record_fake(module, batch, watched, reads_values=True)
    except Exception:  # autograd's, of a tensor that was modified in place; or a second part's
        return False
    return True


def hindrance(trainer: Any, module: LightningModule, optimizers: Sequence[Optimizer], *, keeps_gradients: bool) -> str:
    """Why the step cannot be inside the backward; empty where it can.

    Args:
        trainer: About to train, or in training.
        module: The model.
        optimizers: The trainer's, or those that it will have.
        keeps_gradients: Whether the gradients of a step are asked for in the next one.
    """
    asked = (
        loop_hindrance(trainer, module, shards=True), _adds_up(trainer), _run_hindrance(trainer),
        _optimizer_hindrance(optimizers), _shard_hindrance(trainer, module, optimizers),
        _code_hindrance(trainer, module),
    )  # fmt: skip
    for reason in asked:
        if reason:
            return reason
    return "keep_gradients=True asks for gradients that are freed as they come" if keeps_gradients else ""


def loop_hindrance(trainer: Any, module: LightningModule, *, shards: bool = False) -> str:
    """Why a batch is not one forward and one backward of this process alone; empty where it is.

    Args:
        trainer: About to train, or in training.
        module: The model.
        shards: Whether this process may hold shards of the model.
    """
    if not module.automatic_optimization:
        return "under manual optimization the module itself says when its optimizers step"
    if not is_on_one_device(trainer.strategy) and not (shards and is_sharded(trainer.strategy)):
        return f"under {type(trainer.strategy).__name__} gradients are exchanged between processes before the step"
    return "the module is compiled, its step included" if has_compiled_step(module) else ""


def _adds_up(trainer: Any) -> str:
    if trainer.accumulate_grad_batches > 1:
        return f"accumulate_grad_batches={trainer.accumulate_grad_batches} adds gradients up over several backwards"
    if any(kind.__name__ == _ADDS_UP for callback in trainer.callbacks for kind in type(callback).__mro__):
        return f"{_ADDS_UP} adds gradients up over several backwards"
    return ""


def _run_hindrance(trainer: Any) -> str:
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val} needs all gradients before the first update"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return f"precision={trainer.precision!r} scales the loss, and looks at all gradients before the first update"
    return ""


def _optimizer_hindrance(optimizers: Sequence[Optimizer]) -> str:
    if len(optimizers) != 1:
        return f"the module has {len(optimizers)} optimizers"
    (optimizer,) = optimizers
    if updates_one_by_one(optimizer):
        return ""
    return f"{name_of(optimizer)} is not known to update its parameters one by one"


def _shard_hindrance(trainer: Any, module: LightningModule, optimizers: Sequence[Optimizer]) -> str:
    """Only a shard's gradient is known to be complete when it is there: others may be exchanged after the backward."""
    if not is_sharded(trainer.strategy):
        return ""
    optimizer, names = optimizers[0], {p: name for name, p in module.named_parameters()}
    if kept_in(optimizer, other_than=trainer.strategy.root_device.type):
        return "FSDP's CPUOffloadPolicy may still copy a gradient when its parameter is updated"
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    whole = next((names.get(p, "a parameter") for p in trained if not isinstance(p, DTensor)), "")
    return whole and f"{whole} is not sharded, and its gradient may be exchanged between processes before the step"


def _code_hindrance(trainer: Any, module: LightningModule) -> str:
    for owner in (module, *trainer.callbacks):
        for name in _BETWEEN:
            if overrides(owner, name):
                return f"{type(owner).__name__}.{name} comes between gradients and their update"
    reader = gradient_reader(module, trainer.callbacks, after_backward=True)
    return f"{reader} reads gradients, which are freed as they come" if reader else ""
