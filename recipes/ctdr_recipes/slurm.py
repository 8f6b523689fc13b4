"""Jobs of ``launch=slurm`` are checked before they wait in a queue: SLURM's tasks are the Trainer's devices.

Lightning finds a wrong number of tasks too, but in the job, which may be hours later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.sharding import n_devices

_LAUNCH = ("launch=slurm", "hydra/launcher=submitit_slurm")
# Jobs of an array have the same nodes and tasks.
_SHARED = ("trainer.devices", "trainer.num_nodes", "hydra.launcher.")
_MULTIRUN, _SHOWS_ONLY = {"--multirun", "-m"}, {"--cfg", "-c", "--info", "-i", "--help", "--hydra-help"}


def check_slurm(arguments: Sequence[str], folder: Path) -> None:
    """Refuse a submission whose tasks and nodes are not the Trainer's; nothing where SLURM is not asked for.

    Args:
        arguments: The command line.
        folder: The folder of ``train.yaml``.

    Raises:
        ConfigError: With the override that mends it.
    """
    options = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    if not any(word in _LAUNCH for word in arguments) or options & _SHOWS_ONLY:
        return
    if not options & _MULTIRUN:
        raise ConfigError(
            "launch=slurm submits nothing without --multirun: the training would run here.",
            "Add --multirun; a single job is a sweep of one point.",
        )
    launcher, trainer = _composed(arguments, folder)
    devices = n_devices(trainer.devices, launcher.gpus_per_node)
    _check_same("tasks a node", launcher.tasks_per_node, "devices a node", devices, "gpus_per_node")
    _check_same("nodes", launcher.nodes, "nodes", trainer.num_nodes, "nodes")


def _composed(arguments: Sequence[str], folder: Path) -> tuple[Any, Any]:
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(words)
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group.startswith(_SHARED):
            raise ConfigError(
                f"A sweep over {override.key_or_group}: all jobs of SLURM's array have the same nodes and tasks.",
                "Start one sweep for each.",
            )
    fixed = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
    with initialize_config_dir(str(folder.absolute()), version_base="1.3"):
        config = compose("train", fixed, return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # ${hydra:launcher...} reads it
    return config.hydra.launcher, config.trainer


def _check_same(what: str, asked: Any, of: str, trained: Any, key: str) -> None:
    if str(asked) != str(trained):
        raise ConfigError(
            f"SLURM would start {asked} {what}, but the Trainer has {trained} {of}.",
            f"Set hydra.launcher.{key} alone: tasks and Trainer follow it.",
        )
