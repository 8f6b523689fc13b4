"""Figures of the benchmarks: written with machine and day, read again, and made into the documents' tables."""

import json
from datetime import date
from functools import partial

import pytest

from benchmarks import bounds, decompose, digits, engine, planning_time, policies, promise, ranks, recovery
from benchmarks.harness import Figures, machine, write_figures
from ctdr_lightning.memory import POLICIES


def written(tmp_path, **parts):
    write_figures(tmp_path / "figures.json", **parts)
    return (tmp_path / "figures.json").read_text()


def test_the_day_the_machine_and_the_versions_are_kept_and_said(tmp_path):
    text = written(tmp_path, rows=[])
    found = json.loads(text)
    assert found["machine"] == machine()
    assert found["day"] == date.today().isoformat()
    said = Figures(text, {}).run_on()
    for part in (found["day"], found["machine"]["processor"], f"torch {found['machine']['versions']['torch']}"):
        assert part in said


def lines_of(shown):
    """The body of a table; its head and the sentence under it aside."""
    return [line for line in shown.splitlines() if line.startswith("|")][2:]


def test_planning_time_is_told_with_its_gap(tmp_path):
    row = planning_time.Row("ResNet", "resnet152", 2592, 1.5, 4.84, 0.9, 1.1071, 0.00049)
    table = planning_time.BENCHMARK.table(written(tmp_path, rows=[row]), "table")
    assert lines_of(table) == ["| resnet152 | 2,592 | 4.8 | x1.107 | 0.0% |"]


def test_the_promise_is_told_in_shares_of_the_dense_step(tmp_path):
    rows = [promise.Row("dense", 400 * 2**20, 2.0), promise.Row("the promise", 100 * 2**20, 1.5)]
    assert lines_of(promise.BENCHMARK.table(written(tmp_path, rows=rows), "table")) == [
        "| dense | 400.0 | 1.00 | 2.00 | 1.00 |",
        "| the promise | 100.0 | 0.25 | 1.50 | 0.75 |",
    ]


def test_solvers_are_told_beside_tensorly_and_alone(tmp_path):
    solved = [decompose.Solved("Tucker", 0.2, 0.17, 1.0, 0.17), decompose.Solved("EVBMF", 0.05)]
    whole = [decompose.Whole('rank="error=0.5"', 4.8, 9.0, 2.0)]
    text = written(tmp_path, solvers=solved, whole=whole)
    assert lines_of(decompose.BENCHMARK.table(text, "solvers")) == [
        "| Tucker | 0.200 | 0.1700 | 1.000 | 0.1700 | 5.0x |",
        "| EVBMF | 0.050 |  |  |  |  |",
    ]
    assert lines_of(decompose.BENCHMARK.table(text, "whole")) == ['| `rank="error=0.5"` | 9.0 | 2.00x |']


def test_accuracies_on_the_digits_are_told_below_the_dense_one(tmp_path):
    rows = [digits.Row("dense", 1.0, *[98.89] * 4), digits.Row("tucker", 7.68, 97.5, 98.75, 98.89, 99.58)]
    assert lines_of(digits.BENCHMARK.table(written(tmp_path, rows=rows), "table")) == [
        "| dense | 1 | 98.89 |  |  |  |",
        "| tucker | 7.68 | 97.50 | 98.75 | 98.89 | 99.58 |",
    ]


def test_recovery_is_told_by_seed_median_and_mean(tmp_path):
    tuned = recovery.Row("tuned", "one cut", [99.0, 98.0, 99.6], 0.0314, 7.6)
    text = written(tmp_path, rows=[tuned, recovery.Row("short", "four cuts", [98.0], 0.02, 7.6)])
    assert lines_of(recovery.BENCHMARK.table(text, "tuned")) == [
        "| one cut | 99.00, 98.00, 99.60 | 99.00 | 98.87 | 0.031 | 7.6 |"
    ]
    assert lines_of(recovery.BENCHMARK.table(text, "short")) == ["| four cuts | 98.00 | 98.00 | 98.00 | 0.020 | 7.6 |"]


def test_the_engine_is_told_against_the_allocator_the_checkpoint_and_plain_dispatch(tmp_path):
    text = written(
        tmp_path,
        peaks=[engine.Peaks("R", 1391, 80 * 2**20, 1.0, 0.99996, 0.9987, 1.0002, 1.0)],
        boundaries=[engine.Boundaries("R", 2, 0.4004, 0.41)],
        costs=[engine.Cost("recording", 19.26)],
        verification=[engine.Verified("R", 1.254, 1.0612)],
    )
    assert lines_of(engine.BENCHMARK.table(text, "peaks")) == [
        "| R | 1,391 | 80.0 | 1.0000 | 1.0000 | 0.9987 to 1.0002 | 1.0000 |"
    ]
    assert lines_of(engine.BENCHMARK.table(text, "boundaries")) == ["| R | 2 | 0.400 | 0.410 |"]
    assert lines_of(engine.BENCHMARK.table(text, "costs")) == ["| recording | 19.3 |"]
    assert lines_of(engine.BENCHMARK.table(text, "verification")) == ["| R | x1.25 | x1.06 |"]


def test_trained_networks_are_told_by_case_and_way(tmp_path):
    def figure(case, way, raw):
        row = {"ratio": 8.1, "divergence": 0.01, "raw": raw, "batchnorm": raw, "fine_tuned": None, "seconds": 3.0}
        return ranks.Figure(case, way, 99.8, row)

    figures = [figure("Z8", "weights", 90.0), figure("Z8", "data", 99.02), figure("C8", "data", 97.0)]
    text = written(tmp_path, rows=figures)
    assert lines_of(ranks.BENCHMARK.table(text, "table")) == [
        "| Z | 99.8 | 90, 90 (x8.1) | 99.02, 99.02 (x8.1) |",
        "| C | 99.8 |  | 97, 97 (x8.1) |",
    ]


def test_bounds_are_told_with_each_policys_distance(tmp_path):
    nets = [bounds.Bounded("R", 0.5, 1.05, {"checkmate": 1.0605, "rotor": None})]
    text = written(tmp_path, chains=[bounds.Chain(8, 6, 1.0, 1.0833, 1.125)], nets=nets)
    assert lines_of(bounds.BENCHMARK.table(text, "chains")) == ["| 8 | 6 | 1.000 | 1.083 | 1.125 |"]
    assert lines_of(bounds.BENCHMARK.table(text, "nets")) == ["| R, 50% | 1.050 | 1.060 (+1.0%) | none |"]
    assert "| `checkmate` | `rotor` |" in bounds.BENCHMARK.table(text, "nets")


def test_a_uniform_chain_and_a_net_are_bounded():
    few = next(bounds.chains(5.0))
    assert 1 - 1e-6 <= few.relaxed <= few.optimum + 1e-6 <= few.rotor + 2e-6
    row = next(bounds.bounded("T", ["rotor"], 1.0))
    assert row.policies["rotor"] >= row.bound >= 1


def test_policies_are_told_a_row_a_way_and_rivals_that_are_ahead(tmp_path):
    ways = [
        policies.Row("R", "checkpoint", None, 9.0, 0.5, 1.5),
        policies.Row("R", "auto", 0.5, 9.0, 0.49, 1.2, 0.49, 1.19, 1.1),
    ]
    near, ahead = (policies.Pair("R", name, 0.5, 0.5, s, 0.5, 1.2) for name, s in (("rotor", 1.18), ("dtr", 1.1)))
    unmet = policies.Pair("R", "optimal", None, 0.3, 1.4, None, None)
    text = written(tmp_path, ways=[*ways, policies.Row("T", "auto", 0.5, 9.0, 0.4, 1.1)], pairs=[near, ahead, unmet])
    assert lines_of(policies.BENCHMARK.table(text, "R")) == [
        "| `checkpoint` |  | 0.500 | x1.500 |  |  |  |",
        "| `auto` | 0.50 | 0.490 | x1.200 | 0.490 | x1.190 | x1.100 |",
    ]
    assert policies.BENCHMARK.table(text, "rivals").startswith(
        "* R: as small, and as fast to 2%, as 1 of 3 rivals; ahead of it: "
        "`dtr` 0.50 (0.500, x1.100; `auto` 0.500, x1.200), `optimal` (0.300, x1.400; `auto` finds no plan)."
    )


@pytest.mark.slow
def test_auto_answers_a_peak_that_nothing_fits_with_none():
    net, inputs, step_of = policies.NETS["T"]()
    step = partial(step_of, net, inputs)
    assert policies.answer(policies.Prepared(policies.record(step)), step, peak_bytes=1, dynamic_bytes=100) is None
    rival = policies.Row("T", "rotor", 0.1, 9.0, 0.1, 1.5)
    assert policies.pair(rival, None) == policies.Pair("T", "rotor", 0.1, 0.1, 1.5, None, None)


@pytest.mark.slow
def test_auto_is_measured_beside_each_rival_with_its_peak(monkeypatch):
    monkeypatch.setattr(policies, "SHARES", (0.6,))
    monkeypatch.setattr(policies, "POLICIES", {name: POLICIES[name] for name in ("auto", "rotor")})
    rows, pairs = policies.compare("T", 1, compiled=False)
    assert rows[0].name == "plain"
    assert [row.name for row in rows[-2:]] == ["rotor", "auto"]
    assert [pair.rival for pair in pairs] == [row.name for row in rows[1:-1]]
    for row in rows[-2:]:
        assert row.peak == pytest.approx(row.predicted_peak, rel=0.01)
        assert row.peak <= 0.61
    assert all(pair.peak <= pair.rival_peak * 1.001 for pair in pairs)


@pytest.mark.slow
def test_the_engine_is_as_small_as_a_checkpoint_and_as_predicted():
    peaks = next(engine.prediction(2))
    assert [peaks.keep, peaks.sqrt, peaks.least, peaks.most] == pytest.approx([1.0] * 4, abs=0.01)
    kept = next(engine.boundaries())
    assert kept.ours <= kept.theirs * 1.01
    assert {cost.name for cost in engine.costs(1)} >= {"recording"}
