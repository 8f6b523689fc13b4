"""Fine-tuning phases: which parameters train, and by how much the learning rate is scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.recovery.batchnorm import tracked

Owners = Callable[[nn.Module], Iterable[str]]
TRAINED_PARAMETERS: Registry[Owners] = Registry("phase.train", group="ctdr_lightning.trained_parameters")


@TRAINED_PARAMETERS.register("all")
def everything(module: nn.Module) -> list[str]:
    """Every layer of a module, itself included."""
    return [name for name, _ in module.named_modules()]


@TRAINED_PARAMETERS.register("factors")
def factors(module: nn.Module) -> list[str]:
    """The factorized layers."""
    return [name for name, layer in walk(module) if isinstance(layer, FactorizedLayer)]


@TRAINED_PARAMETERS.register("batchnorm")
def batchnorm(module: nn.Module) -> list[str]:
    """The layers with running statistics."""
    return list(tracked(module))


def chosen_parameters(module: nn.Module, train: str | Sequence[str]) -> set[str]:
    """Names of the parameters a phase trains.

    Args:
        module: Any module.
        train: ``"all"``, ``"factors"``, ``"batchnorm"``, another registered word, or name patterns.

    Raises:
        ConfigError: If a word or pattern means no parameter.
    """
    names = [name for name, _ in module.named_parameters()]
    chosen: set[str] = set()
    for word in [train] if isinstance(train, str) else train:
        found = _meant(module, word, names)
        if not found:
            raise ConfigError(
                f"phase.train: {word!r} means no parameter.",
                f"Parameters: {', '.join(names[:6])} ({len(names)} in all).",
            )
        chosen |= found
    return chosen


def _meant(module: nn.Module, word: str, names: list[str]) -> set[str]:
    if word not in TRAINED_PARAMETERS:
        return {name for name in names if fnmatchcase(name, word)}
    starts = tuple(f"{owner}." if owner else "" for owner in TRAINED_PARAMETERS[word](module))
    return {name for name in names if name.startswith(starts)}


class Freezer:
    """Freezes the parameters that a phase does not train; parameters that the user froze stay frozen."""

    def __init__(self) -> None:
        self._frozen: list[nn.Parameter] = []

    def freeze(self, module: nn.Module, train: str | Sequence[str]) -> bool:
        """Freeze all but the chosen parameters; returns whether any parameter changed."""
        before = {id(parameter) for parameter in self._frozen}
        self.thaw()
        chosen = chosen_parameters(module, train)
        for name, parameter in module.named_parameters():
            if name not in chosen and parameter.requires_grad:
                self._frozen.append(parameter)  # first, so that an interrupt in between leaves nothing frozen for good
                parameter.requires_grad_(False)
                parameter.grad = None
        return before != {id(parameter) for parameter in self._frozen}

    def thaw(self) -> bool:
        """Let everything train again that this object froze; returns whether that was anything."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        frozen, self._frozen = self._frozen, []
        return bool(frozen)


class RateScaler:
    """Scales learning rates during optimizer steps only: schedulers, logs and checkpoints see the model's own."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.warmup_steps = 0
        self.steps = 0
        self._handles: list[Any] = []
        self._own: list[tuple[dict[str, Any], Any]] = []

    @property
    def factor(self) -> float:
        """Multiplier of the next step's learning rate."""
        rise = min(1.0, (self.steps + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.scale * rise

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Follow these optimizers, and no longer any others."""
        self.release()
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def release(self) -> None:
        """Follow none; learning rates are the model's own."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()  # a step that raised has left its scaled rates
        if self.factor == 1.0:
            return
        for group in optimizer.param_groups:
            self._own.append((group, group["lr"]))
            group["lr"] = group["lr"] * self.factor

    def _after(self, *_: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, rate in self._own:
            group["lr"] = rate
        self._own = []
