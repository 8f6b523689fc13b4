"""The closing account says what is known, and nothing else."""

import logging
import re
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.basics.units import GIB, parse_bytes
from ctdr_lightning.memory.guide.events import OverBudget
from ctdr_lightning.recovery import Phase
from ctdr_lightning.recovery.decisions import Progress
from ctdr_lightning.trainer.reports.memory_report import PlanPeaks
from ctdr_lightning.trainer.reports.summary import RunFacts, closing_summary
from tests import parts


def test_what_is_not_known_is_left_out():
    assert closing_summary(RunFacts(100, 50)) == "Parameters: 100 -> 50, 2.00 times fewer."
    assert closing_summary(RunFacts(100, 100)) == "Parameters: 100, as many as before."


def test_every_number_has_its_place():
    progress = Progress(reference=0.9, raw=0.4, batchnorm=0.8, metric=0.89)
    measured = {"ctdr/peak_memory_gib": 0.5, "ctdr/step_time_s": 0.02, "ctdr/samples_per_s": 3200.0}
    peaks = PlanPeaks(GIB, 2 * GIB, 1.25)
    text = closing_summary(RunFacts(100, 50, "val_acc", progress, {}, peaks, None, 0, measured))
    assert "val_acc: dense 0.9000, raw 0.4000, after re-estimation 0.8000, now 0.8900." in text
    assert "2.00 GiB without a plan, 1.00 GiB predicted, 512.0 MiB measured, the first step included, which ran" in text
    assert "the optimizer: 20.0 ms, 3,200 samples/s; x1.25 of the plain step's time, predicted." in text
    assert "Budget" not in text


OTHERS_KEPT_IT = "That batch ran without a plan; measured ones with a plan kept it."


@pytest.mark.parametrize(
    ("measured_gib", "over_bytes", "verdict"),
    [
        (0.5, 0, "Budget of 1.00 GiB kept: yes."),
        (1.5, 0, "Budget of 1.00 GiB kept: no, by 512.0 MiB."),
        (0.5, 2**20, f"Budget of 1.00 GiB kept: no, by 1.0 MiB. {OTHERS_KEPT_IT}"),
        (0.0, 2**20, "Budget of 1.00 GiB kept: no, by 1.0 MiB."),
        (0.0, 0, "Budget of 1.00 GiB kept: not measured; Trainer(log_every_n_steps=) sets how often steps are."),
    ],
)
def test_the_verdict_on_the_budget_goes_by_measured_bytes(measured_gib, over_bytes, verdict):
    facts = RunFacts(
        2, 2, budget_bytes=GIB, over_bytes=over_bytes, measured={"ctdr/peak_memory_gib": measured_gib},
        peaks=PlanPeaks(GIB // 4, GIB, 1.0),
    )  # fmt: skip
    assert verdict in closing_summary(facts).splitlines()


@pytest.mark.parametrize(("counted", "verdict"), [(True, "kept: no, by 128.0 MiB."), (False, "kept: yes.")])
def test_without_a_gpu_the_workspaces_that_were_predicted_count(counted, verdict):
    facts = RunFacts(
        2, 2, budget_bytes=GIB, measured={"ctdr/peak_memory_gib": 0.75}, peaks=PlanPeaks(9 * GIB // 8), counted=counted
    )
    assert verdict in closing_summary(facts)


def test_a_run_without_a_cut_ends_with_it_too(caplog):
    with caplog.at_level(logging.INFO):
        parts.fit(parts.blobs(), CTDRCallback(rank=None, memory_budget="1GiB"), max_epochs=2, log_every_n_steps=1)
    closing = next(text for text in caplog.messages if "kept:" in text)
    assert "Budget of 1.00 GiB kept: yes." in closing
    assert re.search(r"Peak of a step: (.*) without a plan, \1 predicted, (.*) of tensors measured\.", closing)
    assert "as many as before" in closing


def test_a_step_over_the_budget_while_it_was_recorded_is_not_forgotten(caplog):
    callback = CTDRCallback(rank=None, memory_budget="1GiB")
    module = parts.blobs()
    begin = module.on_train_epoch_end

    def note():
        callback.run.memory.note(OverBudget(2**20))
        begin()

    module.on_train_epoch_end = note
    with caplog.at_level(logging.INFO):
        parts.fit(module, callback, max_epochs=2, log_every_n_steps=1)
    assert any("Budget of 1.00 GiB kept: no, by 1.0 MiB." in text for text in caplog.messages)


def test_the_peak_is_the_highest_that_was_measured_not_a_small_last_batchs(tmp_path):
    """32 images in batches of 24: the last has 8. Steps that are recorded, in the first epoch, are not measured."""
    callback = CTDRCallback(rank=0.5, memory_budget="1GiB", verbose=False)
    parts.fit(parts.blobs(), callback, max_epochs=2, logger=CSVLogger(tmp_path), data=parts.loaders(24))
    text = (tmp_path / "lightning_logs" / "version_0" / "ctdr" / "summary.txt").read_text()
    predicted, measured = re.search(
        r"Peak of a step: .* without a plan, (.*) predicted, (.*) of tensors measured", text
    ).groups()
    assert parse_bytes(measured) > 0.9 * parse_bytes(predicted)


def test_without_recovery_the_last_metrics_are_told():
    metrics = {"lr": 0.1, "lr-Adam/pg1": 0.1, "val_acc": 0.5, "lrelu": 0.25}
    assert "Last metrics: val_acc 0.5000, lrelu 0.2500." in closing_summary(RunFacts(2, 1, metrics=metrics))


@pytest.mark.parametrize("verbose", [True, False])
def test_a_run_ends_with_it_on_screen_where_verbose_and_in_the_loggers_always(tmp_path, caplog, verbose):
    recovery = Recovery(phases=[Phase(epochs=1)], monitor="val_acc", reference="measure")
    callback = CTDRCallback(rank=0.5, recovery=recovery, verbose=verbose)
    with caplog.at_level(logging.INFO):
        parts.fit(parts.blobs(), callback, max_epochs=1, logger=CSVLogger(tmp_path))
    written = (tmp_path / "lightning_logs" / "version_0" / "ctdr" / "summary.txt").read_text()
    for word in ("Parameters:", "val_acc: dense", "now", "Peak of a step", "Time of a batch"):
        assert word in written
    assert (written.splitlines()[0] in caplog.text) is verbose


def test_a_run_shorter_than_an_interval_has_its_verdict_too(caplog):
    caplog.set_level("INFO")
    ours = CTDRCallback(rank=None, memory_budget="8MiB")
    parts.fit(parts.Blobs(), ours, max_epochs=1, log_every_n_steps=1000)
    assert "Budget of 8.0 MiB kept: yes." in caplog.text
    assert "measured" in caplog.text


def test_a_short_run_measures_a_step_under_its_plan_not_the_recorded_one(caplog):
    caplog.set_level("INFO")
    ours = CTDRCallback(rank=None, policy="sqrt")
    parts.fit(parts.blobs(), ours, max_epochs=1, log_every_n_steps=1000)
    closing = next(text for text in caplog.messages if "Peak of a step" in text)
    plain, predicted, measured = (
        parse_bytes(found)
        for found in re.search(r"step: (.*) without a plan, (.*) predicted, (.*) of tensors", closing).groups()
    )
    assert measured <= predicted < plain


@pytest.mark.parametrize(("dense", "loss"), [(True, ""), (False, "; a KL of 0.0000 nats")])
def test_the_time_of_the_runs_plan_and_that_of_the_choice_are_told_apart(dense, loss):
    fit = SimpleNamespace(measured_slowdown=1.08, dense_peak_bytes=GIB, loss=0.0, metric=None, is_dense=dense)
    text = closing_summary(RunFacts(2, 1, measured={"ctdr/step_time_s": 1.0}, peaks=PlanPeaks(1, 2, 1.25), fit=fit))
    assert "x1.25 of the plain step's time, predicted." in text
    assert f"Measured before training: x1.08 of the dense step's time{loss}." in text
