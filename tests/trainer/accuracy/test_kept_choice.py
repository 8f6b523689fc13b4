"""A choice for a budget is kept in the run's folder, and the next run takes it from there."""

import json
import shutil

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from ctdr_lightning import CTDRCallback
from ctdr_lightning.joint.search import JointSearch
from ctdr_lightning.trainer.accuracy import kept_choice
from tests import parts
from tests.in_turn import in_turn

BUDGET = 800_000  # below every plan of the dense model


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The choice of a first run, its model and its folder."""
    folder = tmp_path_factory.mktemp("first")
    return (*fit(folder), folder)


@pytest.fixture
def first(first_run, tmp_path):
    """The same; its files are in ``tmp_path``."""
    shutil.copytree(first_run[2], tmp_path, dirs_exist_ok=True)
    return first_run[:2]


@pytest.fixture
def searches(monkeypatch):
    """One entry for each search."""
    runs, run = [], JointSearch.run
    monkeypatch.setattr(JointSearch, "run", lambda self: runs.append(self) or run(self))
    return runs


def fit(folder, budget=BUDGET, seed=0, verbose=False, **options):
    made, net = CTDRCallback(budget, rank="auto", max_slowdown=50.0, verbose=verbose), parts.blobs(seed, width=32)
    torch.manual_seed(0)
    given = {"max_epochs": 1, "limit_train_batches": 2, "logger": CSVLogger(folder), **options}
    parts.fit(net, made, **given)
    return made.fit, net


def files(folder):
    return sorted((folder / "ctdr_choices").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [True, False])
def test_the_same_question_is_answered_without_a_search(tmp_path, first, searches, caplog, verbose):
    found, trained = first
    assert found.choices.factorized
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        second, again = fit(tmp_path, verbose=verbose)
    assert not searches
    assert second.choices.to_dict() == found.choices.to_dict()
    assert second.considered == found.considered
    assert second.peak_bytes <= BUDGET
    assert parts.same(trained.state_dict(), again.state_dict())
    (kept,) = files(tmp_path)
    said = f"CTDR: an earlier run chose this for the same model and budget:\n{kept} keeps it."
    assert (said in caplog.messages) is verbose


OTHERS = in_turn([{"budget": BUDGET + 1}, {"seed": 1}, {"gradient_clip_val": 1.0}], (), *[pytest.mark.exhaustive] * 2)


@pytest.mark.slow
@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_question_is_searched_for(tmp_path, searches, other):
    fit(tmp_path, **other)
    assert len(searches) == 1
    assert len(files(tmp_path)) == 2


@pytest.mark.slow
def test_a_choice_that_does_not_keep_the_limits_any_more_is_searched_for_anew(tmp_path, first, searches):
    (kept,) = files(tmp_path)
    plain, edited = (json.loads(kept.read_text()) for _ in range(2))
    for choice in edited["choices"]["layers"].values():  # dense again: no plan of that fits
        choice.update(method=None, ranks=[])
    kept.write_text(json.dumps(edited))
    second, _ = fit(tmp_path)
    assert len(searches) == 1
    assert second.choices.to_dict() == first[0].choices.to_dict()
    assert json.loads(kept.read_text())["choices"] == plain["choices"] != edited["choices"]


@pytest.mark.slow
@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("text", ["", '{"kind": "budget fit", "version": 99}'])
def test_a_file_that_cannot_be_read_is_written_anew(tmp_path, searches, text):
    (kept,) = files(tmp_path)
    good = kept.read_text()
    kept.write_text(text)
    fit(tmp_path)
    assert len(searches) == 1
    assert json.loads(kept.read_text())["choices"] == json.loads(good)["choices"]


@pytest.mark.slow
def test_a_run_that_leaves_no_files_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, logger=False)
    fit(tmp_path, fast_dev_run=True)
    fit(tmp_path, logger=False, enable_checkpointing=True, default_root_dir="memory://elsewhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_the_oldest_choices_go(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_choice, "_MOST_FILES", 1)
    before = files(tmp_path)
    fit(tmp_path, BUDGET + 1)
    assert len(files(tmp_path)) == 1
    assert files(tmp_path) != before
