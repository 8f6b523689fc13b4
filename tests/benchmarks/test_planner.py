from dataclasses import replace

import pytest

from benchmarks.harness import Figures, write_figures
from benchmarks.planner import BENCHMARK, Row, summary

FITS = Row("R", 369, 0.4, 1.1, 0.004, "dtr", 1.2, 0.5, False)
ROWS = [
    FITS,
    replace(FITS, share=0.3, slowdown=1.5, gap=0.03, rival_slowdown=1.4, plan_s=2.0),
    replace(FITS, share=0.2, slowdown=None, gap=None, rival="", rival_slowdown=None, proven=True),
    replace(FITS, net="T", n_ops=1000, share=0.3, slowdown=None, gap=None, rival="", rival_slowdown=None),
]


@pytest.fixture
def text(tmp_path):
    write_figures(tmp_path / "planner.json", rows=ROWS)
    return (tmp_path / "planner.json").read_text()


def test_rows_come_back_from_json(text):
    assert Figures(text, BENCHMARK.parts).rows(Row) == ROWS


def test_the_table_has_a_row_a_net_and_tells_a_proof_from_nothing_found_and_from_no_run(text):
    lines = BENCHMARK.table(text, "gaps").splitlines()[:-2]  # without the sentence under it
    assert lines[0] == "| net (ops) | 0.4 | 0.3 | 0.2 | longest, s |"
    assert lines[2:] == ["| R (369) | 0.40% | 3.00% (dtr is ahead) | floor | 2.0 |", "| T (1,000) |  | none |  | 0.5 |"]


def test_the_summary_counts_what_fits_what_is_open_and_who_is_ahead():
    assert summary(ROWS) == [
        "Of 4 rows 1 are proven not to fit; 2 have a plan: the median gap is 1.70%, 50% are under 1%, the largest is "
        "3.00%.",
        "Nothing is found and nothing proven in 1.",
        "Another policy is ahead in 1.",
        "Planning takes 0.5 s in the median and 2.0 s at most.",
    ]


@pytest.mark.parametrize(("slowdown", "ahead"), [(1.4, False), (1.4005, False), (1.41, True), (None, True)])
def test_a_policy_is_ahead_by_more_than_a_thousandth(slowdown, ahead):
    assert replace(FITS, slowdown=slowdown, rival_slowdown=1.4).ahead is ahead
    assert not replace(FITS, slowdown=slowdown, rival="", rival_slowdown=None).ahead
