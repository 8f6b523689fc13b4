"""The demo in its short form: the figures that do not depend on the machine's speed."""

import sys
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from ctdr_lightning import Tape, decompose, plan, record, simulate
from ctdr_lightning.basics.units import parse_bytes
from ctdr_recipes import demo


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Run ``python -m ctdr_recipes.demo --short`` in this process; returns its folder and its rows."""
    folder = tmp_path_factory.mktemp("demo")
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["demo", "--short"])
        patch.setattr(demo, "FOLDER", folder)
        patch.setattr(demo, "table", lambda found: rows.update(found) or "")
        demo.main()
    return folder, rows


@pytest.mark.exhaustive
def test_ctdr_is_twice_smaller_and_takes_at_most_sixty_percent_of_the_memory(short):
    _, rows = short
    dense, ours = rows["dense"], rows["for 30 MiB"]
    assert dense.parameters >= 2 * ours.parameters
    assert ours.memory.peak_bytes <= 0.6 * dense.memory.peak_bytes


@pytest.mark.exhaustive
def test_the_budget_is_what_the_step_takes_at_most(short):
    _, rows = short
    options = demo.MEMORY["for 30 MiB"]
    assert 0.9 <= rows["for 30 MiB"].memory.peak_bytes / parse_bytes(options["memory_budget"]) <= 1


@pytest.mark.exhaustive
def test_decomposition_alone_takes_more_memory(short):
    _, rows = short
    assert rows["for 30 MiB"].memory.peak_bytes < rows["decomposed"].memory.peak_bytes


@pytest.mark.exhaustive
def test_the_network_learned(short):
    _, rows = short
    assert all(row.accuracy > 0.85 for row in rows.values())
    assert all(row.step_s > 0 for row in rows.values())


@pytest.mark.exhaustive
def test_the_picture_is_saved(short):
    folder, _ = short
    assert (folder / "memory.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_the_figures_are_kept(short):
    folder, rows = short
    kept = demo.from_json((folder / "demo.json").read_text())
    assert demo.to_json(kept) == demo.to_json(rows)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, demo.RANKS["decomposed"]])
def test_a_step_of_the_demos_net_is_bit_identical_under_its_plan(rank):
    images, labels = torch.randn(32, 1, 16, 16), torch.arange(32) % 10
    nets = [demo.cnn(demo.WIDTHS, demo.STRIDES)]
    if rank is not None:
        decompose(nets[0], rank, select=["!stem", "!head"])
    nets += [deepcopy(nets[0]), deepcopy(nets[0])]
    losses = [lambda net=net: F.cross_entropy(net(images), labels) for net in nets]
    losses[0]().backward()
    trace = record(losses[2])
    made = plan(trace, simulate(trace).peak_bytes * 3 // 4, policy="auto")
    with Tape(made):
        loss = losses[1]()
    loss.backward()
    assert not made.keeps_all
    for plain, planned in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(plain.grad, planned.grad)
    for plain, planned in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert torch.equal(plain, planned)


def test_table_and_summary_show_what_was_measured():
    use = demo.MemoryUse((0.0,), (80 << 20,))
    rows = {
        "dense": demo.Row(1000, 0.985, use, 0.2),
        "ours": demo.Row(250, 0.99, demo.MemoryUse((0.0,), (40 << 20,)), 0.1),
    }
    lines = demo.table(rows).splitlines()
    assert [lines[1].split()[i] for i in (0, 1, 2, 3, 5, 7)] == ["dense", "1,000", "98.50%", "80.0", "200.0", "320"]
    assert demo.summary(rows) == (
        "ours against dense: 4.0x fewer parameters, +0.50 points of accuracy, 50% of the peak, 50% of the step time"
    )
    assert demo.table(demo.from_json(demo.to_json(rows))) == demo.table(rows)
