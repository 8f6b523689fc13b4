"""Training from scratch: ways of a cut and ways of a budget have tables of their own."""

from benchmarks.from_scratch import BENCHMARK, BUDGETED, IN_PARTS, SHARES, WHOLE, Row, _callback
from benchmarks.from_scratch import _dense_bytes as dense_bytes
from benchmarks.harness import write_figures


def row(way, budget=0.0, ratio=1.0):
    return Row("R", way, [98.0, 99.0], [0.1, 0.2], [-1, -1], [10, 10], [1.25, 1.5], [1.5, 2.0], ratio, budget)


def test_each_kind_of_way_has_its_table(tmp_path):
    rows = [row("dense"), row("no budget"), row("budget", 0.3), row("budget, BatchNorm whole", 0.3, 8.0)]
    write_figures(tmp_path / "from_scratch.json", rows=rows)
    text = (tmp_path / "from_scratch.json").read_text()
    cuts, budgets = (BENCHMARK.table(text, name) for name in ("table", "budget"))
    assert "| R | dense | 98.50 ± 0.71 % | 0.1500 | 10 |  | 1.38 | 1.75 | 1.0 |" in cuts
    assert "budget" not in cuts
    assert "| R | budget, BatchNorm whole | 0.30 | 98.50 ± 0.71 % | 0.1500 | 1.38 | 1.75 | 8.0 |" in budgets
    assert "dense |" not in budgets


def test_the_budget_is_a_share_of_the_measured_peak_and_only_one_way_forbids_parts():
    assert _callback("C", BUDGETED[0], 1) is None
    made = {way: _callback("C", way, 1).options for way in (IN_PARTS, WHOLE)}
    assert {options.memory_budget for options in made.values()} == {int(SHARES["C"] * dense_bytes("C"))}
    assert [options.batch_norm_in_parts for options in made.values()] == [None, False]
