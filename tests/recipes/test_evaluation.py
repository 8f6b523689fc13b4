"""The evaluation on its smallest network: predicted, measured, written, read again."""

import json
from datetime import date

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.units import MIB
from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import plan, record_fake, simulate
from ctdr_recipes.evaluate import main
from ctdr_recipes.evaluation.learned import TASKS, Task, learn
from ctdr_recipes.evaluation.nets import FAMILIES, FULL, SMALL, Net
from ctdr_recipes.evaluation.predicted import Row, largest_near, with_batches
from ctdr_recipes.evaluation.tables import Evaluation, as_markdown
from ctdr_recipes.evaluation.techniques import (
    CTDR,
    DECOMPOSED,
    DENSE,
    OFFLOADED,
    RECOMPUTED,
    TECHNIQUES,
    on_meta,
    shapes_at,
)


@pytest.fixture(scope="module")
def lenet(tmp_path_factory):
    """LeNet, predicted and measured, by the command line."""
    folder = tmp_path_factory.mktemp("evaluation")
    arguments = ["--nets", "LeNet", "--parts", "predicted", "batches", "measured", "--folder", str(folder)]
    main(arguments)
    before = (folder / "evaluation.json").read_bytes()
    main(arguments)  # nothing is done twice
    assert (folder / "evaluation.json").read_bytes() == before
    return folder


def test_each_technique_has_a_row_of_each_kind(lenet):
    found = Evaluation.from_json((lenet / "evaluation.json").read_text())
    assert [(row.source, row.technique) for row in found.rows] == [
        (source, technique) for source in ("predicted", "measured") for technique in TECHNIQUES
    ]
    assert Evaluation.from_json(found.to_json()) == found


def test_decomposed_rows_are_smaller_and_peaks_are_peaks(lenet):
    rows = {
        (row.source, row.technique): row for row in Evaluation.from_json((lenet / "evaluation.json").read_text()).rows
    }
    for source in ("predicted", "measured"):
        dense, small = rows[source, DENSE], rows[source, DECOMPOSED]
        assert small.parameters < 0.5 * dense.parameters
        assert rows[source, CTDR].parameters == small.parameters
        assert dense.peak_bytes > 4 * 4 * dense.parameters  # weights, gradients and Adam's two
        assert dense.seconds > 0
    assert rows["measured", DENSE].peak_bytes > MIB


def test_a_plan_that_keeps_everything_is_the_plain_step_and_takes_its_time(lenet):
    rows = [r for r in Evaluation.from_json((lenet / "evaluation.json").read_text()).rows if r.source == "measured"]
    found = {row.technique: (row.peak_bytes, row.seconds) for row in rows}
    assert found[RECOMPUTED] == found[DENSE]  # no plan fits LeNet, so that all is kept
    assert found[CTDR] == found[DECOMPOSED]


def test_the_largest_batches_are_found_for_all_but_offloading(lenet):
    rows = Evaluation.from_json((lenet / "evaluation.json").read_text()).rows
    found = {row.technique: row.largest_batch for row in rows if row.source == "predicted"}
    assert found[DENSE] == FULL["LeNet"].size
    assert [technique for technique in TECHNIQUES if not found[technique]] == [OFFLOADED]
    text = (lenet / "evaluation.md").read_text()
    assert "| LeNet | 4096 (x1.0) |" in text
    assert "CTDR's batch is at least 2.5 times the dense one on 0 of 1 networks." in text


@pytest.mark.parametrize("guess", [1, 422, 545, 551, 552, 560, 700, 3000])
def test_the_largest_batch_is_looked_for_up_and_down_in_ten_plans(guess):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= 551

    found = largest_near(guess, fits)
    assert fits(found)
    assert len(asked) <= 10 + 1
    assert len(set(asked[:-1])) == len(asked) - 1  # no batch is planned twice
    if 400 <= guess <= 800:
        assert found >= 0.98 * 551


def test_where_no_batch_fits_it_is_none():
    assert largest_near(40, lambda _: False) == 0
    assert largest_near(1, lambda batch: batch < 2) == 1


def test_ctdr_may_leave_ranks_alone_so_that_no_single_technique_has_a_larger_batch(monkeypatch):
    found = {DECOMPOSED: 4000, RECOMPUTED: 5510, CTDR: 4220}
    monkeypatch.setattr("ctdr_recipes.evaluation.predicted._largest", lambda technique, *_: found[technique])
    rows = [Row("LeNet", name, "predicted", 4096, 1, 1, 1.0, True) for name in TECHNIQUES]
    batches = {row.technique: row.largest_batch for row in with_batches(rows, FULL["LeNet"], "a100")}
    assert batches == {**found, DENSE: 4096, OFFLOADED: 0, CTDR: 5510}


@pytest.mark.slow
def test_the_plan_of_a_largest_batch_fits_and_recomputation_makes_room():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = Net(lambda: nn.Sequential(*layers), lambda size, device: torch.randn(size, 64, device=device),
              lambda model, x: model(x).square().mean(), 512, "64")  # fmt: skip
    model = on_meta(net.build)
    n_parameters = sum(p.numel() for p in model.parameters())

    def traced(size):
        trace = record_fake(model, net.batch(size, "meta"), net.step, device="a100")
        return trace.with_static(2 * 4 * n_parameters)  # Adam's state

    limit = simulate(traced(net.size)).peak_bytes
    rows = [Row("chain", name, "predicted", net.size, n_parameters, limit, 1.0, True) for name in (DENSE, RECOMPUTED)]
    dense, ours = with_batches(rows, net, "a100")
    assert dense.largest_batch == net.size
    assert ours.largest_batch > 1.2 * net.size
    assert plan(traced(ours.largest_batch), limit).peak_bytes <= limit


def test_the_files_are_written(lenet):
    assert {path.name for path in lenet.iterdir()} == {f"evaluation.{end}" for end in ("json", "csv", "md", "png")}
    text = (lenet / "evaluation.md").read_text()
    assert "(predicted)" in text
    assert "(measured)" in text
    assert "* LeNet: " in text
    assert f"* measured on {date.today().isoformat()}: LeNet\n" in text
    assert len((lenet / "evaluation.csv").read_text().splitlines()) == 1 + 2 * len(TECHNIQUES)


def test_each_network_has_both_sizes_and_a_family():
    assert set(FULL) == set(SMALL) == {net for nets in FAMILIES.values() for net in nets}
    assert len(FULL) == 9


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_take_a_step(name):
    net = SMALL[name]
    model = net.build().train()
    loss = net.step(model, net.batch(2, "cpu"))
    loss.backward()
    assert torch.isfinite(loss)


def test_shapes_leave_the_share_that_is_asked_for():
    model = on_meta(SMALL["VGG-16"].build)
    twin = structure_of(model, shapes_at(model, 0.25))
    first, last = model.features[0], model.classifier[-1]
    fixed = sum(p.numel() for layer in (first, last) for p in layer.parameters())
    before, after = (sum(p.numel() for p in m.parameters()) - fixed for m in (model, twin))
    assert 0.2 < after / before <= 0.26


def test_accuracies_are_read_at_their_three_times():
    def data():
        x = torch.randn(320, 12, generator=torch.Generator().manual_seed(0))
        sets = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        return sets, sets

    task = Task(lambda: nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
                data, epochs=6, fine_epochs=2, lr=1e-2, rank=0.5)  # fmt: skip
    found = learn("signs", task, seeds=1)
    assert found.dense > 90
    assert found.tuned > 85
    assert 0 <= found.raw <= 100
    assert found.parameters_after < found.parameters_before


def test_the_data_of_the_tasks_comes_with_packages(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    for task in TASKS.values():
        train, held = task.data()
        assert len(train) > 3 * len(held) > 100


def test_a_document_tells_where_ctdr_does_not_reach_or_beat(lenet):
    data = json.loads((lenet / "evaluation.json").read_text())
    for row in data["rows"]:
        if row["technique"] == CTDR:
            row.update(fits=False, seconds=1e6, peak_bytes=2**40)
    text = as_markdown(Evaluation.from_json(json.dumps(data)))
    assert "promise **not kept** (no plan reaches 45%, slower than dense)" in text
    assert "**does not beat decomposition" in text
    for row in data["rows"]:
        if row["technique"] == CTDR:
            row.update(fits=True, seconds=1e-9, peak_bytes=1)
    text = as_markdown(Evaluation.from_json(json.dumps(data)))
    assert "promise kept; beats each single technique" in text
