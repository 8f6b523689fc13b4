"""CTDR without one of its means: what is left out is left out, and the committed figures bear out their page."""

import pytest
import torch
from torch import nn

from benchmarks.ablation import (
    BENCHMARK,
    CODECS,
    FIXED,
    HOST,
    LEFT_OUT,
    MEANS,
    METHODS,
    OUTPUTS,
    RANKS,
    RECOMPUTATION,
    SURFACE,
    TILES,
    Cell,
    Lab,
)
from benchmarks.drawings import DATA, draw_surface
from benchmarks.harness import Figures, write_figures
from ctdr_recipes.evaluation.nets import FULL, Net
from ctdr_recipes.evaluation.techniques import CHECKPOINTED
from tests.benchmarks.test_drawings import texts

PUBLISHED = tuple(FULL)


@pytest.fixture(scope="module")
def committed():
    return Figures((DATA / "ablation.json").read_text(), BENCHMARK.parts).rows(Cell)


def perceptron():
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)))


@pytest.fixture(scope="module")
def lab():
    """Eight layers whose activations are most of the bytes."""
    net = Net(perceptron, lambda size, device: torch.randn(size, 512, device=device), loss, 8192, "512")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FULL, "MLP", net)
        yield Lab("MLP", 0.5)


def loss(net, batch):
    return net(batch).square().mean()


@pytest.mark.slow
def test_a_means_that_is_left_out_is_not_used(lab):
    dense, cut = lab.variant(1.0), lab.variant(0.25)
    found = {
        what: lab.cell(MEANS, dense if what == RANKS else cut, what, 0.25, 0.6)
        for what in ("", RANKS, RECOMPUTATION, HOST)
    }
    assert all(row.fits for row in found.values())
    assert found[RANKS].parameters > found[""].parameters
    assert "recomputes" in found[HOST].does
    assert "recomputes" not in found[RECOMPUTATION].does
    assert "moves" in found[RECOMPUTATION].does
    assert "moves" not in found[HOST].does


def test_tiles_are_left_out():
    lenet = Lab("LeNet", 0.5)
    cut = lenet.variant(0.25)
    whole, without = (lenet.cell(MEANS, cut, what, 0.25, 0.45) for what in ("", TILES))
    assert "tiles" in whole.does
    assert whole.fits
    assert "tiles" not in without.does
    assert not without.fits


def test_fixed_plans_and_methods_are_those_that_are_named(lab):
    cut = lab.variant(0.25)
    sqrt, blocks = (lab.cell(FIXED, cut, what, 0.25, 0.6) for what in ("sqrt", CHECKPOINTED))
    assert sqrt.does.startswith("sqrt")
    assert "segments" in blocks.does
    assert lab.variant(0.25, "tt").parameters != cut.parameters


def test_the_committed_figures_are_whole(committed):
    at = {(row.part, row.net, row.what, row.limit) for row in committed}
    assert {(MEANS, net, what, limit) for net in PUBLISHED for what in LEFT_OUT for limit in (0.45, 0.3)} <= at
    for part, columns in ((FIXED, ("auto", "sqrt", CHECKPOINTED)), (METHODS, ("tucker", "spatial", "svd", "cp", "tt"))):
        assert {(part, net, what, 0.45) for net in PUBLISHED for what in columns} <= at


def test_no_means_but_ranks_costs_time_or_room(committed):
    """A plan of fewer means is one that all means could have made; ranks alone may be slower, in LeNet's kernels."""
    means = {(row.net, row.limit, row.what): row for row in committed if row.part == MEANS}
    for (net, limit, what), row in means.items():
        whole = means[net, limit, ""]
        if what != RANKS and row.fits:
            assert whole.fits, (net, limit, what)
            assert whole.slowdown <= 1.01 * row.slowdown, (net, limit, what)


def test_the_page_says_what_the_figures_do(committed):
    means = {(row.net, row.limit, row.what): row for row in committed if row.part == MEANS}

    def without(what, limit):
        """By network the time over that of all means; None where the step does not fit without this one."""
        rows = {net: (means[net, limit, ""], means[net, limit, what]) for net in PUBLISHED}
        return {net: row.slowdown / whole.slowdown if row.fits else None for net, (whole, row) in rows.items()}

    linear, logits = {"LeNet", "AlexNet", "VGG-16"}, {"BERT-base", "GPT-2"}
    assert all(row.fits for (_, _, what), row in means.items() if not what)
    for limit, cut_only in ((0.45, {"AlexNet"}), (0.3, {"AlexNet", "VGG-16"})):
        ranks, tiles, outputs = (without(what, limit) for what in (RANKS, TILES, OUTPUTS))
        assert {net for net, times in ranks.items() if times is None} == cut_only
        assert 0.74 < ranks.pop("LeNet") < 0.76
        assert all(1.13 < times < 2.7 for times in ranks.values() if times)
        assert {net for net, times in tiles.items() if times is None} == linear
        assert {net for net, times in outputs.items() if times is None} == (logits if limit == 0.3 else set())
        assert all(0.99 < outputs[net] < 1.01 for net in PUBLISHED if net not in logits)
        assert all(0.99 < times < 1.01 for times in without(CODECS, limit).values())
        assert all(0.99 < times < 1.035 for times in without(HOST, limit).values())
        moved = [means[net, limit, RECOMPUTATION] for net in PUBLISHED if net not in linear]
        assert all(row.fits and 2.0 < row.slowdown < 8.8 for row in moved)
    assert {round(without(OUTPUTS, 0.45)[net], 2) for net in logits} <= {1.06, 1.07}


def test_the_surface_is_drawn(tmp_path):
    cells = [
        Cell("GPT-2", SURFACE, "", share, 2.0, limit, 10, limit > 0.5, limit, share + limit, "")
        for share in (1.0, 0.5)
        for limit in (0.6, 0.3)
    ]
    write_figures(tmp_path / "ablation.json", rows=cells)
    draw_surface(tmp_path / "surface.svg", tmp_path / "ablation.json")
    assert {"GPT-2, batch x2", "x1.60", "x1.10", "-"} <= set(texts(tmp_path / "surface.svg"))
