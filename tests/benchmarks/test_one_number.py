"""The shortest line on trained networks: peaks of a fit, and the table."""

import pytest
import torch
from torch import nn

from benchmarks.harness import write_figures
from benchmarks.one_number import BENCHMARK, MIB, Row, trained_for
from benchmarks.steps import AdamStep
from benchmarks.trained_nets import Net


def test_the_table_says_what_the_shortest_line_does_and_where_it_is_refused(tmp_path):
    row = Row("R", 0.8, 10 * MIB, 8 * MIB, 8 * MIB, 99.5)
    rows = [
        Row("R", 0.8, 10 * MIB, 8 * MIB, 8 * MIB, 99.5, 99.5, 1.034, "dense", 3.0, 1.1),
        Row("R", 0.5, 10 * MIB, 5 * MIB, 6 * MIB, 99.5, 99.36, 0.9, "33% of the seconds", 12.4),
        Row("R", 0.4, 10 * MIB, 4 * MIB, 4 * MIB, 99.5, 99.5, 1.5, "in parts"),
        Row("R", 0.3, 10 * MIB, 3 * MIB, 4 * MIB, 99.5),
    ]
    write_figures(tmp_path / "one_number.json", rows=rows)
    lines = BENCHMARK.table((tmp_path / "one_number.json").read_text(), "table").splitlines()
    cells = "x1.03 | x0.90, 33% of the seconds, -0.14, **peak 0.600** | x1.50, in parts | no: 0.40"
    assert lines[2:-2] == [f"| R | 10.0 MiB, 99.5 | {cells} | 12 s |"]
    assert row.score is None


def test_a_fits_peak_is_that_of_its_batches():
    torch.manual_seed(0)
    batches = [(torch.randn(64, 32), torch.randint(4, (64,))) for _ in range(6)]
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 4))
    net = Net("mlp", model, batches, batches, lambda x: x, 0.1)
    module, peak_bytes = trained_for(net, batches, [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), module.model.parameters(), strict=True))
    way = AdamStep("dense", module.model, batches[0], net.loss)
    # Lightning's zero_grad comes after the forward, AdamStep's before it
    assert way.peak_bytes() == pytest.approx(peak_bytes, rel=0.25)
