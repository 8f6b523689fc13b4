"""Loggers and a sweeper of other packages, as a user names them on the command line."""

import sqlite3
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.recipes.test_configs import CONF
from tests.recipes.test_train import TINY

pytestmark = pytest.mark.slow


def run_command(*overrides):
    command = [sys.executable, "-m", "ctdr_recipes.train", *overrides, "trainer.max_epochs=1", *TINY]
    done = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_optunas_sweeper_searches_as_the_documentation_says(tmp_path):
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=3"]
    run_command(
        "--multirun", *sweeper, "hydra.sweeper.n_jobs=1", "ctdr.rank=interval(0.1,0.8)", f"hydra.sweep.dir={tmp_path}"
    )
    found = OmegaConf.load(tmp_path / "optimization_results.yaml")
    assert 0.1 <= found.best_params["ctdr.rank"] <= 0.8
    rows = (tmp_path / "comparison.md").read_text().splitlines()[2:]
    assert len(rows) == 3
    assert max(float(row.split("|")[5]) for row in rows) == pytest.approx(found.best_value, abs=1e-4)


def test_wandb_writes_the_run_offline(tmp_path):
    run_command("logger=wandb", f"hydra.run.dir={tmp_path}")
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"ctdr/peak_memory_gib" in content
    assert b"whole model" in content


def test_mlflow_keeps_metrics_and_the_plan_in_the_runs_folder(tmp_path):
    run_command("logger=mlflow", f"hydra.run.dir={tmp_path}")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        metrics = {key for (key,) in database.execute("select distinct key from metrics")}
    assert {"ctdr/peak_memory_gib", "test/acc", "val/acc"} <= metrics
    written = [path.name for path in (tmp_path / "mlartifacts").rglob("*.*")]
    assert {"memory_plan.txt", "memory.png"} <= set(written)
