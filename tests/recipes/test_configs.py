"""Every config in conf/ composes, resolves, and names things that exist and take the arguments it gives."""

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ctdr_recipes.train import folder_of

CONF = Path(__file__).parents[2] / "conf"
ABSENT = {"wandb", "mlflow"}
REQUIRED = ["data.root=images", "task.n_classes=7"]
GROUPS = ["model", "data", "trainer", "logger", "ctdr", "callbacks", "launch", "experiment"]
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.fixture
def composed(tmp_path):
    """Compose a config as ``hydra.main`` would, and resolve every interpolation."""

    def make(*overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("train", [f"output_dir={tmp_path}", *overrides], return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            OmegaConf.resolve(config)
        assert not OmegaConf.missing_keys(config)
        return config

    return make


def targets(config):
    """Yield every node with a _target_."""
    if isinstance(config, DictConfig):
        if config.get("_target_") is not None:
            yield config
        for value in config.values():
            yield from targets(value)
    elif OmegaConf.is_list(config):
        for value in config:
            yield from targets(value)


def overrides_for(group, name):
    needs_root = name == "image_folder"
    return [f"{group}={name}", *(REQUIRED if needs_root else [])]


def test_the_groups_are_those_of_the_folder():
    assert sorted(GROUPS) == sorted(path.name for path in CONF.iterdir() if path.is_dir())


@pytest.mark.parametrize(("group", "name"), [c for c in CHOICES if c != ("model", "classifier")])
def test_composes_and_names_what_exists(composed, group, name):
    config = composed(*overrides_for(group, name))
    nodes = [node for node in targets(config) if node["_target_"].partition(".")[0] not in ABSENT]
    assert len(nodes) >= 4
    for node in nodes:
        target = get_object(node["_target_"])
        given = {key for key in node if not key.startswith("_")}
        accepted = inspect.signature(target).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        assert takes_any or given <= accepted.keys(), f"{node['_target_']} takes no {given - accepted.keys()}"


def test_data_decides_the_number_of_classes_and_channels(composed):
    config = composed("data=image_folder", "model=timm", *REQUIRED)
    assert (config.model.net.num_classes, config.model.net.in_chans, config.data.n_classes) == (7, 3, 7)


def test_slurm_starts_the_processes_and_lightning_does_not_requeue(composed):
    config = composed("launch=slurm", "hydra.launcher.gpus_per_node=4", "hydra.launcher.nodes=2")
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 2)
    assert config.trainer.plugins[0].auto_requeue is False
    assert config.ckpt_path == "last"
    assert config.callbacks.preemption.path == f"{config.callbacks.checkpoint.dirpath}/last.ckpt"


def test_a_sweep_point_finds_its_folder_again_after_requeueing():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = compose("train", ["launch=slurm", "name=ranks"], return_hydra_config=True).hydra
    assert "SlurmLauncher" in hydra.launcher._target_
    sweep = OmegaConf.to_container(hydra.sweep)
    assert sweep["dir"] == "multirun/${name}"
    assert "override_dirname" in sweep["subdir"]


def test_points_of_a_sweep_have_folders_of_their_own():
    names = [folder_of(f"ctdr.rank=0.5,data.root=/images,{'x' * n}={n}") for n in (1, 100, 101)]
    assert len(set(names)) == 3
    assert all(set(name).isdisjoint("=,/[]{} ") and len(name) <= 120 for name in names)
