"""Misspelt overrides are refused with the nearest name, and right ones are not."""

import pytest

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes import spelling
from ctdr_recipes.catalogue import CONFIGS
from ctdr_recipes.spelling import check_overrides

RIGHT = [
    ["ctdr.rank=0.5,0.25", "--multirun"], ["model=timm", "model.net.pretrained=true"], ["model=cnn,timm"],
    ["data=image_folder", "data.root=x", "task.n_classes=3"], ["+anything=1"], ["hydra.launcher.nodes=2"],
    ["hydra/launcher=submitit_local"], ["callbacks.last=null"], ["model.net.widths=[1,2]"], ["experiment=null"],
    ["experiment=digits", "ctdr.recovery.phases.0.epochs=2"], ["model.scheduler=null"], ["~callbacks.last"],
    ["ctdr.rank={net.*: 0.5}"], ["test=best"], ["evaluate=a.ckpt"], [],
]  # fmt: skip
WRONG = {
    "ctdr.rnak=0.5": "ctdr.rank", "rank=0.5": "ctdr.rank", "modle=timm": "model", "model=tim": "timm",
    "experiment=digts": "digits", "trainer.max_epoch=3": "trainer.max_epochs",
    "ctdr.memory_buget=1GiB": "ctdr.memory_budget",
    "callbacks.checkpoint.monitr=x": "callbacks.checkpoint.monitor", "ctdr.rnak=0.5,0.25": "ctdr.rank",
    "model=cnn,tim": "timm",
}  # fmt: skip


@pytest.mark.parametrize("overrides", RIGHT, ids=" ".join)
def test_right_ones_pass(overrides):
    check_overrides(overrides, CONFIGS)


@pytest.mark.parametrize(("override", "meant"), WRONG.items())
def test_wrong_ones_name_the_nearest(override, meant):
    with pytest.raises(ConfigError) as caught:
        check_overrides([override], CONFIGS)
    assert f"Did you mean {meant!r}?" in caught.value.hint


def test_what_resembles_nothing_says_how_to_add_it():
    with pytest.raises(ConfigError) as caught:
        check_overrides(["zzzzzz=1"], CONFIGS)
    assert caught.value.hint == "To add a key that the configs do not have, write +zzzzzz=..."


@pytest.mark.parametrize("override", ["trainer.max_epochs=1,2", "test=best,last", "name=a,b"])
def test_a_sweep_whose_points_would_share_a_folder_is_refused(override):
    key, values = override.split("=")
    with pytest.raises(ConfigError, match=f"A sweep over {key}") as caught:
        check_overrides(["ctdr.rank=0.5,0.25", override, "--multirun"], CONFIGS)
    assert f"{key}={values.partition(',')[0]}." in caught.value.hint
    check_overrides([f"{key}={values.partition(',')[0]}"], CONFIGS)


def test_an_override_that_cannot_be_read_is_quoted():
    with pytest.raises(ConfigError, match=r"The override 'ctdr\.rank=\[1' cannot be read"):
        check_overrides(["ctdr.rank=[1"], CONFIGS)


def test_optunas_sweeper_names_the_extra_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(spelling, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="hydra/sweeper=optuna is not installed") as caught:
        check_overrides(["hydra/sweeper=optuna", "ctdr.rank=interval(0.1,0.8)"], CONFIGS)
    assert caught.value.hint == "pip install 'ctdr-lightning[optuna]'"
    monkeypatch.setattr(spelling, "find_spec", lambda name: object())
    check_overrides(["hydra/sweeper=optuna", "ctdr.rank=interval(0.1,0.8)"], CONFIGS)
