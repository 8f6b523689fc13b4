"""docs/quickstart.ipynb, which is docs/quickstart.md, cell after cell as a reader runs it, in an empty folder."""

import json
from pathlib import Path

import pytest
from lightning.pytorch.utilities.model_summary import ModelSummary

from ctdr_lightning.pages.run_folder import read_runs

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"
CELLS = json.loads(PAGE.read_text())["cells"]
BLOCKS = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The names that the page's blocks leave, and the folder they ran in."""
    folder, names = tmp_path_factory.mktemp("quickstart"), {"__name__": "quickstart"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), names)
    return names, folder


def test_the_page_has_its_four_parts():
    assert len(BLOCKS) == 4


@pytest.mark.slow
def test_the_network_is_smaller_and_learned(done):
    names, _ = done
    assert names["trainer"].callback_metrics["val/acc"] > 0.9
    dense, small = (ModelSummary(model).total_parameters for model in (names["Digits"](), names["small"]))
    assert small < 0.4 * dense


@pytest.mark.slow
def test_the_step_stays_within_the_budget_that_the_page_names(done):
    _, folder = done
    (run,) = read_runs(folder / "lightning_logs")
    budget_gib = 24 / 1024
    peaks = run.record.series("ctdr/peak_memory_gib", "step")[1]
    assert peaks
    assert max(peaks) <= 1.01 * budget_gib  # what is beside the step, such as the batch, is known to 1 %
    assert run.plan.budget_bytes is not None
    assert not run.plan.keeps_all


@pytest.mark.slow
def test_the_report_is_where_the_page_looks_for_it(done):
    _, folder = done
    assert len(list((folder / "lightning_logs").rglob("report.html"))) == 1
