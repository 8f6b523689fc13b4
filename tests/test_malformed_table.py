"""A table of malformed arguments and files: each ends in one sentence with a hint; nothing runs, nothing is lost."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from ctdr_lightning import CTDRCallback, Plan, Recovery, Trace, decompose, max_batch, plan, record, restore
from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.cli import main
from ctdr_lightning.decomposition import Choices
from ctdr_lightning.memory import Tape, record_fake
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.groups import grouped

NAN, INF = float("nan"), float("inf")
AMOUNTS = [
    "", "much", "8GiBs", "-1GiB", "0", "0GiB", 0, -5, -0.5, NAN, INF, -INF, True, [8], {"GiB": 8}, b"8GiB", 1j,
    "0%", "150%", "-50%", "%", np.int64(0),
]  # fmt: skip
RANKS = [
    0, -1, -0.5, 0.0, 1.5, NAN, INF, True, "", "25%", "0.25", "vbmff", "vbmf=2", "error", "error=", "error=2",
    "error=nan", "energy=0", "energy=x", "fixed=0", [], (0,), (1.5, 2), ("a",), {"net": True}, {}, b"1", 1j,
]  # fmt: skip


def net():
    """What is decomposed and planned."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8)
    )


def loss(module, x):
    return module(x).square().mean()


@pytest.fixture(scope="module")
def trace():
    """A step, recorded once."""
    module, x = net(), torch.randn(2, 3, 5, 5)
    return record(lambda: loss(module, x))


def refused(call):
    """The call must raise our error, whose problem is one line, with a hint."""
    with pytest.raises(CTDRError) as caught:
        call()
    assert caught.value.problem
    assert "\n" not in caught.value.problem
    assert caught.value.hint


CALLBACK = {
    "memory_budget": AMOUNTS,
    "rank": RANKS,
    "method": ["", "tuckr", 5, None, ["svd", "nope"], {"a": "nope"}, b"svd"],
    "select": ["", [], 5, [5], [""], "re:(", True],
    "policy": ["", "atuo", 5, None, ["auto"], b"auto"],
    "max_slowdown": [0, -1, NAN, INF, "2", True],
    "retry_on_oom": ["yes", 1, None],
    "allow_untested": ["yes", 1, None],
    "verbose": ["yes", 1, None],
    "recovery": ["absent.yaml", "\x00", 5, [1], {"phase": []}, {"phases": 3}, {"tolerance": -1}, {"monitor": 3}],
    "choices": ["absent.json", "\x00", {}, {"layers": 3}, {"version": 9, "layers": {}}, [1]],
}
RECOVERY = {
    "batchnorm_batches": [-1, 1.5, "many", NAN, True],
    "layers_per_stage": [0, -1, "two", 1.5],
    "cut_epochs": [[-1], "0", [1, 1.5], 3, [[0]]],
    "tolerance": [-0.1, NAN, "small", None],
    "mode": ["up", 3, ""],
    "max_drop": [-1, NAN, "none"],
    "stop_when_recovered": ["yes", 3],
    "phases": [3, "all", [3], [{"epoch": 1}], [{"epochs": -1}]],
    "distill": [3, "net", {"modul": "net"}, {"weight": -1}],
}
PHASE = {
    "epochs": [-1, NAN, "two", None],
    "lr_scale": [0, -1, NAN, "half"],
    "warmup_epochs": [-1, NAN, "one"],
    "train": [3, "", [], [3]],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(CALLBACK))
def test_arguments_of_the_callback(name, value):
    def use():
        callback = CTDRCallback(**grouped({"rank": 0.5, "policy": "keep", name: value}))
        if name in ("select", "choices", "rank", "method"):
            options = callback.options.decomposition() or {"choices": callback.options.read_choices()}
            decompose(net(), progress=False, **options)

    refused(use)


@pytest.mark.parametrize(("name", "value"), cases(RECOVERY))
def test_arguments_of_recovery(name, value):
    refused(lambda: Recovery.read({name: value}))


@pytest.mark.parametrize(("name", "value"), cases(PHASE))
def test_arguments_of_a_phase(name, value):
    refused(lambda: Recovery.read({"phases": [{"epochs": 1, name: value}]}))


@pytest.mark.parametrize("rank", RANKS, ids=repr)
def test_ranks_of_decompose(rank):
    module = net()
    before = copy.deepcopy(module.state_dict())
    refused(lambda: decompose(module, rank, progress=False))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("budget", AMOUNTS, ids=repr)
def test_budgets_of_plan_and_max_batch(trace, budget):
    refused(lambda: plan(trace, budget))
    refused(lambda: max_batch(net(), lambda n: torch.empty(n, 3, 5, 5), loss, budget))


@pytest.mark.parametrize("policy", ["", "sqrtt", "AUTO"])
def test_policies_of_plan(trace, policy):
    refused(lambda: plan(trace, None, policy))


STEPS = {
    "nothing": lambda: None,
    "a number": lambda: 3.0,
    "a vector": lambda: torch.ones(3, requires_grad=True) * 2,
    "no gradient": lambda: torch.ones(()),
    "a pair": lambda: (torch.ones((), requires_grad=True), 3),
}


@pytest.mark.parametrize("step", STEPS)
def test_steps_of_record(step):
    refused(lambda: record(STEPS[step]))
    refused(lambda: record_fake(net(), torch.empty(1), lambda *_: STEPS[step]()))


@pytest.mark.parametrize("device", ["", "abacus", "H-100", "cuda:0"])
def test_devices_of_record_fake(device):
    refused(lambda: record_fake(net(), torch.empty(2, 3, 5, 5), loss, device=device))


STATES = {
    "no checkpoint": 3,
    "nothing": {},
    "names that are no text": {3: torch.ones(1)},
    "entries that are no tensors": {"0.weight": "text"},
    "another network": {"somewhere.weight": torch.ones(1)},
    "a list of callbacks": {"state_dict": {}, "callbacks": [1]},
    "an absent file": "absent.ckpt",
    "text that is no path": "\x00",
}


@pytest.mark.parametrize("state", STATES)
def test_checkpoints_of_restore(state):
    module = net()
    before = copy.deepcopy(module.state_dict())
    refused(lambda: restore(module, STATES[state]))
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


TEXTS = [
    "",
    "{",
    "[]",
    "null",
    "3",
    "{}",
    '{"kind": "plan"}',
    '{"kind": "trace", "version": -1}',
    "\x00\x01",
    "[" * 9999,
]


@pytest.mark.parametrize("kind", [Plan, Trace])
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:20])
def test_files_that_are_no_documents(tmp_path, kind, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    refused(lambda: kind.from_json(path))
    assert path.read_text() == text


def _set(data, value, *where):
    for key in where[:-1]:
        data = data[key]
    data[where[-1]] = value


PLANS = {
    "NaN bound": lambda d: _set(d, NAN, "bound_seconds"),
    "negative bound": lambda d: _set(d, -1.0, "bound_seconds"),
    "bound above its time": lambda d: _set(d, 1e9, "bound_seconds"),
    "budget below its peak": lambda d: _set(d, 1, "budget_bytes"),
    "budget in words": lambda d: _set(d, "8GiB", "budget_bytes"),
    "policy that is no text": lambda d: _set(d, 3, "policy"),
    "no actions": lambda d: d.pop("actions"),
    "no trace": lambda d: d.pop("trace"),
    "actions that are no list": lambda d: _set(d, 3, "actions"),
    "an action for no value": lambda d: _set(d, 10**9, "actions", 0, "value"),
    "an action for a negative value": lambda d: _set(d, -1, "actions", 0, "value"),
    "two actions for one value": lambda d: d["actions"].append(d["actions"][0]),
    "an action that is none": lambda d: _set(d, {"kind": "forget"}, "actions", 0, "action"),
    "an action in words": lambda d: _set(d, "recompute", "actions", 0, "action"),
    "an unknown entry of an action": lambda d: _set(d, 3, "actions", 0, "why"),
    "NaN seconds": lambda d: _set(d, NAN, "trace", "ops", 0, 4),
    "infinite seconds": lambda d: _set(d, INF, "trace", "ops", 0, 4),
    "negative seconds": lambda d: _set(d, -1.0, "trace", "ops", 0, 4),
    "negative workspace": lambda d: _set(d, -1, "trace", "ops", 0, 5),
    "region 10**9": lambda d: _set(d, 10**9, "trace", "ops", 0, 9),
    "region -5": lambda d: _set(d, -5, "trace", "ops", 0, 9),
    "more training modules than there are": lambda d: _set(d, 10**9, "trace", "n_training"),
    "an op that reads the future": lambda d: _set(d, [10**6], "trace", "ops", 0, 2),
    "a value of no storage": lambda d: _set(d, 10**6, "trace", "values", 0, 0),
    "a negative storage": lambda d: _set(d, -8, "trace", "storages", 0, 0),
    "negative weights": lambda d: _set(d, -8, "trace", "resident_bytes"),
    "no ops": lambda d: d["trace"].pop("ops"),
    "a trace in words": lambda d: _set(d, "trace", "trace"),
    "ticks without end": lambda d: _set(d, 10**12, "trace", "n_ticks"),
    "ticks that are no whole number": lambda d: _set(d, float(d["trace"]["n_ticks"]), "trace", "n_ticks"),
    "bytes that are no whole number": lambda d: _set(d, 45.0, "trace", "resident_bytes"),
    "ticks that run backwards": lambda d: _set(d, d["trace"]["ops"][1][1], "trace", "ops", 0, 1),
    "a negative shape": lambda d: _set(d, [-2, 3], "trace", "values", 0, 2),
}


@pytest.mark.parametrize("change", PLANS)
def test_changed_plans(trace, tmp_path, change):
    data = json.loads(plan(trace, policy="sqrt").to_json())
    PLANS[change](data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    refused(lambda: Plan.from_json(path))


CHOICES = {
    "no version": {"layers": {}},
    "another version": {"version": 0, "layers": {}},
    "no layers": {"version": 1},
    "layers in words": {"version": 1, "layers": "all"},
    "a choice in words": {"version": 1, "layers": {"0": "dense"}},
    "no decision": {"version": 1, "layers": {"0": {}}},
    "no method": {"version": 1, "layers": {"0": {"decision": "factorized", "ranks": [1]}}},
    "no ranks": {"version": 1, "layers": {"0": {"decision": "factorized", "method": "svd"}}},
    "an unknown method": {"version": 1, "layers": {"0": {"decision": "factorized", "method": "qr", "ranks": [1]}}},
    "rank 0": {"version": 1, "layers": {"5": {"decision": "factorized", "method": "svd", "ranks": [0]}}},
    "a rank too high": {"version": 1, "layers": {"5": {"decision": "factorized", "method": "svd", "ranks": [99]}}},
    "too many ranks": {"version": 1, "layers": {"5": {"decision": "factorized", "method": "svd", "ranks": [1, 1]}}},
    "ranks in words": {"version": 1, "layers": {"5": {"decision": "factorized", "method": "svd", "ranks": "1"}}},
    "a layer that is not there": {"version": 1, "layers": {"9": {"decision": "dense"}}},
}  # fmt: skip


@pytest.mark.parametrize("choices", CHOICES)
def test_choices_of_decompose(choices):
    refused(lambda: decompose(net(), choices=Choices.from_dict(CHOICES[choices]), progress=False))


COMMANDS = [
    "decompose nowhere:net",
    "decompose tests.test_malformed_table",
    "decompose :net",
    "decompose tests.test_malformed_table:absent",
    "decompose tests.test_malformed_table:loss",
    "decompose tests.test_malformed_table:net --rank 25%",
    "decompose tests.test_malformed_table:net --rank nan",
    "decompose tests.test_malformed_table:net --method tuckr",
    "decompose tests.test_malformed_table:net --select re:(",
    "plan tests.test_malformed_table:net",
    "plan tests.test_malformed_table:net --input x",
    "plan tests.test_malformed_table:net --input 2,3,5,5:float7",
    "plan tests.test_malformed_table:net --input 2,,5",
    "plan tests.test_malformed_table:net --input =2,3",
    "plan tests.test_malformed_table:net --input 2,4,5,5",
    "plan tests.test_malformed_table:net --input x=2,3,5,5",
    "plan tests.test_malformed_table:net --input 2,3,5,5 --input 2",
    "plan tests.test_malformed_table:net --input 2,3,5,5 --budget much",
    "plan tests.test_malformed_table:net --input 2,3,5,5 --policy atuo",
    "plan tests.test_malformed_table:net --input 2,3,5,5 --device abacus",
    "plan tests.test_malformed_table:net --data nowhere:data",
    "plan tests.test_malformed_table:net --data tests.test_malformed_table:loss",
    "max-batch tests.test_malformed_table:net --input 3,5,5 --budget=-1GiB",
    "max-batch tests.test_malformed_table:net --budget 1GiB",
    "explain absent.json",
    "explain tests",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines(command, capsys):
    assert main(command.split()) == 2
    problem, hint = capsys.readouterr().err.splitlines()
    assert problem.startswith("ctdr: ")
    assert hint.startswith("HINT: ")


def test_the_table_has_two_hundred_cases_and_good_values_pass(trace):
    tables = [len(values) for table in (CALLBACK, RECOVERY, PHASE) for values in table.values()]
    others = [RANKS, AMOUNTS, STEPS, STATES, TEXTS, PLANS, CHOICES, COMMANDS]
    assert sum(tables) + sum(map(len, others)) >= 200
    CTDRCallback(rank=0.5, memory_budget="8GiB", recovery=Recovery(phases=[Phase(1)]))
    assert decompose(net(), 0.5, progress=False).factorized
    with Tape(Plan.from_json(plan(trace, policy="sqrt").to_json())):
        pass
