"""Names that do not exist are answered with the nearest one."""

import inspect

import pytest

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.basics.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"budget": "8GiB"}, "Did you mean 'memory_budget'?"),
        ({"ranks_": 0.5}, "Did you mean 'ranks'?"),
        ({"offload": "cpu"}, "It is one of memory={'offload': 'cpu'}."),
        ({"choices": "layers.json"}, "It is one of ranks={'choices': 'layers.json'}."),
        ({"colour": "red"}, "Arguments: memory_budget, rank,"),
    ],
)
def test_an_unknown_argument_of_the_callback_names_the_nearest(arguments, hint):
    (name,) = arguments
    with pytest.raises(ConfigError, match=rf"CTDRCallback\(\) has no argument '{name}'") as caught:
        CTDRCallback(**arguments)
    assert hint in str(caught.value)


def test_the_callbacks_signature_is_its_own():
    """Editors, jsonargparse and Hydra read it."""
    assert next(iter(inspect.signature(CTDRCallback).parameters)) == "memory_budget"


def test_a_phases_entry_given_to_the_recovery_is_shown_where_it_belongs():
    with pytest.raises(ConfigError, match="recovery has no entry epochs: each of its phases has") as caught:
        CTDRCallback(rank=0.5, recovery={"epochs": 3})
    assert "Write recovery={'phases': [{'epochs': 3}]}." in str(caught.value)
    assert Recovery.read({"phases": [{"epochs": 3}]}).phases[0].epochs == 3
