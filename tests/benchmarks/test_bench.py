"""``make bench``: what each benchmark prints is shown and kept with the machine."""

import json
from datetime import date
from importlib.util import find_spec

import pytest

from benchmarks import __main__ as bench


def test_every_table_is_a_module():
    assert [name for name in bench.TABLES if find_spec(f"benchmarks.{name}") is None] == []


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Two benchmarks in a folder, of which one fails; what ``bench.json`` keeps of a run."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()  # or the installed package of this name would be found first
    (tmp_path / "benchmarks" / "engine.py").write_text("import sys\nprint('a table', *sys.argv[1:])\n")
    (tmp_path / "benchmarks" / "joint.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*names):
        status = bench.main([*names, "--folder", "out"])
        return status, json.loads((tmp_path / "out" / "bench.json").read_text())

    return run


def test_lines_machine_and_a_failure_are_kept(programs, capfd):
    status, found = programs("engine", "joint")
    assert status == 1
    assert "a table" in capfd.readouterr().out
    assert found["tables"]["engine"]["lines"] == [f"a table {' '.join(bench.TABLES['engine'])}"]
    assert found["tables"]["engine"]["day"] == date.today().isoformat()
    assert (found["tables"]["engine"]["status"], found["tables"]["joint"]["status"]) == (0, 3)
    assert found["machine"]["versions"]["torch"]
    assert found["machine"]["cores"] > 0


def test_the_documents_settings_are_each_benchmarks_own(programs):
    assert programs("engine", "--full")[1]["tables"]["engine"]["lines"] == ["a table"]


def test_earlier_runs_stay_on_the_same_machine_alone(programs, monkeypatch, capfd):
    assert programs("joint")[0] == 1
    status, found = programs("engine")
    assert (status, set(found["tables"])) == (0, {"engine", "joint"})
    assert "failed" not in capfd.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(bench, "machine", lambda: {"processor": "another"})
    assert set(programs("engine")[1]["tables"]) == {"engine"}


def test_an_unknown_table_is_refused():
    with pytest.raises(SystemExit):
        bench.main(["engin"])
