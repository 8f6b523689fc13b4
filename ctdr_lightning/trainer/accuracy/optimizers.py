"""Optimizers and schedulers rebuilt after parameters were exchanged; the other parameters keep their state."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ctdr_lightning.basics.errors import ConfigError


def rebuild(trainer: Any) -> None:
    """Run ``configure_optimizers`` on the changed model and carry over the state of surviving parameters.

    Moments of untouched parameters move over by identity, the groups' settings (learning rates above all) and the
    schedulers' state by position. The groups are those a resumed run would build, in the same order.

    Raises:
        ConfigError: If the number of optimizers, groups or schedulers depends on the layers.
    """
    strategy = trainer.strategy
    old, old_schedules = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    strategy.setup_optimizers(trainer)
    _check_counts(old, strategy.optimizers, len(old_schedules), len(strategy.lr_scheduler_configs))
    for before, after in zip(old, strategy.optimizers, strict=True):
        _carry_over(before, after)
    for before, after in zip(old_schedules, strategy.lr_scheduler_configs, strict=True):
        after.scheduler.load_state_dict(before.scheduler.state_dict())


def as_now(trainer: Any) -> Callable[[], None]:
    """Remember the optimizers and schedulers there are; the result puts them back after a `rebuild`."""
    strategy = trainer.strategy
    optimizers, schedules = list(strategy.optimizers), list(strategy.lr_scheduler_configs)

    def put_back() -> None:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedules

    return put_back


def _check_counts(old: list[Optimizer], new: list[Optimizer], n_before: int, n_after: int) -> None:
    groups = [[len(optimizer.param_groups) for optimizer in side] for side in (old, new)]
    if groups[0] != groups[1] or n_before != n_after:
        raise ConfigError(
            f"configure_optimizers gave {groups[0]} parameter groups before the cut and {groups[1]} after it.",
            "Let the number of groups not depend on the layers, or use one-shot recovery.",
        )


def _carry_over(before: Optimizer, after: Optimizer) -> None:
    for old_group, new_group in zip(before.param_groups, after.param_groups, strict=True):
        new_group.update({key: value for key, value in old_group.items() if key != "params"})
        for parameter in new_group["params"]:
            if parameter in before.state:
                after.state[parameter] = before.state[parameter]


def snapshot(optimizers: list[Optimizer]) -> list[dict[str, Any]]:
    """State of optimizers on the host, by parameter position."""
    return [_to_host(deepcopy(optimizer.state_dict()["state"])) for optimizer in optimizers]


def put_back(optimizers: list[Optimizer], states: list[dict[str, Any]]) -> None:
    """Load the result of `snapshot` into optimizers of the same model; their groups' settings stay."""
    for optimizer, state in zip(optimizers, states, strict=False):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _to_host(entry) for key, entry in value.items()}
    return value
