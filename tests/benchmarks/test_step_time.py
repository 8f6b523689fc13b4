from functools import partial

import pytest

from benchmarks.harness import write_figures
from benchmarks.nets import net_r
from benchmarks.step_time import BENCHMARK, NETS, Figure, figures_of


@pytest.mark.slow
def test_a_net_is_planned_and_timed_at_each_share_and_shown_in_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(NETS, "R", partial(net_r, 2))
    kept, planned, none = figures_of("R", [1.0, 0.6, 0.01], rounds=1)
    assert kept.predicted == 1.0
    assert kept.measured
    assert planned.measured
    assert (planned.predicted or 0.0) > 1.0
    assert none == Figure("R", 0.01)
    write_figures(tmp_path / "step_time.json", rows=[kept, planned, none, Figure("T", 1.0, 1.1, 1.0)])
    lines = BENCHMARK.table((tmp_path / "step_time.json").read_text(), "table").splitlines()
    assert lines[0] == "| net | 1 of its peak | 0.6 of its peak | 0.01 of its peak |"
    assert lines[2].endswith("| no plan |")
    assert lines[3] == "| T | x1.100, measured x1.000 (+10.0%) |  |  |"
