import json
import re
import sys

import pytest
from torch import nn

from ctdr_lightning.cli import main
from ctdr_lightning.memory import Plan


def net():
    """What the commands are given to build."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


NAME = f"{__name__}:net"
INPUT = ["--input", "16,3,24,24"]


def test_decompose_shows_each_layer_and_saves_a_plan_to_edit(tmp_path, capsys):
    path = tmp_path / "layers.json"
    assert main(["decompose", NAME, "--rank", "0.25", "--select", "!0", "--save", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{index} " in shown for index in (2, 5, 8, 11, 14, 17))
    assert "2" in json.dumps(json.loads(path.read_text()))


def test_plan_needs_no_memory_and_can_be_explained(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", NAME, *INPUT, "--policy", "sqrt", "--device", "h100", "--save", str(path)]) == 0
    plain, planned, room = capsys.readouterr().out.splitlines()
    assert plain.startswith("Plain step: peak ")
    assert planned.startswith("Policy sqrt: predicted peak ")
    assert room.startswith("Workspaces of h100's kernels are not known")
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == planned
    assert not Plan.from_json(path).keeps_all


def test_a_larger_batch_takes_more_and_an_optimizer_adds_its_state(tmp_path):
    peaks = []
    for batch, optimizer in ((8, "sgd"), (16, "sgd"), (16, "adam")):
        path = tmp_path / "plan.json"
        main(["plan", NAME, "--input", f"{batch},3,24,24", "--optimizer", optimizer, "--save", str(path)])
        peaks.append(Plan.from_json(path).peak_bytes)
    n_bytes = 4 * sum(parameter.numel() for parameter in net().parameters())
    assert peaks[0] < peaks[1]
    assert peaks[2] - peaks[1] == 2 * n_bytes


def test_the_largest_batch_with_and_without_a_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["max-batch", NAME, "--input", "3,24,24", "--budget", "30MiB", "--save", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    size, plain_size = (int(n) for n in re.findall(r"\d+", said.split(":")[1]))
    assert size > plain_size > 0
    assert Plan.from_json(path).peak_bytes <= 30 * 2**20
    limit = ["--budget", "30MiB", "--policy"]
    assert main(["plan", NAME, "--input", f"{plain_size},3,24,24", *limit, "keep"]) == 0
    assert main(["plan", NAME, "--input", f"{plain_size + 1},3,24,24", *limit, "keep"]) == 2


def test_planning_with_a_rank_plans_the_decomposed_model(tmp_path):
    path = tmp_path / "plan.json"
    main(["plan", NAME, *INPUT, "--rank", "0.25", "--policy", "keep", "--save", str(path)])
    modules = {decision.module for decision in Plan.from_json(path).decisions}
    assert any(name.startswith("2.") for name in modules)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decompose", "nowhere:net"], "cannot be built"),
        (["decompose", "json:dumps"], "cannot be built"),
        (["decompose", "collections:OrderedDict"], "is a OrderedDict, no nn.Module"),
        (["decompose", NAME, "--rank", "-1"], "rank"),
        (["plan", NAME, *INPUT, "--policy", "sqrtt"], "Did you mean 'sqrt'"),
        (["plan", NAME, *INPUT, "--budget", "1KiB"], "HINT"),
        (["max-batch", NAME, "--input", "3,24,24", "--budget", "1KiB"], "Not even one sample"),
        (["explain", "absent.json"], "absent.json"),
    ],
)
def test_what_cannot_be_used_is_said_and_ends_with_status_two(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_models_are_found_in_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n\ndef mine():\n    return nn.Sequential(nn.Linear(64, 64))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert main(["decompose", "my_nets:mine"]) == 0
    assert "Linear" in capsys.readouterr().out
