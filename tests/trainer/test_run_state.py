import dataclasses

import pytest
import torch

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.decomposition import decompose
from ctdr_lightning.trainer.run_state import RunState
from ctdr_lightning.trainer.surgeon import Surgery
from tests import parts


def state():
    choices = decompose(parts.Blobs(), rank=0.5, progress=False).choices
    names = list(choices.to_dict()["layers"])
    surgery = Surgery(choices, [names], parameters_before=1000)
    return RunState({"rank": 0.5}, surgery, 7, {"progress": {}}, {"torch": torch.zeros(1, 3)})


def test_what_is_written_is_read_again():
    written = state()
    found = RunState.from_dict(written.to_dict())
    assert found.surgery.choices.to_dict() == written.surgery.choices.to_dict()
    assert dataclasses.replace(found, surgery=written.surgery) == written


def test_what_is_none_is_not_written():
    assert set(RunState({}, Surgery(None, [], 0)).to_dict()) == {"version", "options", "surgery", "stepped"}


def test_a_callback_writes_such_a_state():
    callback = CTDRCallback(rank=0.5, verbose=False)
    found = RunState.from_dict(callback.state_dict())
    assert found == callback.run.state()
    assert found.options["rank"] == 0.5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("version", 1, "has version 1, this release reads"),
        ("options", None, "'options' is a NoneType"),
        ("stepped", "7", "'stepped' is a str"),
        ("stepped", -5, "'stepped' is -5"),
        ("stepped", True, "'stepped' is True"),
        ("surgery", None, "choices are damaged"),
        ("surgery", {"choices": None, "stages": [[1]], "parameters_before": 0}, "choices are damaged"),
        ("surgery", {"choices": None, "stages": []}, "choices are damaged"),
        ("surgery", {"choices": {"layers": 3}, "stages": [], "parameters_before": 0}, "choices are damaged"),
    ],
)
def test_damage_is_refused(name, value, message):
    with pytest.raises(CheckpointError, match=message):
        RunState.from_dict({**state().to_dict(), name: value})


@pytest.mark.parametrize("checkpoint", [None, [], {}, {"callbacks": None}, {"callbacks": {"Other": {}}}])
def test_a_checkpoint_of_another_run_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match="written without CTDRCallback"):
        RunState.of_checkpoint(checkpoint, "CTDRCallback")
