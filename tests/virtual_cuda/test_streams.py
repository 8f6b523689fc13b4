"""Holders, tape and optimizer state over streams that are late, at once, or random, with memory that is used again."""

import pytest

from tests.virtual_cuda.scenarios import PARCELS, complaints, prepared, whole_tape
from tests.virtual_cuda.streams import SCHEDULES

NETS = ("residual", "gpt2", "lstm")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["host", "disk"])
@pytest.mark.parametrize("program", PARCELS, ids=lambda program: program.__name__)
def test_parcels_are_right_on_every_stream(program, name, schedule, tmp_path, monkeypatch):
    for seed in range(4 if schedule == "random" else 1):
        assert complaints(program, schedule, seed, name, tmp_path, monkeypatch) == []


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_of_all_actions_are_exact(net, schedule, tmp_path, monkeypatch):
    prepared(net)
    assert complaints(whole_tape, schedule, 0, net, tmp_path, monkeypatch) == []
