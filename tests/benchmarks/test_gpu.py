"""The GPU's benchmark on a processor: the same parts on one small net, and the tables of their rows."""

from functools import partial

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import battery, cases, offload, overhead, peaks
from benchmarks.gpu_parts.battery import Battery
from benchmarks.gpu_parts.fits import Fit
from benchmarks.gpu_parts.offload import Moved, Rates
from benchmarks.gpu_parts.overhead import Overhead
from benchmarks.gpu_parts.peaks import Dense, Planned
from benchmarks.harness import write_figures
from benchmarks.nets import net_r

NET = {"R": partial(net_r, 2)}


@pytest.fixture
def rows(monkeypatch):
    """The rows of some parts on one net, by kind."""
    for part in (battery, overhead, peaks):
        monkeypatch.setattr(part, "TINY", NET)

    def of(*parts):
        found = list(gpu.figures(parts))
        return {kind: [row for row in found if type(row) is kind] for kind in {type(row) for row in found}}

    return of


@pytest.mark.slow
def test_steps_leave_the_plain_steps_bits(rows):
    found = rows("battery")[Battery]
    assert [row.way for row in found] == [
        "recorded", "recorded under a budget", "sqrt", "everything again", "all actions 0", "all actions 1", "auto",
        "session at 0.75",
    ]  # fmt: skip
    assert [row for row in found if not row.equal or row.trouble] == []


def test_other_bits_and_errors_are_no_equality(rows):
    row = Battery("net", "tf32", "sqrt", 8, 1, 1e-3, 0, 0.0)
    assert not row.equal
    assert Battery("net", "tf32", "sqrt", 8, 1, 1e-7, 2, 1e-7).equal  # as two plain steps differ
    assert not Battery("net", "tf32", "sqrt", 8, 0, 0.0, 0, 0.0, "RuntimeError: left its plan").equal


@pytest.mark.slow
def test_peaks_and_times_are_measured_beside_the_predicted_ones(rows):
    found = rows("peaks", "overhead")
    (dense,) = found[Dense]
    assert dense.recorded_bytes > 0
    assert dense.seconds > 0
    assert [row.asked for row in found[Planned]] == list(peaks.SHARES)
    assert {row.way for row in found[Overhead]} >= {"plain", "a session, nothing planned", "tape, everything kept"}
    assert [row.trouble for row in found[Overhead] if row.trouble] == []


@pytest.mark.slow
def test_moved_tensors_and_states_are_the_plain_ones(rows, monkeypatch):
    monkeypatch.setattr(offload, "TINY", {"GPT": partial(cases.words, 1, 64, 2, 16)})
    found = rows("offload")
    assert len(found[Rates]) == 1
    assert {row.net for row in found[Moved]} == {"GPT", "200 random lengths", "AdamW"}
    assert not any(row.differing for row in found[Moved])


def test_a_trainer_under_a_cap_is_a_gpus(rows):
    assert rows("fits") == {}


def test_tables_count_steps_and_show_ends(tmp_path):
    steps = [Battery("net", "tf32", way, 8, other, 0.0, 0, 0.0, trouble) for way, other, trouble in (
        ("sqrt", 0, ""), ("auto", 2, ""), ("session", 0, "InfeasibleBudgetError: no plan"),
    )]  # fmt: skip
    runs = [Fit("net", "memory_budget", 8, 4, foretold, ended) for foretold, ended in ((True, True), (False, False))]
    path = tmp_path / "gpu.json"
    write_figures(path, battery=steps, fits=runs)
    shown = [gpu.BENCHMARK.table(path.read_text(), name) for name in ("battery", "fits")]
    assert "| net | tf32 | 2 | 1 |" in shown[0]
    assert "| net, memory_budget | 4, foretold | all steps ran | 0.00 | 0.00 |" in shown[1]
    assert "| net, memory_budget | 4 | out of memory | 0.00 | 0.00 |" in shown[1]


def test_times_of_all_kernels_are_a_gpus():
    assert cases.kernel_seconds(torch.nn.Linear(1, 1), lambda: None) == 0.0
