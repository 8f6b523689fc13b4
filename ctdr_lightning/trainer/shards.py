"""Models that their own ``configure_model`` shards: cut before it on every process alike, and copied with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.saved_shards import saved_shapes
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.memory.tape.module_paths import is_fsdp_unit
from ctdr_lightning.recovery.batchnorm import tracked
from ctdr_lightning.recovery.schedule import Recovery


def check_recovery(recovery: Recovery) -> None:
    """Refuse schedules that exchange layers, or copy the dense model, after layers were sharded.

    Args:
        recovery: The schedule under ``ModelParallelStrategy``.

    Raises:
        ConfigError: With the field and an alternative.
    """
    if recovery.staged:
        raise ConfigError(
            "recovery cuts layers while training runs, but under ModelParallelStrategy they are sharded by then.",
            "Cut all layers at the start: leave layers_per_stage and cut_epochs out.",
        )
    if recovery.max_drop is not None:
        raise ConfigError(
            "recovery.max_drop takes a cut back, but under ModelParallelStrategy layers are sharded by then.",
            "Leave max_drop out.",
        )
    if recovery.reference == "measure":
        raise ConfigError(
            "recovery.reference='measure' validates the dense model, which no process of ModelParallelStrategy holds.",
            "Validate the dense model in a run of its own, and give reference= as a number.",
        )
    if any(phase.train != "all" for phase in recovery.phases):
        rank_zero_warn(
            "CTDR: a checkpoint that is saved while a phase freezes parameters cannot be resumed from under "
            "ModelParallelStrategy: Lightning asks it for the optimizer's state of every parameter."
        )


def check_layers(module: nn.Module, request: str) -> None:
    """Require that the layers to be cut are there in ``setup``, before ``configure_model``.

    Args:
        module: About to be sharded.
        request: The argument that asks for cuts, as the error proposes it for `decompose`.

    Raises:
        ConfigError: If the module has no layer yet, or is sharded already.
    """
    if any(map(is_fsdp_unit, module.modules())):
        raise ConfigError(
            "layers cannot be decomposed once they are sharded.",
            "Make the model anew, or call ctdr_lightning.decompose before fully_shard.",
        )
    try:
        find_layers(module)
    except ConfigError as error:
        raise ConfigError(
            "layers that configure_model makes cannot be decomposed by the callback, which works before it.",
            "Make them in __init__ (on torch.device('meta') with ranks={'choices': ...}), or write, in configure_model "
            f"before fully_shard, ctdr_lightning.decompose(self, {request}), and CTDRCallback(rank=None, ...).",
        ) from error


def share_factors(strategy: Any, module: nn.Module) -> None:
    """Give every process the first one's factors and BatchNorm statistics, which sharding would not make equal.

    DDP sends weights to every process when it wraps a module; FSDP2 shards what each process has. Factors that were
    refitted to training data are the first process' alone.

    Args:
        strategy: Broadcasts.
        module: Cut, not yet sharded; changed in place. Layers on the meta device have nothing to share.
    """
    cut = [layer for _, layer in walk(module) if isinstance(layer, FactorizedLayer)]
    for layer in (*cut, *tracked(module).values()):
        state = layer.state_dict()
        if not any(tensor.is_meta for tensor in state.values()):
            layer.load_state_dict(strategy.broadcast(state))


def warn_of_other_layers(module: nn.Module, path: str | Path) -> None:
    """Name the way out where a checkpoint could not be loaded because its layers are not those of this run.

    Lightning tells callbacks of a checkpoint after it was loaded into sharded layers, which can no longer be exchanged.

    Args:
        module: Sharded.
        path: The checkpoint that training was to go on from.
    """
    try:
        here = {name: tensor.shape for name, tensor in module.state_dict().items()}
        strange = {name for name, _ in saved_shapes(Path(path)).items() ^ here.items()}
    except Exception:  # a checkpoint that cannot be read has had its own error
        return
    if strange:
        rank_zero_warn(
            f"CTDR: checkpoint {str(path)!r} has other layers than this run ({sorted(strange)[0]!r}). "
            f"Write CTDRCallback.from_checkpoint({str(path)!r}), whose choices are the checkpoint's, or, to validate, "
            f"ctdr_lightning.restore(module, {str(path)!r}) beforehand."
        )


class ShardedCopies:
    """Copies of a module that ``configure_model`` shards, each sharded by it as the module is.

    FSDP2 modules refuse to be copied. So the structure is copied beforehand, with weights on the meta device.

    Args:
        module: Not sharded yet.

    Raises:
        ConfigError: If it is sharded already.
    """

    def __init__(self, module: LightningModule) -> None:
        instead: dict[Tensor, Tensor] = {
            weight: nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            for weight in module.parameters()
        }
        self._structure = duplicate(module, instead=instead)

    def __call__(self, module: LightningModule) -> LightningModule:
        """A copy with the module's shards and buffers.

        Args:
            module: The module of ``__init__``, sharded by now and attached to a trainer.

        Raises:
            ConfigError: If ``configure_model`` made the copy another one than the module.
        """
        copy = shard(duplicate(self._structure), module)
        for part in copy.modules():  # of metrics, `to_empty` would take the states
            if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
                part.to_empty(device=module.device, recurse=False)
        copy.to(module.device)
        show_shards(module)
        ours, theirs = _tensors(copy), _tensors(module)
        if ours.keys() != theirs.keys():
            strange = sorted(ours.keys() ^ theirs.keys())[0]
            raise ConfigError(
                f"BatchNorm is re-estimated on a copy, but configure_model gives a copy other tensors ({strange!r}).",
                "Make layers in __init__, or give recovery={'batchnorm_batches': 0}.",
            )
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])
        return copy


def show_shards(module: nn.Module) -> None:
    """Free gathered weights, so that a module's parameters are its shards; nothing where nothing is sharded.

    The outermost unit's weights stay gathered after a forward without a backward, as in validation. A module's
    parameters are the gathered ones meanwhile, which FSDP2 forgets.

    Args:
        module: Between two steps.
    """
    for unit in _units(module):
        unit.reshard()


def shard(copy: LightningModule, like: LightningModule) -> LightningModule:
    """Shard a copy by its own ``configure_model``.

    Args:
        copy: Made before its source was sharded; changed in place.
        like: Its source, attached to the trainer.
    """
    copy.trainer = like.trainer
    copy.configure_model()
    return copy


def shard_to_listen(teacher: LightningModule, like: LightningModule) -> None:
    """Shard a model that only runs forwards, so that between two of them it holds shards alone.

    Args:
        teacher: As the copy of `shard`.
        like: As of `shard`.
    """
    shard(teacher, like).to(like.device)  # `fully_shard` moves no buffers
    for unit in _units(teacher):
        unit.set_reshard_after_forward(True)  # by default the outermost one awaits its backward with gathered weights


def _units(module: nn.Module) -> list[Any]:
    """The FSDP2 units; FSDP1 has no such calls."""
    return [part for part in module.modules() if is_fsdp_unit(part) and hasattr(part, "reshard")]


def _tensors(module: nn.Module) -> dict[str, Any]:
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(tensors)
