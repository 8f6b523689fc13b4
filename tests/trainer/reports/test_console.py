"""What a run prints: nothing wider than a console, nothing twice, nothing at all where it is asked to be quiet."""

import logging

import pytest

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.basics import progress_bar
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.reports.opening import WIDTH
from tests import parts

RECOVERY = Recovery(phases=[Phase(epochs=1)], monitor="val_acc", reference="measure")
WAYS = {
    "share": {"rank": 0.5, "recovery": RECOVERY},
    "budget": {"rank": "auto", "memory_budget": "1GiB", "max_slowdown": 10.0},
}


@pytest.fixture
def printed(monkeypatch, caplog, capsys):
    """Run a fit in which every bar is shown at once; returns its log messages and its lines on stderr."""
    monkeypatch.setattr(progress_bar, "PATIENCE_S", -1.0)

    def run(**options):
        with caplog.at_level(logging.INFO):
            parts.fit(parts.blobs(), CTDRCallback(**grouped(options)), max_epochs=1)
        said = [record.getMessage() for record in caplog.records if "CTDR" in record.getMessage()]
        return said, capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_run_opens_once_closes_once_and_fits_the_console(printed, way):
    said, bars = printed(**WAYS[way])
    assert max(len(line) for text in said for line in text.splitlines()) <= WIDTH
    assert sum("whole model" in text or "loss (nats)" in text for text in said) == 1
    assert sum("times fewer." in text or "as many as before." in text for text in said) == 1
    assert bars


@pytest.mark.parametrize("way", WAYS)
def test_a_quiet_run_prints_nothing(printed, way):
    assert printed(**WAYS[way], verbose=False) == ([], [])


def test_the_opening_of_a_chosen_budget_says_all_of_its_sentences(printed):
    said, _ = printed(**WAYS["budget"])
    (opening,) = (text for text in said if "loss (nats)" in text)
    assert "Looked at: 1 candidate, in" in " ".join(opening.split())
    assert "…" not in opening
