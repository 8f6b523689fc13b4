"""Supported strategies, the reasons against the others, and the steps of a parameter exchange in each.

Classes are distinguished by name, so that ``pytorch_lightning`` and ``lightning`` are served alike.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.gpu_memory import synchronize
from ctdr_lightning.memory.tape.module_paths import has_compiled_forward, is_fsdp_unit
from ctdr_lightning.trainer.modules import has_compiled_step

_TESTED = ("SingleDeviceStrategy", "DDPStrategy")
_SHARDED = "ModelParallelStrategy"
_SPAWNS = "_MultiProcessingLauncher"
_REFUSED = {
    "DeepSpeedStrategy": "Lightning's DeepSpeedStrategy runs on CUDA devices alone, so nothing could be tested",
    "FSDPStrategy": "FSDP1 flattens parameters before the callback can plan; it cannot be tested without GPUs",
    "XLAFSDPStrategy": "XLA compiles the step, so that no tensor can be dropped from outside",
    "XLAStrategy": "XLA compiles the step, so that no tensor can be dropped from outside",
    "SingleDeviceXLAStrategy": "XLA compiles the step, so that no tensor can be dropped from outside",
}  # fmt: skip
_INSTEAD = {
    "DeepSpeedStrategy": "Use ModelParallelStrategy, and in configure_model fully_shard(unit, ...), which frees "
    "weights as ZeRO stage 3 does; fully_shard(unit, reshard_after_forward=False, ...) keeps them, as stage 2 does",
    "FSDPStrategy": "Use ModelParallelStrategy, and fully_shard in configure_model",
}  # fmt: skip
_PRUNES = "ModelPruning"
_BEFORE = ("WeightAveraging", "StochasticWeightAveraging")


def _classes(thing: object) -> list[str]:
    return [kind.__name__ for kind in type(thing).__mro__]


def is_sharded(strategy: Any) -> bool:
    """Whether parameters are sharded (FSDP2, tensor parallel) by ``configure_model``."""
    return _SHARDED in _classes(strategy)


def settle_units(module: nn.Module) -> dict[str, float]:
    """Gather the weights of each FSDP2 unit twice and free them again; on every process alike.

    The first gather makes the storages that all later ones fill. In a recorded step its ops would be ones that no later
    step has. The second one is timed.

    Returns:
        Seconds of a gather by the unit's path; a unit that shares its gather with a module elsewhere is left out.
    """
    found: dict[str, float] = {}
    units = ((name, unit) for name, unit in module.named_modules() if is_fsdp_unit(unit))
    for name, unit in units:
        if hasattr(unit, "unshard"):  # FSDP1 has its storages from the start
            unit.unshard()
            unit.reshard()
            before = _gathered(module)
            seconds = _gather_s(unit)
            outside = (n for n in _gathered(module) - before if name and not n.startswith(f"{name}."))
            if next(outside, None) is None:
                found[name] = seconds
            unit.reshard()
    return found


def _gather_s(unit: Any) -> float:
    device = next((p.device for p in unit.parameters()), torch.device("cpu"))
    synchronize(device)
    start_s = perf_counter()
    unit.unshard()
    synchronize(device)
    return perf_counter() - start_s


def _gathered(module: nn.Module) -> set[str]:
    """Names of the parameters that are whole on this process."""
    return {name for name, parameter in module.named_parameters() if not hasattr(parameter, "device_mesh")}


def is_on_one_device(strategy: Any) -> bool:
    """Whether one process trains on one device, and exchanges nothing."""
    return "SingleDeviceStrategy" in _classes(strategy)


def check_strategy(strategy: Any, *, cuts: bool, chooses: bool, allow_untested: bool) -> None:
    """Refuse a strategy under which the run would fail or be wrong.

    Args:
        strategy: The trainer's strategy.
        cuts: Whether layers are to be decomposed by the callback.
        chooses: Whether ranks and plan are to be chosen together for a budget.
        allow_untested: Go on, with a warning, where nothing is known to be wrong for sure.

    Raises:
        ConfigError: With the strategy, the reason and an alternative.
    """
    names = _classes(strategy)
    _check_launcher(strategy, cuts)
    if is_sharded(strategy):
        return _check_sharded(cuts and chooses)
    reason = next((why for name, why in _REFUSED.items() if name in names), None)
    if reason is None and any(name in names for name in _TESTED):
        return None
    reason = reason or "it is not among the tested ones"
    if not allow_untested:
        raise ConfigError(
            f"strategy {names[0]} is not supported: {reason}.",
            f"{_instead_of(names)}; memory=Memory(allow_untested=True) tries {names[0]} anyway.",
        )
    rank_zero_warn(f"CTDR is not tested with {names[0]}: {reason}. You asked for it by allow_untested=True.")
    return None


def _instead_of(names: Sequence[str]) -> str:
    found = next((said for name, said in _INSTEAD.items() if name in names), None)
    return found or "Use a single device, ddp, or ModelParallelStrategy"


def check_device(device: torch.device, *, plans: bool, allow_untested: bool) -> None:
    """Refuse memory plans for a device whose allocator and clock were never compared with a plan's.

    Args:
        device: Of the steps.
        plans: Whether memory is to be planned.
        allow_untested: Go on, with a warning.

    Raises:
        ConfigError: With the device and an alternative.
    """
    name = "ROCm" if device.type == "cuda" and torch.version.hip else device.type
    if not plans or name in ("cpu", "cuda"):
        return
    reason = f"memory plans are not tested on {name} devices: their allocator and their clock are others"
    if not allow_untested:
        raise ConfigError(
            f"{reason}.",
            "Train on an NVIDIA GPU or a processor, or leave memory_budget out and give policy='keep'; "
            "memory=Memory(allow_untested=True) tries it anyway.",
        )
    rank_zero_warn(f"CTDR: {reason}. You asked for it by allow_untested=True.")


def _check_launcher(strategy: Any, cuts: bool) -> None:
    if cuts and _SPAWNS in _classes(getattr(strategy, "launcher", None)):
        raise ConfigError(
            "layers cannot be decomposed under a strategy that starts its processes from this one (ddp_spawn, "
            "ddp_notebook): the model here would stay dense, and Lightning would drop the factors trained there.",
            "In a script use strategy='ddp'. In a notebook call ctdr_lightning.decompose(model, rank=...) before fit,"
            " and give CTDRCallback(rank=None).",
        )


def _check_sharded(chooses: bool) -> None:
    if chooses:
        raise ConfigError(
            "ranks cannot be chosen for a budget under ModelParallelStrategy: a step of the whole model does not tell "
            "the bytes of a process that holds shards.",
            "Give a share such as rank=0.25; memory_budget is kept by the plan of each process.",
        )


def check_callbacks(trainer: Any, callback: Any, *, cuts: bool, staged: bool) -> None:
    """Refuse callbacks that would hold on to layers that are exchanged.

    Args:
        trainer: Whose callbacks are looked at.
        callback: Ours.
        cuts: Whether layers are decomposed.
        staged: Whether some are while training runs.

    Raises:
        ConfigError: Naming the callback and the fix.
    """
    if cuts and any(_PRUNES in _classes(other) for other in trainer.callbacks):
        raise ConfigError(
            "layers cannot be decomposed beside ModelPruning: it would prune the dense ones that are exchanged, and "
            "takes the bias of a factorized layer for a parameter of its own.",
            "Prune in a run of its own, later: ModelPruning(..., parameter_names=['weight']) without CTDRCallback.",
        )
    position = trainer.callbacks.index(callback)
    for index, other in enumerate(trainer.callbacks):
        if not any(name in _classes(other) for name in _BEFORE):
            continue
        name = type(other).__name__
        if staged:
            raise ConfigError(
                f"staged recovery changes layers while {name} averages the old ones.",
                f"Use one-shot recovery (no layers_per_stage, no cut_epochs), or leave {name} out.",
            )
        if cuts and index < position:
            raise ConfigError(
                f"{name} comes before CTDRCallback and would copy the model before it is decomposed.",
                f"Write callbacks=[CTDRCallback(...), {name}(...)].",
            )


def check_compiled(module: nn.Module, *, plans: bool, bounded: bool, moves: bool, distills: Any) -> None:
    """Check the limits for a module that is compiled, its whole step or a part.

    Args:
        module: The LightningModule.
        plans: Whether memory is to be planned; the user is warned that a compiled part is not compiled then.
        bounded: Whether there is a budget; without one the user is warned that a compiled step has no plan.
        moves: Whether saved tensors are to be put away; the user is warned that they are not.
        distills: Whether a teacher is to be listened to.

    Raises:
        ConfigError: If a teacher is, whose term would have to enter the compiled step.
    """
    if not has_compiled_step(module):
        part = next((name for name, inner in module.named_modules() if name and has_compiled_forward(inner)), "")
        if plans and part:
            rank_zero_warn(
                f"CTDR: '{part}' is compiled, but runs op by op where a step is planned, as torch compiles nothing "
                "beneath a plan. torch.compile(module), called on the whole LightningModule, is compiled with its plan."
            )
        return
    if distills:
        raise ConfigError(
            "recovery.distill is given for a module whose training_step is compiled.",
            "Compile a submodule instead (module.net.compile()), or leave distill out.",
        )
    if plans and not bounded:
        rank_zero_warn(
            "CTDR: the module is compiled, so torch's partitioner chooses the kept tensors; policy is not used without "
            "memory_budget. Write memory_budget, or compile a submodule."
        )
    if moves:
        rank_zero_warn("CTDR: offload is not used in a compiled step, whose plans keep or recompute.")


def bucket_bytes(strategy: Any, module: nn.Module) -> int:
    """Bytes of the buckets in which DDP averages a module's gradients: each gradient once more, all along."""
    if not hasattr(strategy, "configure_ddp"):
        return 0
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def rewrap(trainer: Any) -> None:
    """Let DDP look at the parameters anew, after layers or ``requires_grad`` changed; nothing elsewhere."""
    if unwrap(trainer):
        gc.collect()  # the old wrapper's reducer sits in a cycle and would go on answering to gradients
        trainer.strategy.configure_ddp()


def unwrap(trainer: Any) -> bool:
    """Take DDP's wrapper off; returns whether there was one."""
    strategy = trainer.strategy
    if not hasattr(strategy, "configure_ddp") or strategy.model is strategy.lightning_module:
        return False
    strategy.model = strategy.lightning_module
    return True
