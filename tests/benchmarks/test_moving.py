"""The benchmark of policies that move: what it asks, what it makes of figures, and one row of a small net."""

import pytest
import torch
from torch import nn

from benchmarks import moving
from benchmarks.drawings import DATA
from benchmarks.harness import Figures, write_figures
from benchmarks.moving import (
    BENCHMARK,
    CHAIN,
    EVERY_NET,
    PUBLISHED,
    VDNN,
    Bench,
    Least,
    Rate,
    Row,
    claims,
    least_peaks,
    moving_policies,
    rates,
)
from ctdr_lightning.memory import POLICIES
from tests.benchmarks.figures_of_plans import figures

OURS = {"auto"}
NEVER_WAIT = {"ssdtrain", "vdnn_conv"}  # as published: the one hides all it moves, the other moves few


def test_every_published_policy_that_moves_says_what_its_paper_claims():
    assert {"vdnn", "gist", "capuchin", "auto"} <= set(moving_policies())
    assert set(moving_policies()) - OURS <= set(claims())
    assert claims()["sentinel"] == "80 % less fast memory at comparable speed"


def test_the_tables_of_figures(tmp_path):
    row = Row("M", "vdnn", 1.0, 0.5, **figures(2**27, 2**26, (1.25, 1.1, 1.2), 2**23))
    slow = Row("M", "auto", 0.25, 0.5, **figures(2**27, 2**26, (1.5, 1.4, 1.3)))
    write_figures(tmp_path / "moving.json", rows=[row, Row("M", "gist", 1.0, 0.0), slow])
    text = (tmp_path / "moving.json").read_text()
    lines = BENCHMARK.table(text, "policies").splitlines()[:-2]  # without the sentence under it
    assert lines[2].startswith("| M, `vdnn` | 0.50 (0.50) | x1.25 (1.20) | x1.10 | 8 MiB | 89 to 95 % less memory")
    assert lines[3].startswith("| M, `gist` | over 0.9 |")
    assert len(lines) == 4
    assert BENCHMARK.table(text, "ratios").splitlines()[2:-2] == [
        "| M | 0.25 | 0.50 (0.50) | x1.500 | x1.300 | x1.400 | 0 MiB |"
    ]


@pytest.mark.slow
def test_a_row_is_measured(monkeypatch, tmp_path):
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    monkeypatch.setitem(moving.NETS, "small", lambda: (net, torch.randn(4096, 64), lambda net, x: net(x).sum()))
    row = Bench("small", tmp_path, n_rounds=1).measured("auto", 1.0)
    assert row.equal
    assert 0 < row.peak_bytes < row.plain_bytes
    assert row.wall > 0


def test_the_least_peaks_of_a_chain_are_reached_and_shown(tmp_path):
    rows = list(least_peaks(CHAIN))
    by_policy = {row.policy: row for row in rows}
    assert {"autotm", "flashneuron", "swapadvisor", "tflms", "vdnn_plus", VDNN} <= set(by_policy)
    for row in rows:
        if row.policy not in NEVER_WAIT:
            assert row.least <= 1.05 * by_policy[VDNN].least, row
            assert 1.0 < row.slowdown <= 1.01 * by_policy[VDNN].slowdown, row
    write_figures(tmp_path / "moving.json", least=rows)
    shown = BENCHMARK.table((tmp_path / "moving.json").read_text(), "least")
    assert f"| `{VDNN}` | {by_policy[VDNN].least:.3f}, x{by_policy[VDNN].slowdown:.2f} |" in shown


def test_every_policy_that_waits_reaches_vdnns_least_peak_in_no_more_time():
    """The page's sentence about the committed figures."""
    rows = Figures((DATA / "moving.json").read_text(), BENCHMARK.parts).rows(Least)
    vdnn = {row.net: row for row in rows if row.policy == VDNN}
    assert set(vdnn) == set(PUBLISHED)
    for row in rows:
        if row.policy not in NEVER_WAIT:
            assert row.least <= 1.05 * vdnn[row.net].least, row
            assert row.slowdown is not None, row
            assert row.slowdown <= 1.01 * vdnn[row.net].slowdown, row


@pytest.mark.slow
def test_auto_is_set_beside_the_fastest_other_at_three_rates(monkeypatch):
    net = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())])
    monkeypatch.setitem(EVERY_NET, "small", lambda: (net, torch.randn(8192, 64), lambda net, x: net(x).sum()))
    rows = list(rates("small"))
    assert [row.ratio for row in rows] == [0.3, 1.0, 3.0]
    assert all(row.best in POLICIES for row in rows)
    assert_auto_is_ahead(rows)


def test_rates_are_told_with_the_rival(tmp_path):
    none = Rate("R", 1.0, None, "", None, 2.0)
    write_figures(tmp_path / "moving.json", rates=[Rate("R", 0.3, 1.0631, "dtr", 1.0958, 28.4), none])
    assert BENCHMARK.table((tmp_path / "moving.json").read_text(), "rates").splitlines()[2:4] == [
        "| R | 0.3 | x1.063 | x1.096 | dtr | x28.4 |",
        "| R | 1 | - | - |  | x2.0 |",
    ]


def test_auto_is_slower_than_no_other_policy_at_three_rates_on_eight_nets():
    rows = Figures((DATA / "moving.json").read_text(), BENCHMARK.parts).rows(Rate)
    assert {(row.net, row.ratio) for row in rows} == {(net, ratio) for net in EVERY_NET for ratio in (0.3, 1.0, 3.0)}
    assert_auto_is_ahead(rows)


def assert_auto_is_ahead(rows):
    for row in rows:
        if row.other is not None:
            assert row.slowdown is not None, row
            assert row.slowdown <= 1.02 * row.other, row
