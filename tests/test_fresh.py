"""Every public name works when it is the first thing that a process uses, with fake tensors wherever it takes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ctdr_lightning
from ctdr_lightning import memory
from ctdr_lightning.basics import devices
from ctdr_lightning.basics.torch_private import FakeTensorMode
from ctdr_lightning.decomposition.choose.stopwatch import Job, step_seconds
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.memory.holders import measure
from ctdr_lightning.memory.recorder.call_seconds import benchmark
from tests.fresh import USES, Loud

ROOT = Path(__file__).parents[1]
NAMES = sorted({*ctdr_lightning.__all__, *memory.__all__})


@pytest.fixture(scope="module")
def errors():
    """What each name's use raised, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fresh"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_public_name_has_a_use():
    assert sorted(USES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_first_thing_in_a_process(errors, name):
    assert errors[name] == ""


JOB = Job(Geometry(8, 8), "svd", (2,), (4, 8), torch.float32, torch.device("cpu"), False)
SQUARE = torch.ones(4, 4)
MEASURED = {
    "a layer's seconds": lambda: step_seconds.__wrapped__(JOB),
    "this processor": devices._measured_processor.__wrapped__,
    "a call's seconds": lambda: benchmark(torch.ops.aten.mm.default, (SQUARE, SQUARE), {}),
    "a link": lambda: measure.measure_links(["host"]),
    "a codec": lambda: measure._codec_cost.__wrapped__("zvc", "cpu"),
}


@pytest.mark.parametrize("what", MEASURED)
def test_a_measurement_sees_no_mode_of_its_caller(what):
    """Fake tensors take no time, and a recording would take the measurement's operations for the step's."""
    with Loud():
        assert MEASURED[what]()
    with FakeTensorMode():
        assert MEASURED[what]()
