import json
from dataclasses import asdict

from benchmarks.joint import MIB, Figure, table


def test_the_table_says_what_a_way_costs_and_which_budget_it_does_not_reach():
    figures = [
        Figure("D", 45 * MIB, "dense", 74 * MIB, 1.0, 99.26),
        Figure("D", 45 * MIB, "recomputation alone", 50 * MIB),
        Figure("D", 45 * MIB, "decomposition alone, 1/4", 57 * MIB),
        Figure("D", 45 * MIB, "same share of each layer, 1/4", 44 * MIB, 0.9, 99.0),
        Figure("D", 45 * MIB, "fit_to_budget", 44 * MIB, 0.934, 99.3),
    ]
    lines = table(json.dumps([asdict(figure) for figure in figures])).splitlines()
    assert lines[2:] == ["| D, 45.0 MiB | 74.0 MiB, 99.26 | no: 50.0 MiB | no: 57.0 MiB | 44.0 MiB, x0.93, 99.3 |"]
