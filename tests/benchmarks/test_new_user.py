"""A new user's jobs: their fits repeat to the bit, and the tables say what became of a budget."""

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.harness import write_figures
from benchmarks.new_user import BENCHMARK, JOBS, MIB, Row, fitted, measured
from benchmarks.user_jobs import GPT, Job
from ctdr_lightning import CTDRCallback


@pytest.fixture
def short(monkeypatch):
    """The GPT's job on a few random bytes."""
    pieces = torch.randint(256, (40, 65), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(pieces[8:]), TensorDataset(pieces[:8])
    job = Job(lambda: GPT(width=16, depth=1), lambda: data, size=4, epochs=2, accumulate=2)
    monkeypatch.setitem(JOBS, "GPT", job)
    return job


@pytest.mark.slow
def test_a_fit_under_an_exact_plan_ends_as_the_dense_fit(short):
    dense = fitted(short, 2)
    row = measured("GPT", 2, 0.95, dense)
    assert row.model == "dense"
    assert row.same_weights
    assert row.metric == row.dense_metric == dense.metric
    assert row.peak_bytes <= row.budget_bytes
    assert row.verdict == "yes"


def test_other_weights_are_told(short):
    first, second = fitted(short, 2), fitted(short, 4)
    assert not first.ends_as(second)
    assert first.ends_as(fitted(short, 2, CTDRCallback(rank=None, memory_budget="1GiB")))


def test_the_tables_say_what_became_of_each_budget(tmp_path):
    known = (100 * MIB, 55 * MIB)
    rows = [
        Row("GPT", 4, 0.55, *known, 54 * MIB, 2.5, "dense", 2.5, True, 1.25, "yes"),
        Row("GPT", 8, 0.55, *known, 56 * MIB, 2.5, "in parts", 2.75, False, 1.5, "yes"),
        Row("U-Net", 1, 0.37, 100 * MIB, 37 * MIB, 40 * MIB, 0.5, "No plan fits."),
    ]
    write_figures(tmp_path / "new_user.json", rows=rows)
    text = (tmp_path / "new_user.json").read_text()
    jobs, accumulation = (BENCHMARK.table(text, name).splitlines()[2:-2] for name in ("jobs", "accumulation"))
    exact = "0.55 | 100.0 MiB | 2.5000 | all layers | 2.5000, equal | 0.982 | x1.25 | yes, said: yes"
    assert jobs == [
        f"| GPT | {exact} |",
        "| U-Net | 0.37 | 100.0 MiB | 0.5000 | refused, least 0.40 | | | | |",
    ]
    other = "0.55 | 100.0 MiB | 2.5000 | in parts | 2.7500, +0.2500 | 1.018 | x1.50 | no, said: yes"
    assert accumulation == [f"| 4 | {exact} |", f"| 8 | {other} |"]
