"""The opening table fits a console, whatever the names."""

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.trainer.reports.opening import WIDTH, clipped, opening_table, wrapped


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.a_rather_long_name_for_a_submodule = Deep(depth - 1) if depth else nn.Linear(256, 256)
        self.small = nn.Linear(2, 2)


@pytest.mark.parametrize("depth", [0, 3])
def test_every_line_fits_and_every_factorized_layer_has_one(depth):
    report = decompose(Deep(depth), 0.3)
    lines = opening_table(report).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert sum(row.method in line for row in report.factorized[:1] for line in lines) >= 1
    assert len([line for line in lines if " -> " in line]) == len(report.factorized) + 1
    assert lines[-1].startswith("1 layer stays dense: " if depth == 0 else "4 layers stay dense: ")


def test_how_near_the_outputs_are_is_told_where_it_was_measured():
    model, batches = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), [torch.randn(16, 64)] * 4
    assert "nats from dense" not in opening_table(decompose(model, 0.5))
    lines = opening_table(decompose(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), 0.5, data=batches))
    assert lines.splitlines()[-1].endswith(" nats from dense")


def test_a_model_without_dense_layers_says_nothing_of_them():
    assert "dense" not in opening_table(decompose(nn.Sequential(nn.Linear(256, 256)), 0.3))


def test_long_lines_are_cut_and_short_ones_are_not():
    assert clipped("x" * 101).endswith("…")
    assert clipped("x" * 100) == "x" * 100
    assert len(clipped(f"{'x' * 200}\nshort").splitlines()[0]) == WIDTH


def test_a_share_that_is_missed_names_what_stays():
    model = nn.Sequential(nn.Linear(256, 256), nn.Conv2d(256, 256, 3, groups=256))
    model.experts = nn.Parameter(torch.randn(2, 128, 128))
    lines = opening_table(decompose(model, 0.3)).splitlines()
    assert lines[-4].startswith("rank=0.3 was requested, but 53.9%")
    assert lines[-3] == "experts (2 x 128 x 128, 32.4% of the model) stays: no layer kind covers it"
    assert lines[-2].startswith("1.weight (256 x 1 x 3 x 3, 2.3% of the model) stays: depthwise")
    assert max(map(len, lines)) <= WIDTH


def test_reasons_are_short_enough_to_be_read():
    report = decompose(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), 0.3)
    assert "…" not in opening_table(report)


def test_long_texts_are_broken_between_words():
    text = wrapped(" ".join(["word"] * 50))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.split() == ["word"] * 50
