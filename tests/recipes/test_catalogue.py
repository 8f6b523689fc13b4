"""Recipes by name: listed, copied, run; the core knows them only when they are asked for."""

import subprocess
import sys

import pytest

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.cli import main
from ctdr_recipes.catalogue import CONFIGS, SCRIPTS, copy, recipes, run
from tests.recipes.test_train import TINY

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def test_every_experiment_and_script_is_listed_with_a_sentence(capsys):
    assert main(["recipes", "ls"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == {*EXPERIMENTS, *SCRIPTS}
    assert all(len(said) > 20 and said.endswith((".", "``.")) for said in lines.values())


@pytest.mark.slow
def test_a_copy_holds_every_config_and_runs_by_itself(tmp_path):
    written = copy("digits", tmp_path / "mine")
    assert {p.relative_to(tmp_path / "mine" / "conf") for p in written[1:]} == {
        p.relative_to(CONFIGS) for p in CONFIGS.rglob("*.yaml")
    }
    (tmp_path / "mine" / "conf" / "experiment" / "digits.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: digits\nname: edited\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py", "experiment=digits", "--cfg", "job"],
        cwd=tmp_path / "mine", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("name: edited")


def test_a_script_is_copied_alone(tmp_path):
    assert copy("demo", tmp_path) == [tmp_path / "demo.py"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"train\.py is there already"):
        copy("digits", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_unknown_name_suggests_the_nearest(capsys):
    assert main(["recipes", "run", "digts"]) == 2
    assert "Did you mean 'digits'?" in capsys.readouterr().err


def test_a_misspelt_key_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "run", "digits", "ctdr.rnak=0.1"]) == 2
    assert "Did you mean 'ctdr.rank'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_experiment_trains_by_its_name(tmp_path):
    command = [sys.executable, "-m", "ctdr_lightning.cli", "recipes", "run", "digits", f"hydra.run.dir={tmp_path}/run"]
    command += ["trainer.max_epochs=1", "ctdr.select=null", "ctdr.rank=0.4", "ctdr.recovery=null", *TINY]
    done = subprocess.run(command, cwd=CONFIGS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def absent(*_, **__):
        raise ModuleNotFoundError("No module named 'timm.models'", name="timm.models")

    monkeypatch.setattr("ctdr_recipes.catalogue.runpy.run_module", absent)
    with pytest.raises(ConfigError, match="timm is not installed") as caught:
        run("demo", [])
    assert caught.value.hint == "pip install 'ctdr-lightning[models]'"


def test_the_command_loads_hydra_only_for_recipes():
    code = "import sys, ctdr_lightning.cli; print('hydra' in sys.modules, 'ctdr_recipes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONFIGS.parents[1])
    assert done.stdout.split() == ["False", "False"]


def test_each_is_there():
    assert all(recipe.path.is_file() for recipe in recipes().values())
