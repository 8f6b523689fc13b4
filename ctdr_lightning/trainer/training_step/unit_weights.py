"""FSDP2 units whose weights stay gathered between forward and backward: chosen once, on every process alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import graph_task_id
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.account.gathers import StayingUnits, choose_staying, exposed_s
from ctdr_lightning.memory.tape.module_paths import is_fsdp_unit
from ctdr_lightning.memory.traces.gathers import Gather, gathers_of
from ctdr_lightning.trainer.strategies import is_sharded


class UnitWeights:
    """Has units freed in the first step, and sets for each what is chosen after it.

    A unit keeps its own setting where nothing is proved of it: the outermost one, units of a mesh with more than one
    dimension, units that are resharded to fewer processes, that share a gather with a module elsewhere, or whose
    weights are not gathered once for the forward and once for the backward.

    Attributes:
        chooses: Whether the choice is still to be made.
        waits: Whether the present step is not to be planned, as the choice will change it, or has changed it.
    """

    def __init__(self) -> None:
        self.chooses = self.waits = False
        self._units: dict[str, Any] = {}
        self._seconds: Mapping[str, float] = {}
        self._own: dict[str, bool] = {}
        self._set: dict[str, bool] = {}
        self._hooks: list[Any] = []

    @property
    def key(self) -> tuple[str, ...]:
        """The units whose weights stay in planned steps, as a part of the kind of a step."""
        return tuple(name for name, frees in self._set.items() if not frees)

    def begin(self, trainer: Any, module: LightningModule, seconds: Mapping[str, float]) -> None:
        """Before the first step: from now on units are freed after their forward, until the choice.

        Args:
            trainer: In training.
            module: The model.
            seconds: Of a gather, by the unit's path; other units are left alone.

        Raises:
            ConfigError: Where one process has FSDP2 units: weights are copied there, which is not seen as a gather.
        """
        if seconds and trainer.world_size == 1:
            raise ConfigError(
                "memory_budget is given for fully_shard in one process, where FSDP2 copies weights instead of "
                "gathering them: plans do not know when such a weight is away.",
                "Call fully_shard only where self.trainer.world_size > 1, or leave memory_budget out.",
            )
        if not (is_sharded(trainer.strategy) and module.automatic_optimization and trainer.world_size > 1):
            return
        found = {name: unit for name, unit in _units_to_choose(module).items() if name in seconds}
        self._units, self._seconds = found, seconds
        self.chooses = self.waits = bool(self._units)
        for name, unit in self._units.items():
            self._hooks.append(unit.register_forward_hook(self._freeing(name, _meshes(unit))))

    def _freeing(self, name: str, meshes: list[Any]) -> Any:
        def free(unit: Any, args: Any, output: Any) -> None:
            """FSDP2 has done with the unit what its user asked for: note it, and free what is still there."""
            if graph_task_id() != -1:
                return  # a checkpoint runs the forward again for the unit's backward, which needs the weights
            found = _meshes(unit)
            if None in found:
                self._own[name] = False
                unit.reshard()
            elif found == meshes:
                self._own[name] = True

        return free

    def settle(self, trainer: Any, account: BatchAccount | None, budget_bytes: int, policy: str) -> str:
        """After the first step's backward, on every process: choose, agree, and set.

        A process proposes by the step that it has recorded. A unit's weights stay where all processes propose it.

        Args:
            trainer: In training.
            account: The batch; None where the step was not recorded.
            budget_bytes: The budget.
            policy: The memory policy's name.

        Returns:
            The choice in words.
        """
        gathers = [g for g in gathers_of(account.step) if g.unit in self._own] if account is not None else []
        proposed = StayingUnits(())
        if account is not None:
            proposed = choose_staying(account, gathers, self._seconds, budget_bytes, policy)
        known, staying = self._agreed(trainer, [{g.unit for g in gathers}, set(proposed.units)])
        self.chooses = False
        self._remove_hooks()
        chosen = {name: name not in staying for name in known}
        self._set = {name: chosen.get(name, self._own[name]) for name in self._units if name in self._own}
        self.waits = bool(self.key)  # otherwise the recorded step is the one to plan
        self.apply()
        return self._in_words([gather for gather in gathers if gather.unit in staying], trainer.strategy.root_device)

    def _in_words(self, spared: Sequence[Gather], device: torch.device) -> str:
        number = f"{len(spared)} of {len(self._units)}"
        said = f"the weights of {number} FSDP units stay gathered between forward and backward"
        if not spared:
            return f"{said}; all are freed and gathered again."
        n_bytes = sum(gather.n_bytes for gather in spared)
        seconds = sum(exposed_s(gather, self._seconds[gather.unit], device.type) for gather in spared)
        return f"{said}; they take {format_bytes(n_bytes)} and spare each step {format_seconds(seconds)} of gathers."

    def _agreed(self, trainer: Any, sets: list[set[str]]) -> list[list[str]]:
        """The names, of those of all units, that are in each set of names on all processes."""
        here = [[name in found for name in self._units] for found in sets]
        flags = torch.tensor(here, dtype=torch.int32, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        return [[name for name, flag in zip(self._units, row, strict=True) if flag] for row in flags.tolist()]

    def apply(self) -> None:
        """Set each unit to what was chosen; twice is once."""
        for name, frees in self._set.items():
            self._units[name].set_reshard_after_forward(frees, recurse=False)

    def step_begins(self) -> None:
        """A step begins: from here on it is one with the present choice."""
        self.waits = self.chooses

    def release(self) -> None:
        """Give every unit its own setting again."""
        self._remove_hooks()
        for name in self._set:
            self._units[name].set_reshard_after_forward(self._own[name], recurse=False)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _units_to_choose(module: nn.Module) -> dict[str, Any]:
    """The FSDP2 units inside of another unit, whose weights are sharded over a mesh of one dimension."""
    units = {name: unit for name, unit in module.named_modules() if is_fsdp_unit(unit)}
    inner = {name: unit for name, unit in units.items() if any(_is_within(name, other) for other in units)}
    return {n: unit for n, unit in inner.items() if (found := _meshes(unit)) and all(_is_line(mesh) for mesh in found)}


def _is_within(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _meshes(unit: nn.Module) -> list[Any]:
    """The meshes over which a unit's own weights are sharded; None for one that is gathered."""
    inner = {id(p) for m in unit.modules() if m is not unit and is_fsdp_unit(m) for p in m.parameters()}
    return [getattr(p, "device_mesh", None) for p in unit.parameters() if id(p) not in inner]


def _is_line(mesh: Any) -> bool:
    return mesh is not None and mesh.ndim == 1
