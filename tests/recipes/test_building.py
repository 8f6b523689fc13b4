"""From configs to objects: errors that a user can mend are said in words."""

import sys

import pytest
from hydra.errors import InstantiationException
from lightning_utilities.core.imports import RequirementCache
from omegaconf import OmegaConf

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.building import EXTRAS, build, check_complete, missing
from ctdr_recipes.data import ImageFolderData


def node(**entries):
    return OmegaConf.create(entries)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(EXTRAS, "no_such_package", "models")
    with pytest.raises(ConfigError, match="no_such_package is not installed") as caught:
        build(node(_target_="no_such_package.models.get", name="x"))
    assert caught.value.hint == "pip install 'ctdr-lightning[models]'"


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(ConfigError, match="DigitsData takes no 'image_syze'") as caught:
        build(node(_target_="ctdr_recipes.data.DigitsData", image_syze=8))
    assert caught.value.hint.startswith("Did you mean 'image_size'?")


def test_an_unknown_argument_of_the_callback_is_answered_by_itself():
    with pytest.raises(ConfigError, match="CTDRCallback\\(\\) has no argument 'rnak'") as caught:
        build(node(_target_="ctdr_lightning.CTDRCallback", rnak=0.5))
    assert caught.value.hint.startswith("Did you mean 'rank'?")


def test_an_error_of_ours_comes_through_as_it_is():
    with pytest.raises(ConfigError, match="image_size"):
        build(node(_target_="ctdr_recipes.data.DigitsData", image_size=3))


def test_other_errors_are_hydras():
    with pytest.raises(InstantiationException):
        build(node(_target_="torch.nn.Linear", in_features="many", out_features=2))


def test_nothing_is_built_of_nothing():
    assert build(None) is None


@pytest.mark.parametrize("requirement", ["no_such_logger>=0.12.10", "no_such_logger"])
def test_a_logger_that_raises_without_a_name_is_named_as_well(requirement):
    said = str(RequirementCache(requirement))
    error = missing(ModuleNotFoundError(said))
    assert error.problem == "The package no_such_logger is not installed."
    assert error.hint == "pip install no_such_logger"


def test_an_error_that_names_nothing_is_passed_on_in_its_words():
    assert "without words" in missing(ModuleNotFoundError("without words")).problem


@pytest.mark.parametrize("logger", ["WandbLogger", "MLFlowLogger"])
def test_lightnings_loggers_name_their_package(logger, monkeypatch):
    module = "wandb" if logger == "WandbLogger" else "mlflow"
    absent = RequirementCache("no_such_logger")
    for name in ("_WANDB_AVAILABLE", "_MLFLOW_AVAILABLE", "_MLFLOW_SKINNY_AVAILABLE"):
        monkeypatch.setattr(f"lightning.pytorch.loggers.{module}.{name}", absent, raising=False)
    with pytest.raises(ConfigError, match="The package no_such_logger is not installed"):
        build(node(_target_=f"lightning.pytorch.loggers.{logger}"))


def test_what_only_the_user_knows_is_asked_for_at_once():
    config = node(data={"root": "???", "n_classes": "${task.n_classes}"}, task={"n_classes": "???"}, seed=0)
    with pytest.raises(ConfigError, match=r"lacks data\.root, task\.n_classes") as caught:
        check_complete(config)
    assert caught.value.hint == "Write data.root=VALUE task.n_classes=VALUE."
    check_complete(node(seed=0))


def test_images_without_torchvision_name_the_extra(monkeypatch, tmp_path):
    (tmp_path / "train").mkdir()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ConfigError, match="The package torchvision is not installed") as caught:
        ImageFolderData(str(tmp_path), 2).setup("fit")
    assert caught.value.hint == "pip install 'ctdr-lightning[models]'"
