"""What a run says: numbers to log, texts and pictures to publish, and an account when memory ran out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from ctdr_lightning.decomposition import Choices, Report
from ctdr_lightning.decomposition.report import report_of
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.reports.loggers import publish_figure, publish_run, publish_text
from ctdr_lightning.trainer.reports.memory_report import MemoryReport
from ctdr_lightning.trainer.reports.monitor import Monitor, utilisation
from ctdr_lightning.trainer.reports.opening import opening_table, wrapped
from ctdr_lightning.trainer.reports.out_of_memory import write_account
from ctdr_lightning.trainer.reports.run_history import RunHistory
from ctdr_lightning.trainer.reports.summary import RunFacts, closing_summary
from ctdr_lightning.trainer.surgeon import Surgeon
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.step_runner import StepRunner

_log = logging.getLogger(__name__)


class Reporter:
    """Collects from the stages what users see.

    Args:
        options: The callback's arguments; ``verbose`` says whether to print as well.
        surgeon: Knows what was decomposed.
        memory: Knows plans and peaks.
        engine: Has measured steps.
        monitor: Has counted them.

    Attributes:
        fit: What ``rank="auto"`` chose; None elsewhere.
    """

    def __init__(
        self, options: CallbackOptions, surgeon: Surgeon, memory: MemoryStage, engine: StepRunner, monitor: Monitor
    ) -> None:
        self._verbose = options.verbose
        self._history = RunHistory(options.to_dict())
        self._memory_report = MemoryReport(memory)
        self._surgeon, self._memory, self._engine, self._monitor = surgeon, memory, engine, monitor
        self._printed_decomposition = self._resumed = False
        self.fit: BudgetFit | None = None
        self._measured: dict[str, float] = {}

    def resumed(self, wished: Choices | None, options: Any, own: CallbackOptions) -> None:
        """A checkpoint was read: its layers are trained, whatever this run's arguments ask.

        Args:
            wished: What this run chose before it read the checkpoint.
            options: The arguments of the run that wrote it, as primitives.
            own: This run's.
        """
        self._resumed = True
        if wished is None or self._surgeon.choices is None or wished.same_layers(self._surgeon.choices):
            return
        given = own.to_dict()
        before = options if isinstance(options, Mapping) else {}
        names = [name for name in ("rank", "method", "select", "choices") if given.get(name) != before.get(name)]
        if names:
            shown = ", ".join(f"{name}={_shortened(given.get(name))}" for name in names)
            rank_zero_warn(f"The checkpoint's layers are trained as they are; ignored of this run: {shown}.")

    def _report(self, module: LightningModule) -> Report | None:
        """What is trained: the layers as they were cut here, or as they came from the checkpoint."""
        if self._resumed and self._surgeon.decomposes:
            return report_of(module, self._surgeon.parameters_before)
        return self._surgeon.report

    def print_decomposition(self, module: LightningModule) -> None:
        """Print the decomposition, once."""
        report = self._report(module) if self._verbose and not self._printed_decomposition else None
        if report is not None:
            chosen = ["", *self.fit.sentences()] if self.fit is not None and not self._resumed else []
            text = "\n".join([opening_table(report), *map(wrapped, chosen)])
            rank_zero_info(f"CTDR:\n{text}")
            self._printed_decomposition = True

    def parameter_counts(self, trainer: Any, module: LightningModule) -> dict[str, float]:
        """Parameters before and after; the whole table goes to the loggers."""
        after = float(sum(parameter.numel() for parameter in module.parameters()))
        report = self._report(module)
        before = float(self._surgeon.parameters_before or after)
        if report is not None and trainer.is_global_zero:
            publish_text(trainer.loggers, "ctdr/decomposition", str(self.fit or report), trainer.global_step)
        return {
            "ctdr/parameters_before": before,
            "ctdr/parameters_after": after,
            "ctdr/compression": before / max(after, 1),
        }

    def interval(self, trainer: Any, module: LightningModule, batch: Any) -> dict[str, Any]:
        """The numbers of the last log interval; new plans go to the loggers."""
        values: dict[str, Any] = self._monitor.interval(trainer)
        values |= utilisation(trainer, self._engine.step_flops, values.get("ctdr/step_time_s", 0.0))
        values |= self._memory_report.peaks(trainer, self._engine.measured)
        values |= self._memory_report.predicted()
        highest = max(self._measured.get("ctdr/peak_memory_gib", 0.0), values.get("ctdr/peak_memory_gib", 0.0))
        self._measured |= {name: float(value) for name, value in values.items()} | {"ctdr/peak_memory_gib": highest}
        self._history.note(trainer, values)
        events = self._memory_report.new_events()
        for event in events:
            self._history.said(event)
        if events and trainer.is_global_zero:
            self._publish_plan(trainer, events)
        return values

    def validated(self, trainer: Any) -> None:
        """A validation is over; within a fit, its metrics belong to the run's history."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        scores = {name: float(value) for name, value in trainer.callback_metrics.items() if "ctdr/" not in name}
        self._history.note(trainer, scores)

    def _publish_plan(self, trainer: Any, events: list[str]) -> None:
        for event in events if self._verbose else []:
            rank_zero_info(wrapped(f"CTDR: {event}"))
        whole, *tensors = self._memory_report.explain().splitlines()
        known = any(event.startswith(whole) for event in events)  # told with the batches that it is for
        text = "\n".join([*events, "", *([] if known else [whole]), *tensors])
        publish_text(trainer.loggers, "ctdr/memory_plan", text, trainer.global_step)
        picture = self._memory_report.picture()
        if picture is not None:
            publish_figure(trainer.loggers, "ctdr/memory", picture, trainer.global_step)

    def close(self, trainer: Any, module: LightningModule, coach: Coach | None) -> None:
        """Say what became of the run: printed, and given to the loggers.

        Args:
            trainer: At the end of a fit.
            module: The model as it is.
            coach: Knows where recovery stands; None without recovery.
        """
        if not trainer.is_global_zero:
            return
        self._publish_run(trainer, module)
        if not self._surgeon.decomposes:
            return
        after = sum(parameter.numel() for parameter in module.parameters())
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "ctdr/" not in name}
        facts = RunFacts(
            parameters_before=self._surgeon.parameters_before or after,
            parameters_after=after,
            monitor=(coach.recovery.monitor or "") if coach is not None else "",
            progress=coach.progress if coach is not None else None,
            metrics=metrics,
            predicted_peak_bytes=self._memory_report.largest_predicted_bytes(),
            measured=self._measured,
            fit=self.fit,
        )
        text = closing_summary(facts)
        if self._verbose:
            rank_zero_info(f"CTDR:\n{wrapped(text)}")
        publish_text(trainer.loggers, "ctdr/summary", text, trainer.global_step)

    def _publish_run(self, trainer: Any, module: LightningModule) -> None:
        """The run as an HTML page, its record and its plan beside it."""
        after = sum(parameter.numel() for parameter in module.parameters())
        parts = self._history.parts(
            type(module).__name__,
            self._report(module),
            self._memory.last_plan,
            parameters_before=self._surgeon.parameters_before or after,
            parameters_after=after,
            dense_peak_bytes=self.fit.dense_peak_bytes if self.fit is not None else 0,
        )
        publish_run(trainer.loggers, parts)

    def write_out_of_memory_report(self, trainer: Any, module: LightningModule, error: BaseException) -> None:
        """Write down who held what when a step ran out of memory."""
        name = f"ctdr-out-of-memory-step{trainer.global_step}-rank{trainer.global_rank}"
        path = write_account(Path(trainer.default_root_dir), name, error, module, self._memory.session)
        _log.error("CTDR: the step ran out of memory; who held what is in %s", path)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
