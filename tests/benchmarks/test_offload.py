"""The benchmark of moving and compressing: its tables, and the rows of a small net."""

import pytest
import torch
from torch import nn

from benchmarks import offload
from benchmarks.harness import write_figures
from benchmarks.offload import BENCHMARK, BOTH, Row, codec_rows, disk_rows
from tests.benchmarks.figures_of_plans import figures


def small():
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), torch.randn(512, 64), lambda net, x: net(x).sum()


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(offload, "ROUNDS", 1)


def test_the_tables_of_figures(tmp_path):
    moved = figures(2**24, 2**23, (1.25, 1.1, 1.05), 2**25)
    disk = Row("BIG", BOTH, 0.5, resident_bytes=2**20, **moved)
    codecs = Row("ViT", "codecs alone", 0.0, resident_bytes=2**23, **figures(2**24, 3 * 2**22, (1.5, 1.4, 1.3)))
    write_figures(tmp_path / "offload.json", rows=[disk, Row("BIG", "auto", 0.25, fits=False), codecs])
    text = (tmp_path / "offload.json").read_text()
    assert BENCHMARK.table(text, "disk").splitlines()[2:4] == [
        "| BIG, 0.5 | auto, with a disk | 0.500 (0.500) | x1.250 | x1.100 | x1.050 | 32 MiB |",
        "| BIG, 0.25 | auto | none found |  |  |  |  |",
    ]
    assert (
        BENCHMARK.table(text, "codecs").splitlines()[2] == "| ViT | 0.500 | 0.750 (0.750) | x1.500 | x1.400 | x1.300 |"
    )


@pytest.mark.slow
def test_rows_of_a_disk_are_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(offload.DISK_NETS, "small", (small, (0.9, 0.01)))
    first, *_, last = list(disk_rows("small", tmp_path, n_rounds=1))
    assert first.equal
    assert 0 < first.peak_bytes < first.plain_bytes
    assert first.processor > 0
    assert not last.fits


def test_a_row_of_codecs_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(offload.CODEC_NETS, "small", small)
    (row,) = codec_rows("small", tmp_path, n_rounds=1)
    assert row.equal
    assert row.resident_bytes < row.peak_bytes < row.plain_bytes
