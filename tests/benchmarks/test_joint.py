import pytest

from benchmarks.harness import write_figures
from benchmarks.joint import BENCHMARK, MIB, Figure, medians


def test_the_table_says_what_a_way_costs_and_which_budget_it_does_not_reach(tmp_path):
    figures = [
        Figure("D", 45 * MIB, "dense", 74 * MIB, 1.0, 99.26),
        Figure("D", 45 * MIB, "recomputation alone", 50 * MIB),
        Figure("D", 45 * MIB, "decomposition alone, 1/4", 57 * MIB),
        Figure("D", 45 * MIB, "same share of each layer, 1/4", 44 * MIB, 0.9, 99.0),
        Figure("D", 45 * MIB, "fit_to_budget", 44 * MIB, 0.934, 99.3, 12.3, 44 * MIB, 0.95, 3, 2),
    ]
    write_figures(tmp_path / "joint.json", rows=figures)
    lines = BENCHMARK.table((tmp_path / "joint.json").read_text(), "table").splitlines()
    ours = "44.0 MiB, x0.93, 99.3 (2 of 3 seeds) | 44.0 MiB, x0.95 | 12 s"
    assert lines[2:-2] == [f"| D, 45.0 MiB | 74.0 MiB, 99.26 | no: 50.0 MiB | no: 57.0 MiB | {ours} |"]


def test_medians_are_those_of_the_seeds_that_reach_the_budget_where_most_do():
    met = [Figure("C", MIB, "fit_to_budget", peak, slow, 99.0, 10.0 * slow) for peak, slow in ((90, 1.0), (94, 1.2))]
    missed = Figure("C", MIB, "fit_to_budget", 200, reached=0)
    (most,) = medians([[met[0]], [missed], [met[1]]])
    assert (most.peak_bytes, most.slowdown, most.choosing_s) == (92, pytest.approx(1.1), pytest.approx(11.0))
    assert (most.seeds, most.reached) == (3, 2)
    (few,) = medians([[missed], [met[0]], [missed]])
    assert (few.peak_bytes, few.slowdown, few.score, few.seeds, few.reached) == (200, None, None, 3, 1)
