"""From configs to objects: errors that a user can mend are said in words."""

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.building import EXTRAS, build


def node(**entries):
    return OmegaConf.create(entries)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(EXTRAS, "no_such_package", "models")
    with pytest.raises(ConfigError, match="no_such_package is not installed") as caught:
        build(node(_target_="no_such_package.models.get", name="x"))
    assert caught.value.hint == "pip install 'ctdr-lightning[models]'"


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(ConfigError, match="takes no 'rnak'") as caught:
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
