"""Runs on disk: written, found again, compared."""

import json

import pytest

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.cli import main
from ctdr_lightning.pages.comparison_page import comparison_page, comparison_text
from ctdr_lightning.pages.run_folder import read_runs, write_run
from ctdr_lightning.pages.run_page import RunParts
from ctdr_lightning.pages.run_record import RunRecord
from tests.pages.parts import Reader, planned_run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A folder of three runs: two with the callback, a dense one with a CSV logger alone."""
    folder = tmp_path_factory.mktemp("sweep")
    for share, accuracy in ((0.7, 0.9), (0.6, 0.85)):
        parts = planned_run(f"share-{share}", share, accuracy, memory_budget=f"{share}")
        write_run(folder / f"share-{share}" / "csv" / "version_0", parts)
        write_run(folder / f"share-{share}" / "tensorboard", parts)
    dense = folder / "dense" / "csv" / "version_0"
    dense.mkdir(parents=True)
    (dense / "metrics.csv").write_text("epoch,step,train/loss,val/acc\n0,9,,0.5\n1,19,0.1,0.95\n")
    return folder


def test_a_record_comes_back_as_it_was():
    record = planned_run().record
    assert RunRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("damage", [{"layers": [{"name": 3}]}, {"history": [{"step": "x"}]}, {"settings": 4}])
def test_a_damaged_record_is_refused(damage):
    plain = json.loads(RunRecord("mine").to_json())
    with pytest.raises(CheckpointError, match="damaged"):
        RunRecord.from_json(json.dumps({**plain, **damage}))


def test_each_run_of_a_sweep_is_found_once_by_its_folder(sweep):
    runs = {parts.record.name: parts for parts in read_runs(sweep)}
    assert list(runs) == ["dense", "share-0.6", "share-0.7"]
    assert runs["dense"].record.last("val/acc") == 0.95
    assert runs["share-0.6"].plan.peak_bytes < runs["share-0.7"].plan.peak_bytes


def test_the_history_of_a_resumed_run_is_joined(tmp_path):
    parts = planned_run()
    for version, steps in ((0, (0.0, 10.0)), (1, (20.0,))):
        history = tuple({"epoch": step / 10, "step": step, "val/acc": 0.1} for step in steps)
        record = RunRecord("run", history=history, parameters_after=version)
        write_run(tmp_path / "csv" / f"version_{version}", type(parts)(record))
    (run,) = read_runs(tmp_path)
    assert run.record.series("val/acc", "step")[0] == [0.0, 10.0, 20.0]
    assert run.record.parameters_after == 1


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no run"):
        read_runs(tmp_path)


def test_a_comparison_tells_what_differs_and_draws_every_run(sweep):
    runs = read_runs(sweep)
    read = Reader(comparison_page("sweep", runs))
    heads = read.text("th")
    assert "memory_budget" in heads
    assert "rank" in heads  # the dense run has none
    assert {"share-0.6", "share-0.7"} <= {a.get("id", "").removeprefix("layer-") for a in read.all("tr")}
    assert len(read.all("circle", "dot")) >= 2
    names = {a["data-name"] for a in read.all("path", "curve")}
    assert names == {"dense", "share-0.6", "share-0.7"}
    lines = comparison_text(runs).splitlines()
    assert len(lines) == 2 + len(runs)
    assert len({line.count("|") for line in lines}) == 1


BATCHES, REST = "+trainer.limit_train_batches-8", "experiment-digits-logger-tensorboard"


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["seed-0", "seed-1"], ["seed-0", "seed-1"]),
        ([f"{BATCHES}-ctdr.rank-{rank}-{REST}" for rank in (0.25, 0.5)], ["ctdr.rank-0.25", "ctdr.rank-0.5"]),
        ([f"{REST}-lr-1e-3", f"{REST}-lr-2e-3"], ["lr-1e-3", "lr-2e-3"]),
        ([f"ctdr.rank-0.5-{REST}", "dense"], None),
        ([f"{REST}-trainer-cpu"] * 2, None),
    ],
)
def test_long_names_of_a_comparison_are_told_by_what_differs(names, shown):
    runs = [RunParts(RunRecord(name)) for name in names]
    lines = comparison_text(runs).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == (shown or names)
    assert [parts.record.name for parts in runs] == names


def test_the_command_writes_a_page_on_one_run_on_several_and_on_a_plan(sweep, tmp_path, capsys):
    for sources, said in (
        ([sweep], "3 runs"), ([sweep / "share-0.6"], "1 run"), ([sweep / "dense", sweep / "share-0.6"], "2 runs"),
        ([sweep / "share-0.6" / "csv" / "version_0" / "ctdr" / "plan.json"], "a plan"),
    ):  # fmt: skip
        out = tmp_path / "page.html"
        assert main(["report", *map(str, sources), "-o", str(out)]) == 0
        assert said in capsys.readouterr().out
        assert Reader(out.read_text()).all("path", "curve")


def test_the_command_says_where_no_run_is(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_planning_writes_a_page_with_the_dense_step(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(
        "from ctdr_recipes.classifier import cnn\ndef net(): return cnn([16, 32, 32], [1, 2, 1])\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["plan", "nets:net", "--input", "16,1,16,16", "--device", "a100", "--rank", "0.4", "--html", "plan.html"]
    assert main(command) == 0
    read = Reader((tmp_path / "plan.html").read_text())
    names = {a["data-name"] for a in read.all("path", "curve")}
    assert {"dense model", "everything kept"} <= names
