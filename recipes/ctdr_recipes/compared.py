"""A sweep ends with a comparison of its runs in its own folder: a page with pictures, and the table as Markdown."""

from __future__ import annotations

import atexit
import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.pages.comparison_page import comparison_page, comparison_text
from ctdr_lightning.pages.run_folder import read_runs

PAGE, TABLE = "comparison.html", "comparison.md"
_log = logging.getLogger(__name__)


class CompareRuns(Callback):
    """Hydra's callback: after the last run of ``--multirun`` it writes ``comparison.html`` and ``comparison.md``.

    Runs without a logger leave nothing to compare: then it says so and the sweep ends well. A sweep with points that
    failed is compared as well.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare at the latest when the process ends: Hydra tells nobody of the end of a sweep with a failed point."""
        atexit.register(_compare_and_say, Path(config.hydra.sweep.dir).absolute())

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare whatever runs lie in the sweep's folder, those of earlier starts too."""
        atexit.unregister(_compare_and_say)
        _compare_and_say(Path(config.hydra.sweep.dir))


def _compare_and_say(folder: Path) -> None:
    try:
        _log.info("%s\n%s", folder / PAGE, compare(folder))
    except CTDRError as error:
        _log.warning("The sweep's runs cannot be compared: %s", error)


def compare(folder: Path) -> str:
    """Write the comparison of a folder's runs into it.

    Args:
        folder: Of a sweep.

    Returns:
        The table.

    Raises:
        CheckpointError: When it holds no run, or a damaged one.
    """
    runs = read_runs(folder)
    table = comparison_text(runs)
    write_text(folder / PAGE, comparison_page(folder.resolve().name, runs))
    write_text(folder / TABLE, table)
    return table
