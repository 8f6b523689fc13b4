"""The harness of the benchmarks: options from arguments, rows to JSON, tables from rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Benchmark, pivot, table


@dataclass(frozen=True)
class Row:
    net: str
    share: float
    seconds: float | None = None
    equal: bool = True


def measure(nets: Sequence[str] = ("R", "T"), *, shares: Sequence[float] = (0.5, 0.25), equal: bool = False):
    """Rows made up.

    Args:
        nets: Which nets.
        shares: Of the peak.
        equal: Whether they are equal.
    """
    yield from (Row(net, share, 1 / share if share < 0.5 else None, equal) for net in nets for share in shares)


LINES = table(Row, "net | share | time", "{net} | {share:g} | {seconds:x.1f}", lambda row: row.net == "R")
NETS = pivot(Row, "net", "{net}", "at {share:g}", "{seconds:x.1f}", right=("rows", lambda rows: f"{len(rows)}"))
BENCH = Benchmark("bench", measure, {"rows": Row}, {"lines": LINES, "nets": NETS}, {"nets": ("R", "T")})


@pytest.fixture
def run(tmp_path):
    def run(*arguments, bench=BENCH):
        threads = torch.get_num_threads()
        status = bench.main([*arguments, "--folder", str(tmp_path)])
        torch.set_num_threads(threads)
        return status, json.loads((tmp_path / "bench.json").read_text())["rows"]

    return run


def test_defaults_are_run_and_shown(run, capsys):
    status, rows = run("--equal")
    assert status == 0
    assert [(row["net"], row["share"]) for row in rows] == [("R", 0.5), ("R", 0.25), ("T", 0.5), ("T", 0.25)]
    shown = capsys.readouterr().out
    assert "| R | 0.5 |  |\n| R | 0.25 | x4.0 |\n\n" in shown
    assert "| net | at 0.5 | at 0.25 | rows |\n| --- | --- | --- | --- |\n| R |  | x4.0 | 2 |" in shown


def test_options_select_rows_and_another_gradient_fails(run):
    assert run("T", "--shares", "0.1") == (1, [{"net": "T", "share": 0.1, "seconds": 10.0, "equal": False}])


def test_an_unknown_word_is_refused_and_options_are_explained(capsys):
    with pytest.raises(SystemExit):
        BENCH.main(["U"])
    assert "'U' is not one of R, T" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        BENCH.main(["--help"])
    assert "--shares" in (shown := capsys.readouterr().out)
    assert "Of the peak." in shown


def test_rows_take_the_place_of_earlier_ones_on_the_same_machine_alone(run, monkeypatch):
    keyed = replace(BENCH, key=("net", "share"))
    run("R", bench=keyed)
    rows = run("T", "R", "--shares", "0.5", "--equal", bench=keyed)[1]
    assert [(row["net"], row["share"], row["equal"]) for row in rows] == [
        ("R", 0.5, True),
        ("R", 0.25, False),
        ("T", 0.5, True),
    ]
    monkeypatch.setattr(harness, "machine", lambda: {"processor": "another", "cores": 1, "versions": {}})
    assert len(run("T", "--shares", "0.5", bench=keyed)[1]) == 1
