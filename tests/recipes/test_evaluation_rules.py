"""Rules of the evaluation: who beats whom, and that the committed figures and the page keep to them."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from ctdr_recipes.evaluation.blocks import checkpoints_of
from ctdr_recipes.evaluation.nets import FULL
from ctdr_recipes.evaluation.predicted import Variant
from ctdr_recipes.evaluation.rows import Row
from ctdr_recipes.evaluation.tables import PARTS, Evaluation
from ctdr_recipes.evaluation.techniques import (
    BUDGET_SHARE,
    CTDR,
    DECOMPOSED,
    DENSE,
    EXACT,
    LIMITS,
    OFFLOADED,
    RECOMPUTED,
    TECHNIQUES,
    fastest,
    movers,
    on_meta,
    with_link,
)
from ctdr_recipes.evaluation.verdicts import (
    LOSES,
    NEITHER,
    OURS,
    TIES,
    WINS,
    by_net,
    compared,
    keeps_promise,
    rivals_of,
    tally,
)
from tests.memory.graphs import Node, graph_trace

ROOT = Path(__file__).parents[2]
COMMITTED = Evaluation.from_json((ROOT / "docs" / "data" / "evaluation.json").read_text())
ROW = Row("net", EXACT, "predicted", 8, 100, 450, 1.0, True)
WITHOUT = replace(ROW, technique=OFFLOADED, fits=False, peak_bytes=900)


@pytest.mark.parametrize(
    ("ours", "other", "word"),
    [
        (ROW, WITHOUT, WINS),
        (WITHOUT, ROW, LOSES),
        (WITHOUT, WITHOUT, NEITHER),
        (replace(WITHOUT, seconds=0.1), replace(WITHOUT, seconds=9.0), NEITHER),  # a step that does not fit has no time
        (ROW, ROW, TIES),  # one plan for both
        (ROW, replace(ROW, seconds=1.019), TIES),
        (replace(ROW, seconds=1.019), ROW, TIES),
        (ROW, replace(ROW, seconds=1.03), WINS),
        (replace(ROW, seconds=1.03), ROW, LOSES),
        (replace(ROW, peak_bytes=100), ROW, TIES),  # bytes below the limit win nothing
    ],
)
def test_a_technique_wins_by_fitting_or_by_more_than_two_percent_of_time(ours, other, word):
    assert compared(ours, other) == word


def test_the_promise_has_both_of_its_limits():
    dense = replace(ROW, technique=DENSE, fits=False)
    assert keeps_promise(ROW, dense)
    assert not keeps_promise(replace(ROW, fits=False), dense)
    assert not keeps_promise(replace(ROW, seconds=1.001), dense)
    assert not keeps_promise(replace(ROW, limit=0.6), dense)


def test_wins_are_counted_over_networks_and_limits():
    rows = [replace(ROW, limit=limit) for limit in LIMITS] + [replace(WITHOUT, limit=limit) for limit in LIMITS[:3]]
    assert tally(rows, EXACT, OFFLOADED, LIMITS) == Counter({WINS: 3})
    assert tally(rows, OFFLOADED, EXACT, LIMITS[:1]) == Counter({LOSES: 1})


def test_the_rivals_of_an_exact_technique_are_exact():
    assert DECOMPOSED not in rivals_of(EXACT, TECHNIQUES)
    assert set(rivals_of(CTDR, TECHNIQUES)) == {*TECHNIQUES} - {DENSE, CTDR}


def test_offloading_is_asked_of_all_policies_that_move_and_never_recompute():
    assert {"vdnn", "vdnn_plus", "tflms", "sentinel", "autotm", "swapadvisor", "flashneuron"} <= set(movers())
    assert not {"auto", "capuchin", "superneurons", "pofo", "gist", "keep"} & set(movers())
    assert not with_link(graph_trace([Node((), 10)]), "a100").codecs, "a mover could round where it has codecs"


@pytest.mark.slow
def test_of_several_policies_the_fastest_plan_that_fits_is_taken():
    of = Variant(nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]),
                 replace(FULL["LeNet"], batch=lambda size, device: torch.empty(size, 64, device=device),
                         step=lambda model, x: model(x).square().mean(), size=4096), "a100", "tf32")  # fmt: skip
    step = of.plain(4096)[1]
    limit = int(0.9 * step.plain_peak_bytes)
    found = fastest(step, limit, ("sqrt", "auto"))
    assert found.fits
    assert found.plan.seconds == min(fastest(step, limit, (name,)).plan.seconds for name in ("sqrt", "auto"))
    none = fastest(step, 1, ("auto", "sqrt"))
    assert not none.fits
    assert none.plan.peak_bytes < step.plain_peak_bytes


@pytest.mark.parametrize(("name", "kind"), [("GPT-2", "GPT2Block"), ("ResNet-50", "Bottleneck")])
def test_blocks_are_the_classes_that_repeat(name, kind):
    words = [way.words for way in checkpoints_of(on_meta(FULL[name].build))]
    whole = [word for word in words if word.endswith(kind)]
    assert len(whole) == 4  # a quarter to all
    assert len({word.split()[0] for word in whole}) == 4


def test_a_network_without_blocks_is_checkpointed_in_segments():
    ways = checkpoints_of(on_meta(FULL["VGG-16"].build))
    assert [len(way.starts) for way in ways] == [2, 3, 4, 6, 8]
    assert {way.modules for way in ways} == {("features",)}
    chain = on_meta(FULL["VGG-16"].build).features
    assert not any(getattr(chain[start], "inplace", False) for way in ways for start in way.starts)


def test_a_checkpointed_step_needs_less_and_gives_the_same_gradients():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())

        def forward(self, x):
            return x + self.layers(x)

    net = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(512, 32)

    def gradients(step):
        net.zero_grad()
        step(net, x).backward()
        return [p.grad.clone() for p in net.parameters()]

    def loss(model, batch):
        return model(batch).square().mean()

    ways = checkpoints_of(net)
    assert [way.words for way in ways] == [f"{n} of 4 Block" for n in (1, 2, 3, 4)]
    for way in ways:
        assert all(torch.equal(a, b) for a, b in zip(gradients(loss), gradients(way.step(loss)), strict=True))
        assert not any("forward" in vars(module) for module in net.modules())
    of = Variant(net, replace(FULL["LeNet"], batch=lambda size, device: torch.empty(size, 32, device=device),
                              step=loss, size=512), "a100", "tf32")  # fmt: skip
    peaks = [step.plain_peak_bytes for _, step in of.checkpointed]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < of.plain(512)[1].plain_peak_bytes


def test_committed_rows_fit_as_they_say_and_each_is_its_own():
    dense = {(row.net, row.source): row for row in COMMITTED.rows if row.technique == DENSE}
    keys = [(row.net, row.source, row.technique, row.limit) for row in COMMITTED.rows]
    assert len(keys) == len(set(keys))
    for row in COMMITTED.rows:
        limit_bytes = int(row.limit * dense[row.net, row.source].peak_bytes)
        assert row.fits == (row.peak_bytes <= limit_bytes), row
    assert len({row.net for row in COMMITTED.of("predicted")}) == 9
    batches = [(row.net, row.technique) for row in COMMITTED.batches]
    assert len(batches) == len(set(batches))


def test_a_time_is_no_shorter_where_the_limit_is_lower():
    for technique in (OFFLOADED, RECOMPUTED, EXACT, CTDR):
        for net in FULL:
            rows = [r for r in COMMITTED.of("predicted") if (r.net, r.technique) == (net, technique) and r.fits]
            times = [row.seconds for row in sorted(rows, key=lambda row: -row.limit)]
            assert all(later >= 0.98 * sooner for sooner, later in pairwise(times)), (net, technique)


@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_no_tie_of_the_committed_tables_is_called_a_win(source):
    text = PARTS[f"{source}_verdicts"](COMMITTED)
    rows = COMMITTED.of(source)
    known = {row.technique for row in rows}
    for ours in (name for name in OURS if name in known):
        table = text[text.index(f"| {ours} against") :].split("\n\n")[0].splitlines()
        rivals = [cell.strip() for cell in table[0].strip("|").split("|")][1:]
        for line in table[2:]:
            net, *words = (cell.strip().strip("*") for cell in line.strip("|").split("|"))
            of = by_net(rows)[net]
            for rival, word in zip(rivals_of(ours, known), words, strict=False):
                assert rival in rivals
                same = (of[ours].peak_bytes, of[ours].seconds) == (of[rival].peak_bytes, of[rival].seconds)
                assert word == compared(of[ours], of[rival])
                assert word in (TIES, NEITHER) or not same


def test_the_page_shows_the_figures():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    for part, made in PARTS.items():
        assert f"<!-- from docs/data/evaluation.json: {part} -->\n\n{made(COMMITTED)}\n<!-- end -->" in page
    assert f"{BUDGET_SHARE:.0%}" in PARTS["summary"](COMMITTED)
