"""Choices as data: stored, edited, checked against a model."""

import pytest
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.choices import checked
from ctdr_lightning.decomposition.choose.select import find_layers


def layers():
    return find_layers(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))


def test_choices_come_back_from_their_dict():
    choices = Choices({"0": LayerChoice("svd", (3,), "smaller"), "2": LayerChoice(reason="kept")})
    again = Choices.from_dict(choices.to_dict())
    assert again.same_layers(choices)
    assert again.to_dict() == choices.to_dict()
    assert list(again.factorized) == ["0"]
    assert list(again.only(["2"]).layers) == ["2"]


def test_reasons_do_not_make_layers_differ_and_ranks_do():
    one = Choices({"0": LayerChoice("svd", (3,), "smaller")})
    assert one.same_layers(Choices({"0": LayerChoice("svd", (3,), "by hand"), "2": LayerChoice()}))
    assert not one.same_layers(Choices({"0": LayerChoice("svd", (4,), "smaller")}))


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (None, "version"),
        ({"version": 0, "layers": {}}, "version 0 found"),
        ({"version": 1, "layers": []}, "must map"),
        ({"version": 1, "layers": {"0": {"decision": "maybe"}}}, "decision 'maybe'"),
        (
            {"version": 1, "layers": {"0": {"decision": "factorized", "method": "svd", "ranks": [1.5]}}},
            r"ranks \[1.5\]",
        ),
    ],
)
def test_what_is_malformed_is_refused(plain, message):
    with pytest.raises(ConfigError, match=message):
        Choices.from_dict(plain)


def test_every_layer_of_the_model_has_an_entry():
    found = checked(Choices({"0": LayerChoice("svd", (3,))}), layers())
    assert (found.layers["2"].method, found.layers["2"].reason) == (None, "not among the choices")
    assert found.layers["0"].ranks == (3,)


@pytest.mark.parametrize(
    ("name", "choice", "message"),
    [
        ("5", LayerChoice("svd", (3,)), "'5' is not in the model"),
        ("0", LayerChoice("svd", (9,)), r"ranks \[9\] are not in 1..\[8\]"),
        ("0", LayerChoice("svd", (3, 3)), "has 1 ranks here"),
        ("0", LayerChoice("tucker", (3, 3)), "does not fit layer '0'"),
    ],
)
def test_choices_that_a_model_cannot_take_are_refused(name, choice, message):
    with pytest.raises(ConfigError, match=message):
        checked(Choices({name: choice}), layers())
