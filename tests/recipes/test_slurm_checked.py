"""Before anything is submitted: tasks are devices, and SLURM gets the words that the overrides say."""

import subprocess
import sys

import pytest

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.catalogue import CONFIGS
from ctdr_recipes.slurm import check_slurm
from tests.recipes import played_slurm

SLURM = ["--multirun", "launch=slurm"]
RIGHT = [
    [], ["trainer.devices=7"], SLURM, [*SLURM, "ctdr.rank=0.5,0.25"],
    [*SLURM, "trainer=ddp", "hydra.launcher.gpus_per_node=4", "hydra.launcher.nodes=2"],
    [*SLURM, "trainer=fsdp", "hydra.launcher.gpus_per_node=4", "hydra.launcher.nodes=2"],
    [*SLURM, "trainer.devices=auto"], [*SLURM, "trainer.devices=[0]"], ["launch=slurm", "--cfg", "job"],
    [*SLURM, "experiment=image_folder"],
]  # fmt: skip
WRONG = {
    ("launch=slurm",): "without --multirun",
    (*SLURM, "trainer.devices=2"): "1 tasks a node, but the Trainer has 2 devices a node",
    (*SLURM, "hydra.launcher.gpus_per_node=4", "trainer.devices=[0,1]"): "4 tasks a node, but the Trainer has 2",
    (*SLURM, "hydra.launcher.tasks_per_node=1", "hydra.launcher.gpus_per_node=4"): "1 tasks a node",
    (*SLURM, "hydra.launcher.nodes=2", "trainer.num_nodes=1"): "2 nodes, but the Trainer has 1 nodes",
    (*SLURM, "trainer.devices=1,2"): "A sweep over trainer.devices",
}


@pytest.mark.parametrize("arguments", RIGHT, ids=" ".join)
def test_right_ones_pass(arguments):
    check_slurm(arguments, CONFIGS)


@pytest.mark.parametrize(("arguments", "problem"), WRONG.items())
def test_wrong_ones_are_refused(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        check_slurm(arguments, CONFIGS)


@pytest.fixture
def submitted(tmp_path):
    """Run the command line beside an `sbatch` that keeps its file and refuses; returns stderr and the file."""
    env = played_slurm.install(tmp_path / "slurm")
    kept = tmp_path / "kept.sh"
    (tmp_path / "slurm" / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {kept}\nexit 1\n')

    def run(*overrides):
        command = [
            sys.executable, "-m", "ctdr_recipes.train", *SLURM, f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=CONFIGS.parent, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode
        return done.stderr, kept.read_text() if kept.exists() else ""

    return run


@pytest.mark.slow
def test_partition_constraint_nodes_and_tasks_reach_sbatch(submitted):
    _, script = submitted(
        "trainer=ddp", "hydra.launcher.partition=gpu", "hydra.launcher.constraint=a100",
        "hydra.launcher.account=vision", "hydra.launcher.qos=long", "hydra.launcher.nodes=2",
        "hydra.launcher.gpus_per_node=4", "+hydra.launcher.additional_parameters={reservation:spring}",
        "hydra.launcher.array_parallelism=3", "ctdr.rank=0.5,0.25",
    )  # fmt: skip
    words = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")}
    assert {
        "partition=gpu", "constraint=a100", "account=vision", "qos=long", "nodes=2", "ntasks-per-node=4",
        "gpus-per-node=4", "reservation=spring", "array=0-1%2",
    } <= words  # fmt: skip


@pytest.mark.slow
def test_what_does_not_agree_is_not_submitted(submitted):
    said, script = submitted("trainer.devices=2")
    assert "HINT: Set hydra.launcher.gpus_per_node alone" in said
    assert script == ""
