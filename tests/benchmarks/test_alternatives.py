"""The benchmark of other ways to save memory: its words, and the ways measured on small nets."""

from functools import partial

import pytest

from benchmarks import alternatives
from benchmarks.alternatives import BLOCKS, COMPILED, CUT, EIGHT_BITS, EXACT, LORA, ON_LORA, PLAIN, SELECTIVE, SPLIT
from benchmarks.harness import write_figures

SMALL = {"GPT": partial(alternatives.gpt, 3, 64, 8, 64), "U-Net": partial(alternatives.unet, 4, 4, 32)}


@pytest.fixture
def small(monkeypatch):
    """The rows of a small net by way; nothing is compiled."""
    ways = {name: prepare for name, prepare in alternatives.WAYS.items() if not name.startswith(COMPILED)}
    monkeypatch.setattr(alternatives, "WAYS", ways)
    monkeypatch.setattr(alternatives, "NETS", SMALL)
    monkeypatch.setattr(alternatives, "find_spec", lambda name: None)

    def rows(name):
        return {row.way: row for row in alternatives.figures(nets=[name], rounds=1)}

    return rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ctdr_lightning.decomposition.report.LossyLayerWarning")
def test_ways_on_a_transformer_differ_as_they_say(small):
    rows = small("GPT")
    assert set(rows) == {
        PLAIN, BLOCKS, SELECTIVE, SPLIT, LORA, *map(EXACT.format, (BLOCKS, SELECTIVE)), ON_LORA, CUT
    }  # fmt: skip
    assert rows[PLAIN].peak == rows[PLAIN].slowdown == 1
    for other in (BLOCKS, SELECTIVE):
        ours = rows[EXACT.format(other)]
        assert ours.peak <= rows[other].peak < 1
        assert ours.training == rows[other].training == "bit-equal"
    assert rows[SPLIT].training == "equal up to rounding"
    assert {rows[way].training for way in (LORA, ON_LORA, CUT)} == {"other training"}
    assert rows[ON_LORA].peak < rows[LORA].peak < 1
    assert rows[CUT].peak < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ctdr_lightning.decomposition.report.LossyLayerWarning")
def test_running_averages_advance_once_under_a_plan_and_twice_under_a_checkpoint(small):
    rows = small("U-Net")
    assert LORA not in rows
    assert rows[EXACT.format(BLOCKS)].training == "bit-equal"
    assert rows[BLOCKS].training == "bit-equal, but other running averages"
    assert rows[SPLIT].training == "other training"  # each part has a mean and a variance of its own


@pytest.mark.exhaustive
def test_a_compiled_step_is_the_plain_one_up_to_rounding(small, monkeypatch):
    ways = {PLAIN: alternatives.WAYS[PLAIN], **{name: alternatives.WAYS[name] for name in (BLOCKS, SELECTIVE, LORA)}}
    setting = partial(alternatives.compiled, activation_memory_budget=0.5)
    monkeypatch.setattr(alternatives, "WAYS", {**ways, COMPILED: alternatives.compiled, "half": setting})
    rows = small("GPT")
    assert rows[COMPILED].training == rows["half"].training == "equal up to rounding"
    assert rows["half"].peak < rows[COMPILED].peak


def row(way, peak, slowdown, gradients=0.0, weights=True, buffers=True, setup_s=0.0):
    return alternatives.Row("GPT", way, 2**27, peak, slowdown, gradients, 1e-7, weights, buffers, setup_s)


def test_each_kind_of_training_has_its_words(tmp_path):
    rows = [
        row(PLAIN, 1.0, 1.0),
        row(BLOCKS, 0.5, 1.25, buffers=False),
        row(f"{COMPILED}, setting 0.5", 0.7, 0.9, 3e-7, False, setup_s=31.4),
        row(SPLIT, 0.4, 1.1, 0.07, False),
        row(EIGHT_BITS, 0.8, 1.1, weights=False),
        row(LORA, 0.75, 1.0, None, False),
    ]
    write_figures(tmp_path / "figures.json", rows=rows)
    lines = alternatives.BENCHMARK.table((tmp_path / "figures.json").read_text(), "table").splitlines()
    assert lines[2:-2] == [
        "| GPT: plain | 1.00 | x1.00 |  |  | 0 s |",
        "| GPT: checkpoint of each block | 0.50 | x1.25 | bit-equal, but other running averages | each block's call | "
        "0 s |",
        "| GPT: torch.compile, setting 0.5 | 0.70 | x0.90 | equal up to rounding | "
        "one line; a private setting of torch | 31 s |",
        "| GPT: 4 smaller batches | 0.40 | x1.10 | other training | the loader's batch, one argument of `Trainer` | "
        "0 s |",
        "| GPT: 8-bit Adam | 0.80 | x1.10 | bit-equal, but other updates | the optimizer | 0 s |",
        "| GPT: LoRA, rank 8 | 0.75 | x1.00 | other training | linear layers; checkpoints hold adapters | 0 s |",
    ]


def test_a_tie_and_the_better_of_two_are_called_so(tmp_path):
    blocks, selective = (EXACT.format(other) for other in (BLOCKS, SELECTIVE))
    rows = [row(PLAIN, 1.0, 1.0), row(BLOCKS, 0.5, 1.2), row(SELECTIVE, 0.8, 1.05), row(LORA, 0.4, 0.9, None, False)]
    ours = [row(blocks, 0.5, 1.22), row(selective, 0.8, 1.2)]
    write_figures(tmp_path / "figures.json", rows=[*rows, *ours])
    text = (tmp_path / "figures.json").read_text()
    assert alternatives.BENCHMARK.table(text, "outcomes") == (
        "* GPT, 128 MiB. Time of CTDR at equal peaks: x1.22 against x1.20 of the checkpoint of each block, a tie; "
        "x1.20 against x1.05 of the selective checkpoint, the selective checkpoint is faster.\n"
        "  Smallest peak: LoRA, rank 8 (0.40); with the plain training: checkpoint of each block (0.50).\n"
        "  Shortest step: LoRA, rank 8 (x0.90).\n"
    )
    write_figures(tmp_path / "figures.json", rows=[*rows, row(blocks, 0.6, 1.1), row(selective, 0.8, 0.9)])
    told = alternatives.BENCHMARK.table((tmp_path / "figures.json").read_text(), "outcomes")
    assert "no plan reaches the 0.50 of the checkpoint of each block, the least 0.60; x0.90 against x1.05" in told
    assert "of the selective checkpoint, CTDR is faster." in told


def test_a_way_that_saves_nothing_is_called_so():
    theirs, ours = row(BLOCKS, 1.0, 1.3), row(EXACT.format(BLOCKS), 1.0, 1.0)
    assert alternatives._verdict(ours, theirs).endswith(
        "x1.30 of the checkpoint of each block, which saves nothing here"
    )
