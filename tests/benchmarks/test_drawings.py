"""The documents' pictures show what the code does: its layers, its account, and committed figures."""

import json
import re

import pytest
from torch import nn

from benchmarks import accuracy_curve, card_memory, screenshots
from benchmarks.drawings import DATA, PICTURES, ROOT, ROWS, chain, draw_accuracy, draw_cards, draw_decompositions
from benchmarks.harness import write_figures
from ctdr_lightning.decomposition import METHODS


def texts(path):
    return re.findall(r"<!-- (.*?) -->", path.read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method or "dense")
def test_a_drawn_chain_has_the_ranks_between_its_layers(row):
    layers = chain(row)
    ranks = row.ranks if isinstance(row.ranks, tuple) else (row.ranks,) * (len(layers) - 1)
    assert tuple(getattr(x, "out_channels", None) or x.out_features for x in layers[:-1]) == ranks
    assert len(row.letters.split()) == len(layers) - 1


def test_every_method_of_a_convolution_is_drawn_with_its_weights(tmp_path):
    of_linear_layers = {"tt_linear"}
    assert set(METHODS) - of_linear_layers == {row.method for row in ROWS} - {""}
    draw_decompositions(tmp_path / "drawn.svg")
    assert {"tucker", "a = 16", "b = 32", "9,728 (13%)", "1 x 3", "73,728"} <= set(texts(tmp_path / "drawn.svg"))


@pytest.fixture(scope="module")
def uses():
    network = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))
    return card_memory.uses(network, (64,), 256)


def test_the_parts_of_a_card_are_those_of_the_step(uses):
    weights = 4 * (64 * 512 + 512 + 512 * 512 + 512 + 512 * 8 + 8)
    for use in uses:
        assert (use.weights, use.optimizer // weights) == (weights, 2)
        assert 0 <= use.temporaries < use.activations
        assert use.allocator > 0
    assert uses[0].activations >= 4 * 256 * (64 + 4 * 512)  # the batch, both layers' outputs and their GELUs
    assert uses[0].gradients == weights
    assert uses[1].budget_bytes == int(0.9 * uses[1].card.memory_bytes)


def test_accuracy_is_drawn_and_told_by_its_medians(tmp_path):
    rows = [accuracy_curve.Row(0.25, True, n, 0.26, 99.0, 90.0 + n, 95.0, [98.0] * 6) for n in range(3)]
    write_figures(tmp_path / "figures.json", rows=rows)
    told = accuracy_curve.BENCHMARK.table((tmp_path / "figures.json").read_text(), "table")
    assert "| `rank=0.25` | 99.00 | 91.00 | 95.00 | 98.00 |" in told
    draw_accuracy(tmp_path / "accuracy.svg")
    ways = {(row["share"], row["by_data"]) for row in json.loads((DATA / "accuracy_curve.json").read_text())["rows"]}
    assert ways == set(accuracy_curve.WAYS)
    assert {"rank=0.02", "rank=0.05, data=None", "epoch 6"} <= set(texts(tmp_path / "accuracy.svg"))


def test_batches_are_drawn_before_and_after(tmp_path):
    rows = [
        {"network": "ResNet-50", "device": "rtx4090", "plain_batch": 128, "batch": 800, "time_ratio": 1.09},
        {"network": "ViT-L/16", "device": "t4", "plain_batch": 0, "batch": 12},
    ]
    (tmp_path / "cards.json").write_text(json.dumps({"rows": rows}))
    draw_cards(tmp_path / "cards.svg", tmp_path / "cards.json")
    assert {" 128", " 800, time x1.09", " does not fit", " 12"} <= set(texts(tmp_path / "cards.svg"))


def test_the_screenshots_run_can_be_made_of_the_quickstart():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert [before for before in screenshots.CHANGES if page.count(before) == 0] == []


def test_every_committed_picture_can_be_drawn_again():
    shown = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    drawn = set(re.findall(r"img/([\w-]+)\.svg", shown))
    assert drawn <= set(PICTURES)
    shot = set(re.findall(r"img/report-(\w+)-\w+\.png", shown))
    assert shot == set(screenshots.SHOTS)
