"""The recipe, run as a user runs it, on few batches."""

import csv
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir

from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.pages.run_folder import read_runs
from ctdr_recipes.compared import compare
from ctdr_recipes.train import train
from tests import parts
from tests.recipes.test_configs import CONF

QUIET = [
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
]
TINY = [
    "data.batch_size=32",
    "data.image_size=8",
    "model.net.widths=[8,16,16]",
    "model.net.strides=[1,2,1]",
    "+trainer.limit_train_batches=6",
    *QUIET,
]


@pytest.fixture
def run(tmp_path):
    """Run the recipe in its own folder; returns the metrics."""

    def call(folder, *overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("train", [f"output_dir={tmp_path / folder}", *TINY, *overrides])
        return train(config)

    return call


@pytest.mark.slow
def test_trains_decomposes_tests_and_logs(run, tmp_path):
    scores = run("run", "trainer.max_epochs=2", "ctdr.rank=0.4", "ctdr.policy=sqrt")
    assert {"train/loss", "val/acc", "test/acc"} <= scores.keys()
    rows = list(csv.DictReader((tmp_path / "run" / "csv" / "version_0" / "metrics.csv").open()))
    assert sum(bool(row.get("test/acc")) for row in rows) == 1
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    weights = sum(tensor.numel() for name, tensor in saved.items() if name.startswith("net") and "weight" in name)
    assert weights < 0.7 * (8 * 9 + 16 * 8 * 9 + 16 * 16 * 9 + 160)


@pytest.mark.slow
def test_a_run_leaves_a_page_its_record_and_its_plan(run, tmp_path):
    run("run", "trainer.max_epochs=2", "ctdr.rank=0.4", "ctdr.policy=sqrt")
    (parts,) = read_runs(tmp_path / "run")
    assert parts.plan.policy == "sqrt"
    assert {layer.method for layer in parts.record.layers} >= {"tucker"}
    assert len(parts.record.series("val/acc")[0]) == 2
    assert len(parts.record.series("ctdr/peak_memory_gib", "step")[0]) == 12
    assert parts.record.last("test/acc") is not None
    page = (tmp_path / "run" / "csv" / "version_0" / "ctdr" / "report.html").read_text()
    assert page.count('class="curve') >= 3
    table = compare(tmp_path)
    assert "test/acc" in table.splitlines()[0]


def test_a_dense_run_is_where_the_next_one_starts(run, tmp_path):
    dense = run("dense", "trainer.max_epochs=4", "ctdr=none", "model.optimizer.lr=0.01")
    checkpoint = tmp_path / "dense" / "checkpoints" / "last.ckpt"
    again = run("again", "trainer.max_epochs=0", "ctdr=none", "model.scheduler=null", f"init_from={checkpoint}")
    assert dense["test/acc"] > 0.2
    assert again["test/acc"] == dense["test/acc"]


@pytest.mark.slow
def test_a_decomposed_run_can_be_evaluated_again(run, tmp_path):
    ours = run("ours", "trainer.max_epochs=1", "ctdr.rank=0.4")
    checkpoint = tmp_path / "ours" / "checkpoints" / "last.ckpt"
    again = run("again", "trainer.max_epochs=0", "ctdr=none", "model.scheduler=null", f"init_from={checkpoint}")
    assert again["test/loss"] == ours["test/loss"]


@pytest.mark.slow
def test_last_starts_afresh_without_a_checkpoint_and_resumes_with_one(run, tmp_path):
    overrides = ["model.scheduler=null", "ckpt_path=last", "ctdr.rank=0.4"]
    straight = run("straight", "trainer.max_epochs=2", *overrides)
    first = run("same", "trainer.max_epochs=1", *overrides)
    resumed = run("same", "trainer.max_epochs=2", *overrides)
    assert resumed["test/loss"] == straight["test/loss"] != first["test/loss"]
    logs = sorted((tmp_path / "same" / "csv").glob("version_*/metrics.csv"))
    assert [path.parent.name for path in logs] == ["version_0", "version_1"]
    assert [path.name for path in (tmp_path / "same" / "checkpoints").glob("last*")] == ["last.ckpt"]
    over = run("same", "trainer.max_epochs=2", *overrides)
    assert over["test/loss"] == resumed["test/loss"]
    assert over["val/acc"] == resumed["val/acc"]


@pytest.mark.slow
def test_a_checkpoint_of_another_config_is_refused_with_the_difference(run):
    run("used", "trainer.max_epochs=1", "ckpt_path=last", "ctdr.rank=0.5")
    with pytest.raises(ConfigError, match=r"ctdr\.rank was 0\.5, now 0\.25") as caught:
        run("used", "trainer.max_epochs=1", "ckpt_path=last", "ctdr.rank=0.25")
    assert "name=" in caught.value.hint


def test_an_experiment_runs_dense(run):
    scores = run("dense", "experiment=digits", "ctdr=none", "trainer.max_epochs=1")
    assert "test/acc" in scores
    assert not any(name.startswith("ctdr/") for name in scores)


@pytest.mark.slow
def test_the_best_checkpoint_can_be_named_on_the_command_line(run, tmp_path):
    run("ours", "trainer.max_epochs=1", "ctdr.rank=0.4")
    (best,) = (tmp_path / "ours" / "checkpoints").glob("best*.ckpt")
    again = run("again", "trainer.max_epochs=1", "ctdr=none", f"init_from={best}")
    assert "test/acc" in again


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_by_one_override(run, tmp_path):
    ours = run("ours", "trainer.max_epochs=2", "ctdr.rank=0.4")
    checkpoint = tmp_path / "ours" / "checkpoints" / "last.ckpt"
    again = run("again", f"evaluate={checkpoint}", "ctdr.rank=0.4")
    assert {name: again[name] for name in ("val/loss", "test/loss")} == {n: ours[n] for n in ("val/loss", "test/loss")}
    assert not (tmp_path / "again" / "checkpoints").exists()


@pytest.mark.slow
def test_the_best_checkpoint_is_tested_by_one_override(run, tmp_path):
    scores = run("best", "trainer.max_epochs=3", "ctdr=none", "test=best", "model.optimizer.lr=0.02")
    (best,) = (tmp_path / "best" / "checkpoints").glob("best*.ckpt")
    again = run("again", "ctdr=none", f"evaluate={best}")
    assert scores["test/loss"] == again["test/loss"]
    with pytest.raises(ConfigError, match="no best checkpoint was written"):
        run(
            "none", "trainer.max_epochs=1", "ctdr=none", "test=best", "callbacks.checkpoint=null", "callbacks.last=null"
        )


@pytest.mark.slow
def test_image_folders_train_a_torchvision_net(tmp_path, image_root):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = ["data=image_folder", f"data.root={image_root}", "data.image_size=32", "data.n_workers=0"]
        overrides += ["data.batch_size=3", "task.n_classes=2", "model=torchvision", "trainer.max_epochs=1", *QUIET]
        config = compose("train", [f"output_dir={tmp_path / 'run'}", "ctdr.rank=0.1", *overrides])
    scores = train(config)
    assert 0 <= scores["test/acc"] <= 1
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert sum(tensor.numel() for tensor in saved.values()) < 0.2 * 11_000_000


def test_a_start_from_what_is_no_checkpoint_is_refused(run, tmp_path):
    path = tmp_path / "broken.ckpt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="HINT"):
        run("run", f"init_from={path}")


@pytest.mark.exhaustive
def test_a_sweep_goes_through_submitit(tmp_path):
    sweep = [
        "ctdr.rank=0.5,0.25",
        "trainer.max_epochs=1",
        f"hydra.sweep.dir={tmp_path}",
        "hydra/launcher=submitit_local",
    ]
    command = [sys.executable, "-m", "ctdr_recipes.train", "--multirun", *sweep, *TINY]
    done = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    points = [path for path in tmp_path.iterdir() if (path / "checkpoints").is_dir()]
    sizes = {
        rank: path.joinpath("checkpoints", "last.ckpt").stat().st_size
        for path in points
        for rank in ("0.5", "0.25")
        if f"ctdr.rank={rank}" in (path / ".hydra" / "overrides.yaml").read_text()
    }
    assert len(points) == len(sizes) == 2
    assert sizes["0.5"] > sizes["0.25"]
    table = (tmp_path / "comparison.md").read_text().splitlines()
    assert len(table) == 4
    assert {"| rank |", "val/acc"} <= {word for word in ("| rank |", "val/acc") if word in table[0]}
    assert (tmp_path / "comparison.html").read_text().count('class="dot') >= 2


@pytest.mark.exhaustive
def test_a_sweep_with_failed_points_names_each_compares_the_others_and_resumes(tmp_path):
    points = "[8],[8,16,16],[8,16],[16,8,8]"
    sweep = [f"model.net.widths={points}", "trainer.max_epochs=1", "ctdr.policy=keep", f"hydra.sweep.dir={tmp_path}"]
    tiny = [word for word in TINY if "widths" not in word]
    command = [sys.executable, "-m", "ctdr_recipes.train", "--multirun", *sweep, *tiny, "ckpt_path=last"]
    weights = []
    for _ in range(2):
        done = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "ctdr: The network has 1 widths and 3 strides." in done.stderr
        assert "The network has 2 widths and 3 strides." in done.stdout + done.stderr, "the second failed point too"
        table = (tmp_path / "comparison.md").read_text()
        assert len(table.splitlines()) == 4
        assert (tmp_path / "comparison.html").exists()
        found = [torch.load(path, weights_only=True) for path in sorted(tmp_path.rglob("last.ckpt"))]
        assert [checkpoint["global_step"] for checkpoint in found] == [6, 6], "a point that is done trains no more"
        weights.append([checkpoint["state_dict"] for checkpoint in found])
    assert parts.same(*weights)


@pytest.mark.slow
def test_an_error_of_ours_leaves_the_command_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "ctdr_recipes.train", "data=image_folder", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "ctdr: The config lacks task.n_classes, data.root." in done.stderr
    assert "HINT: Write task.n_classes=VALUE data.root=VALUE." in done.stderr
