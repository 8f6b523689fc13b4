"""Sweeps through submitit and a played SLURM: a job that is preempted is queued again, and no result differs."""

import csv
import subprocess
import sys

import pytest
import torch

from tests.recipes import played_slurm
from tests.recipes.test_configs import CONF
from tests.recipes.test_train import TINY

RANKS = (0.5, 0.4, 0.3, 0.2)


def sweep(folder, env, *overrides, ranks=RANKS):
    command = [
        sys.executable, "-m", "ctdr_recipes.train", "--multirun", f"ctdr.rank={','.join(map(str, ranks))}",
        f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=rank-${ctdr.rank}", "trainer.max_epochs=2",
        "ctdr.policy=keep", *TINY, *overrides,
    ]  # fmt: skip
    return subprocess.run(command, cwd=CONF.parent, env=env, capture_output=True, text=True, timeout=900)


def results(folder, ranks=RANKS):
    """Weights and test scores of each point."""
    found = {}
    for rank in ranks:
        point = folder / f"rank-{rank}"
        weights = torch.load(point / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        last = max((point / "csv").glob("version_*"), key=lambda path: int(path.name.partition("_")[2]))
        rows = list(csv.DictReader((last / "metrics.csv").open()))
        found[rank] = weights, [row["test/acc"] for row in rows if row.get("test/acc")]
    return found


@pytest.mark.slow
def test_a_sweep_with_a_preempted_job_ends_with_the_results_of_an_undisturbed_one(tmp_path):
    env = played_slurm.install(tmp_path / "slurm")
    marker = tmp_path / "preempted"
    preempting = [
        "+callbacks.preempting._target_=tests.recipes.preempting.PreemptOnce", "+callbacks.preempting.step=8",
        f"+callbacks.preempting.marker={marker}", "+callbacks.preempting.signal_name=USR2",
    ]  # fmt: skip
    quiet = sweep(tmp_path / "quiet", env, *preempting)
    assert quiet.returncode == 0, quiet.stderr
    assert not marker.exists()
    played = sweep(tmp_path / "played", env, "launch=slurm", *preempting)
    assert played.returncode == 0, played.stderr
    assert (tmp_path / "slurm" / "jobs" / f"{marker.read_text()}.requeued").exists()
    expected, found = results(tmp_path / "quiet"), results(tmp_path / "played")
    for rank in RANKS:
        assert found[rank][1] == expected[rank][1] != []
        assert all(torch.equal(tensor, found[rank][0][name]) for name, tensor in expected[rank][0].items())


@pytest.mark.slow
def test_two_tasks_a_node_are_the_two_ranks_of_each_point(tmp_path):
    env = played_slurm.install(tmp_path / "slurm")
    two = ["hydra.launcher.gpus_per_node=2", "+trainer.strategy=ddp", "trainer.max_epochs=1"]
    played = sweep(tmp_path / "played", env, "launch=slurm", *two, ranks=RANKS[:2])
    assert played.returncode == 0, played.stderr
    for weights, scores in results(tmp_path / "played", RANKS[:2]).values():
        assert scores
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    logs = [path.read_text() for path in (tmp_path / "played").glob(".submitit/*/*_log.err")]
    assert sum("MEMBER: 2/2" in text for text in logs) == sum("MEMBER: 1/2" in text for text in logs) == 2
    assert (tmp_path / "played" / "comparison.md").read_text().count("| rank-") == 2


@pytest.mark.slow
def test_two_tasks_on_each_of_two_nodes_are_the_four_ranks_of_a_sharded_run(tmp_path):
    env = played_slurm.install(tmp_path / "slurm")
    four = ["hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=2", "trainer=fsdp", "trainer.precision=32-true"]
    played = sweep(tmp_path / "played", env, "launch=slurm", *four, "trainer.max_epochs=1", ranks=RANKS[:1])
    assert played.returncode == 0, played.stderr
    ((weights, scores),) = results(tmp_path / "played", RANKS[:1]).values()
    assert len(scores) == 1
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    logs = [path.read_text() for path in (tmp_path / "played").glob(".submitit/*/*_log.err")]
    assert [sum(f"MEMBER: {number}/4" in text for text in logs) for number in (1, 2, 3, 4)] == [1, 1, 1, 1]
    saved = torch.load(tmp_path / "played" / "rank-0.5" / "checkpoints" / "last.ckpt", weights_only=True)
    trainer = {key: saved["recipe_config"]["config"][f"trainer.{key}"] for key in ("num_nodes", "devices")}
    assert trainer == {"num_nodes": 2, "devices": 2}
