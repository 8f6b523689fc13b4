"""Overrides are read before anything runs: a key or a choice that no config knows is refused, and the nearest is named.

Hydra refuses both as well, with the advice to add the key by ``+``; a misspelt one that is added is then not used.
A sweep whose points would share a folder, and there go on from each other's checkpoints, is refused too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf

from ctdr_lightning.basics.errors import ConfigError


def check_overrides(arguments: Sequence[str], folder: Path) -> None:
    """Refuse a group's choice, or a key, that the configs do not know, and a sweep of points in one folder.

    Keys that are added (``+``) or deleted (``~``), and Hydra's own, are Hydra's to judge.

    Args:
        arguments: The command line: overrides, and options that begin with ``-``, which are left alone.
        folder: The folder of ``train.yaml``.

    Raises:
        ConfigError: With the nearest name, or with the way to give each point a folder.

    Example:
        >>> from ctdr_recipes.folders import configs_of
        >>> check_overrides(["ctdr.rank=0.5"], configs_of(__file__))
    """
    words = [word for word in arguments if not word.startswith("-") and "=" in word]
    overrides = [found for found in _parsed(words) if not (found.is_add() or found.is_delete())]
    _check_folders(overrides, folder)
    _check_sweeper(overrides)
    groups = _groups(folder)
    chosen = [found for found in overrides if found.key_or_group in groups]
    for override in chosen:
        _check_choices(override, groups[override.key_or_group])
    others = [found for found in overrides if found.key_or_group not in groups and not _is_hydras(found)]
    if others:
        with initialize_config_dir(str(folder.absolute()), version_base="1.3"):
            config = compose("train", [f"{o.key_or_group}={next(_values(o))}" for o in chosen])
        for override in others:
            _check_key(override.key_or_group, config, groups)


def _parsed(words: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except OverrideParseException as error:
        raise ConfigError(
            f"The override {error.override!r} cannot be read.",
            "Write key=value; quote what has brackets, spaces or commas for the shell: 'key=[1,2]'.",
        ) from error


def _check_sweeper(overrides: Sequence[Override]) -> None:
    chosen = [_values(override) for override in overrides if override.key_or_group == "hydra/sweeper"]
    for name in (name for names in chosen for name in names):
        if name == "optuna" and find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
            raise ConfigError("hydra/sweeper=optuna is not installed.", "pip install 'ctdr-lightning[optuna]'")


def _check_folders(overrides: Sequence[Override], folder: Path) -> None:
    unnamed = OmegaConf.load(folder / "train.yaml").hydra.job.config.override_dirname.exclude_keys
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group in unnamed:
            first = f"{override.key_or_group}={next(_values(override))}"
            alone = first if override.key_or_group == "name" else f"name=... {first}"
            raise ConfigError(
                f"A sweep over {override.key_or_group}: all of its points would share one folder.",
                f"Start each by itself: {alone}.",
            )


def _is_hydras(override: Override) -> bool:
    return override.key_or_group.partition(".")[0].partition("/")[0] == "hydra"


def _groups(folder: Path) -> dict[str, list[str]]:
    """Each group of configs with its choices."""
    return {path.name: sorted(p.stem for p in path.glob("*.yaml")) for path in folder.iterdir() if path.is_dir()}


def _values(override: Override) -> Iterator[str]:
    """The values as text, those of a sweep one by one."""
    if override.is_sweep_override():
        yield from map(str, override.sweep_string_iterator())
    else:
        yield override.get_value_element_as_str()


def _check_choices(override: Override, choices: Sequence[str]) -> None:
    for value in _values(override):
        if value not in (*choices, "null"):
            raise ConfigError(
                f"{override.key_or_group}={value}: there is no such config.",
                f"{_meant(value, choices)}Choices: {', '.join(choices)}.",
            )


def _check_key(key: str, config: DictConfig, groups: dict[str, list[str]]) -> None:
    if OmegaConf.is_missing(config, key) or _has(config, key):
        return
    known = [*_keys(config), *groups]
    raise ConfigError(
        f"No config has the key {key!r}.",
        f"{_meant(key, known)}To add a key that the configs do not have, write +{key}=...",
    )


def _has(config: Any, key: str) -> bool:
    for part in key.split("."):
        if isinstance(config, ListConfig):
            if not part.isdigit() or int(part) >= len(config):
                return False
            config = config[int(part)]
        elif isinstance(config, DictConfig) and not OmegaConf.is_missing(config, part) and part in config:
            config = config[part] if not OmegaConf.is_interpolation(config, part) else None
        else:
            return isinstance(config, DictConfig) and OmegaConf.is_missing(config, part)
    return True


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key."""
    for key in map(str, config.keys()):
        yield f"{prefix}{key}"
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        if isinstance(config[key], DictConfig):
            yield from _keys(config[key], f"{prefix}{key}.")


def _meant(given: str, known: Sequence[str]) -> str:
    # 0.6 is difflib's own; a key without its group (rank for ctdr.rank) is compared with the last parts too.
    close = difflib.get_close_matches(given, known, n=1)
    if not close:
        by_end = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [by_end[end] for end in difflib.get_close_matches(given.rpartition(".")[2], by_end, n=1)]
    return f"Did you mean {close[0]!r}? " if close else ""
