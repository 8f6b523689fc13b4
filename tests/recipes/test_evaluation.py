"""The evaluation on its smallest network: predicted, measured, written, read again."""

import json
from datetime import date

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.units import MIB
from ctdr_lightning.joint.twins import structure_of
from ctdr_recipes.evaluate import main
from ctdr_recipes.evaluation.learned import TASKS, Task, learn
from ctdr_recipes.evaluation.measured import MEASURED
from ctdr_recipes.evaluation.nets import FAMILIES, FULL, SMALL, Net
from ctdr_recipes.evaluation.predicted import WAYS, Variant, largest_batch
from ctdr_recipes.evaluation.tables import Evaluation, as_markdown
from ctdr_recipes.evaluation.techniques import (
    CTDR,
    DECOMPOSED,
    DENSE,
    LIMITS,
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


@pytest.mark.slow
def test_each_technique_has_a_row_of_each_kind(lenet):
    found = Evaluation.from_json((lenet / "evaluation.json").read_text())
    assert [(row.technique, row.limit) for row in found.of("predicted")] == [
        (technique, limit) for technique in TECHNIQUES for limit in LIMITS
    ]
    assert tuple(row.technique for row in found.of("measured")) == MEASURED
    assert tuple(row.technique for row in found.batches) == TECHNIQUES
    assert Evaluation.from_json(found.to_json()) == found


@pytest.mark.slow
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


def test_the_largest_batch_of_each_technique_is_of_its_own_step(lenet):
    found = {row.technique: row for row in Evaluation.from_json((lenet / "evaluation.json").read_text()).batches}
    assert found[DENSE].batch_size == FULL["LeNet"].size  # the dense step at the dense step's peak
    for technique in (RECOMPUTED, OFFLOADED):  # no plan is lower
        assert 0.96 <= found[technique].batch_size / FULL["LeNet"].size <= 1
    assert 0.9 < found[DECOMPOSED].batch_size / FULL["LeNet"].size < 1.1
    assert all(row.seconds > 0 for row in found.values())


@pytest.mark.slow
def test_the_plan_of_a_largest_batch_fits_and_recomputation_makes_room():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = Net(lambda: nn.Sequential(*layers), lambda size, device: torch.randn(size, 64, device=device),
              lambda model, x: model(x).square().mean(), 512, "64")  # fmt: skip
    of = {DENSE: Variant(on_meta(net.build), net, "a100", "tf32")}
    limit = of[DENSE].plain(net.size)[1].plain_peak_bytes
    found = {technique: largest_batch("chain", net, of, technique) for technique in (DENSE, RECOMPUTED, OFFLOADED)}
    assert found[DENSE].batch_size == net.size
    for technique in (RECOMPUTED, OFFLOADED):
        size = found[technique].batch_size
        assert size > 1.2 * net.size
        assert WAYS[technique](of[DENSE], size, limit).plan.peak_bytes <= limit


def test_the_files_are_written(lenet):
    assert {path.name for path in lenet.iterdir()} == {f"evaluation.{end}" for end in ("json", "csv", "md", "png")}
    text = (lenet / "evaluation.md").read_text()
    assert "(predicted)" in text
    assert "(measured)" in text
    assert "| LeNet | 4096 |" in text
    assert f"* measured on {date.today().isoformat()}: LeNet\n" in text
    assert len((lenet / "evaluation.csv").read_text().splitlines()) == 1 + len(TECHNIQUES) * len(LIMITS) + len(MEASURED)


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


@pytest.mark.slow
def test_the_data_of_the_tasks_comes_with_packages(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    for task in TASKS.values():
        train, held = task.data()
        assert len(train) > 3 * len(held) > 100


def test_a_document_names_the_limit_that_is_not_kept(lenet):
    data = json.loads((lenet / "evaluation.json").read_text())
    (dense, *_), others = [row for row in data["rows"] if row["technique"] == DENSE], data["rows"]
    words = {"no plan": (False, 1.0), "slower": (True, 2.0), "kept": (True, 0.5)}
    for word, (fits, time) in words.items():
        for row in (row for row in others if row["technique"] == CTDR):
            row.update(fits=fits, seconds=time * dense["seconds"])
        text = as_markdown(Evaluation.from_json(json.dumps(data)))
        line = next(line for line in text[text.index(f"| {CTDR} against") :].splitlines() if line.startswith("| LeNet"))
        assert word in line.split(" | ")[-1]
