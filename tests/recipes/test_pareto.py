"""The sweep over ranks, budgets and policies, on a small network."""

import csv

import pytest

from ctdr_recipes.pareto import Point, main, sweep


@pytest.fixture
def points(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(
        "from ctdr_recipes.classifier import cnn\ndef net(): return cnn([16, 32, 32, 32], [1, 1, 2, 1])\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "--model nets:net --input 32,1,16,16 --device a100 --ranks 0.25 --budgets 1 0.7 0.02 --policies auto keep"
    main([*words.split(), "--folder", "out"])
    assert "best" in capsys.readouterr().out
    return list(csv.DictReader((tmp_path / "out" / "pareto.csv").open()))


@pytest.mark.slow
def test_every_combination_is_there_and_those_that_cannot_fit_say_so(points, tmp_path):
    assert {(p["rank"], p["budget_share"], p["policy"]) for p in points} == {
        (rank, share, policy)
        for rank in ("1.0", "0.25")
        for share in ("1.0", "0.7", "0.02")
        for policy in ("auto", "keep")
    }
    assert {p["fits"] for p in points if p["budget_share"] == "0.02"} == {"False"}
    assert all(p["fits"] == "True" for p in points if (p["policy"], p["budget_share"]) == ("auto", "0.7"))
    assert "does not fit" in (tmp_path / "out" / "pareto.md").read_text()
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 10_000


@pytest.mark.slow
def test_no_plan_is_below_its_bound_and_the_best_are_not_beaten(points):
    fitting = [p for p in points if p["fits"] == "True"]
    assert all(float(p["seconds"]) >= 0.999 * float(p["bound_seconds"]) for p in fitting)
    best = [p for p in fitting if p["best"] == "True"]
    assert best
    for p in best:
        better = [
            q
            for q in fitting
            if int(q["peak_bytes"]) < int(p["peak_bytes"]) and float(q["seconds"]) < float(p["seconds"])
        ]
        assert better == []


def test_nothing_to_plan_gives_no_points():
    assert sweep({}, [1.0], ["auto"], 100) == []
    assert not Point(1, 1, "auto", 1, 0, 0, False).best
