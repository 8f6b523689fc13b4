"""What a user may write about places and codecs."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import record
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.holders.places import Places

EXACT = tuple(name for name in CODECS if CODECS[name].exact)


@pytest.mark.parametrize(
    ("offload", "codecs", "want"),
    [
        (None, None, ((), ())),
        ("disk", None, (("disk",), ())),
        (["host", "disk", "host"], "exact", (("host", "disk"), EXACT)),
        (None, ["exact", "bf16"], ((), (*EXACT, "bf16"))),
        (None, "int8", ((), ("int8",))),
        ([], [], ((), ())),
        (None, "auto", ((), tuple(name for name in EXACT if name != "zvc"))),
    ],
)
def test_names(offload, codecs, want):
    found = Places.read(offload, None, codecs)
    assert (found.offload, found.codecs) == want


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"offload": "moon"}, "offload='moon'"),
        ({"offload": 3}, "offload=3"),
        ({"offload": ["disk", None]}, "offload="),
        ({"codecs": "zip"}, "codecs='zip'"),
        ({"codecs": {"a": 1}}, "codecs="),
        ({"disk_folder": "here"}, "without offload='disk'"),
        ({"offload": "disk", "disk_folder": 3}, "disk_folder=3"),
    ],
)
def test_what_cannot_be_used_is_said_with_what_can(given, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Places.read(**({"offload": None, "disk_folder": None, "codecs": None} | given))
    assert caught.value.hint


def test_the_host_is_no_other_place_for_a_step_on_the_processor():
    with pytest.raises(ConfigError, match="disk"):
        Places.read("host", None, None).on("cpu")
    assert Places.read("host", None, None).on("cuda").device == "cuda"


def test_a_trace_is_put_on_this_machine_or_on_one_of_the_table(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU())
    trace = record(lambda: net(torch.ones(1, 2)).sum())
    places = Places.read(["disk"], tmp_path, "exact")
    here = places.equip(trace)
    assert [link.to for link in here.links] == ["disk"]
    assert {cost.name for cost in here.codecs} == {"mask", "sign", "zvc"}, "what no value can use is not measured"
    there = Places.read(["host", "disk"], None, "exact").equip(trace, "a100")
    assert [link.to for link in there.links] == ["host", "disk"]
    assert there.links[0].out_bytes_per_s == 24e9
    assert Places().equip(trace) is trace


@pytest.mark.parametrize("name", DEVICES)
def test_each_card_of_the_table_has_a_link_to_its_host(name):
    trace = record(lambda: nn.Linear(2, 2)(torch.ones(1, 2)).sum())
    link = Places.read(["host"], None, None).equip(trace, name).links[0]
    assert link.out_bytes_per_s == {7: 12e9, 8: 24e9}.get(DEVICES[name].compute_capability[0], 50e9)


def test_codecs_that_nobody_asked_for_are_for_processors_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU())
    trace = record(lambda: net(torch.ones(1, 2)).sum())
    default, asked = Places.read(None, None, "auto"), Places.read(None, None, "exact")
    assert default.on("cpu").codecs == default.codecs
    assert default.on("cuda").codecs == ()
    assert asked.on("cuda").codecs == asked.codecs
    assert {cost.name for cost in default.equip(trace).codecs} == {"mask", "sign"}
    assert not default.equip(trace, "a100").codecs
    assert asked.equip(trace, "a100").codecs
