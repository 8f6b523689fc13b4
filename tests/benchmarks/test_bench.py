"""``make bench``: what each benchmark prints is shown and kept with the machine."""

import json
from importlib.util import find_spec

import pytest

from benchmarks import __main__ as bench


def test_every_table_is_a_module():
    assert [name for name in bench.TABLES if find_spec(f"benchmarks.{name}") is None] == []


def test_lines_machine_and_a_failure_are_kept(tmp_path, monkeypatch, capfd):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()  # or the installed package of this name would be found first
    (tmp_path / "benchmarks" / "engine.py").write_text("print('a table')\n")
    (tmp_path / "benchmarks" / "joint.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert bench.main(["engine", "joint", "--folder", "out"]) == 1
    assert "a table" in capfd.readouterr().out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert found["tables"]["engine"]["lines"] == ["a table"]
    assert (found["tables"]["engine"]["status"], found["tables"]["joint"]["status"]) == (0, 3)
    assert found["machine"]["versions"]["torch"]
    assert found["machine"]["cores"] > 0


def test_an_unknown_table_is_refused():
    with pytest.raises(SystemExit):
        bench.main(["engin"])
