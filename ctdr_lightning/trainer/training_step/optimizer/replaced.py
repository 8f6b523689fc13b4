"""Parameters that a cut has replaced, and that an optimizer holds all the same: the factors would not be trained."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.holders.optimizer_state import name_of


class ReplacedParameters:
    """Notices optimizers that were given parameters from before a cut, from a list made in ``__init__`` say."""

    def __init__(self) -> None:
        self._before: list[ref[Tensor]] = []

    def cut_begins(self, module: nn.Module) -> None:
        """Note the parameters of a module before its first cut."""
        self._before = self._before or [ref(param) for param in module.parameters()]

    def check(self, trainer: Any, module: nn.Module) -> None:
        """Refuse optimizers of replaced parameters.

        Args:
            trainer: Its optimizers are made.
            module: The model, after its cut.

        Raises:
            ConfigError: If an optimizer holds a parameter that the module no longer has.
        """
        left = {id(param) for param in module.parameters()}
        replaced = {id(param): param for param in (held() for held in self._before) if param is not None}
        for optimizer in trainer.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            stale = [p for p in held if id(p) in replaced and id(p) not in left]
            if stale:
                shapes = ", ".join(sorted({"x".join(map(str, param.shape)) for param in stale})[:3])
                raise ConfigError(
                    f"{name_of(optimizer)} was given {len(stale)} parameters of layers that the cut has "
                    f"replaced ({shapes}), so that the factors in their place would not be trained.",
                    "Collect the parameters in configure_optimizers, which runs after the cut, not in __init__.",
                )
