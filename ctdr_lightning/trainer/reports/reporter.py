"""Output of a run: numbers to log, texts and pictures to publish, and an account after memory ran out."""

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
from ctdr_lightning.recovery.decisions import Progress
from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.options import AUTO, IF_NEEDED, CallbackOptions
from ctdr_lightning.trainer.reports.loggers import publish_figure, publish_run, publish_text
from ctdr_lightning.trainer.reports.memory_report import MemoryReport
from ctdr_lightning.trainer.reports.monitor import Monitor, utilisation
from ctdr_lightning.trainer.reports.opening import opening_table, wrapped
from ctdr_lightning.trainer.reports.out_of_memory import write_account
from ctdr_lightning.trainer.reports.run_history import RunHistory
from ctdr_lightning.trainer.reports.summary import RunFacts, closing_summary
from ctdr_lightning.trainer.run_state import RunState
from ctdr_lightning.trainer.surgeon import Surgeon
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.pipeline import StepRunner

_DENSE_INSTEAD = "rank=None keeps the dense model; "
_OTHERS = (
    'rank="auto" looks for a harmless cut that is no slower; a share such as rank=0.5 cuts to it; max_slowdown= limits '
    "the time, ranks=Ranks(max_loss=...) the loss."
)
_log = logging.getLogger(__name__)
_UNPLANNED = ". HINT: a memory_budget (0.9 of a GPU's memory, say) plans the steps, and repeats one that fails"


class Reporter:
    """Collects the users' output from the stages.

    Args:
        options: The callback's arguments; ``verbose`` says whether to print as well.
        surgeon: Knows the decomposition.
        memory: Knows plans and peaks.
        engine: Has measured steps.
        monitor: Has counted them.

    Attributes:
        fit: The choice of ``rank="auto"``; None elsewhere.
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
            wished: Choices of this run before it read the checkpoint.
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
            rank_zero_warn(f"The checkpoint's layers are trained unchanged; ignored of this run: {shown}.")

    def recovery_ends(self, state: RunState) -> None:
        """A checkpoint of a run with recovery was read by a callback without it."""
        progress = Progress.from_dict(state.recovery.get("progress")) if isinstance(state.recovery, Mapping) else None
        n_left = progress.stages - progress.stage if progress is not None and not progress.rolled_back else 0
        dense = f", and the layers of {n_left} more stage{'s' * (n_left > 1)} stay dense" if n_left > 0 else ""
        rank_zero_warn(
            f"The checkpoint's run has recovery, this one has none: its schedule ends here{dense}. "
            "Give recovery= as that run did; CTDRCallback.from_checkpoint(path) takes over its arguments."
        )

    def adopted(self, module: LightningModule, own: CallbackOptions) -> None:
        """The model came with its layers cut: they are trained, whatever this run's arguments ask."""
        n_layers = len(report_of(module).layers)
        names = [
            name
            for name in ("choices", "rank", "method", "select")
            if getattr(own, name) not in (None, AUTO, IF_NEEDED)
        ]
        shown = ", ".join(f"{name}={_shortened(own.to_dict().get(name))}" for name in names)
        layers = "layer is" if n_layers == 1 else f"{n_layers} layers are"
        rank_zero_warn(
            f"The model's {layers} cut already and trained without another cut"
            f"{f'; ignored of this run: {shown}' if shown else ''}. "
            "Call ctdr_lightning.merge(model) before fit to make the layers dense and cut them anew."
        )

    def _report(self, module: LightningModule) -> Report | None:
        """Report on the trained layers: cut here, or cut before in the model or the checkpoint."""
        if self._surgeon.adopted:
            return report_of(module, self._surgeon.parameters_before, "as it came with the model")
        if self._resumed and self._surgeon.decomposes:
            return report_of(module, self._surgeon.parameters_before)
        return self._surgeon.report

    def print_decomposition(self, module: LightningModule) -> None:
        """Print the decomposition, once."""
        report = self._report(module) if self._verbose and not self._printed_decomposition else None
        if report is not None:
            rank_zero_info(f"CTDR:\n{self._opening(report)}")
            self._printed_decomposition = True

    def _opening(self, report: Report) -> str:
        """The layers that were cut, and how ranks and plan were chosen for a budget."""
        fit = self.fit if not self._resumed else None
        layers = [opening_table(report)] if fit is None or not fit.is_dense else []
        chosen = []
        if fit is not None:
            others = f"Others: {'' if fit.is_dense else _DENSE_INSTEAD}{_OTHERS}"
            chosen = [fit.table(), others, *fit.sentences()]
        return "\n\n".join([*layers, wrapped("\n".join(chosen))] if chosen else layers)

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

    def interval(self, trainer: Any) -> dict[str, Any]:
        """The numbers of the last log interval; new plans go to the loggers."""
        values: dict[str, Any] = self._monitor.interval(trainer)
        values |= utilisation(trainer, self._engine.meters.step_flops, values.get("ctdr/step_time_s", 0.0))
        values |= self._memory_report.peaks(trainer, self._engine.meters.measured)
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
        whole, *tensors = self._memory_report.explain()
        known = any(event.startswith(whole) for event in events)  # told with the batches that it is for
        text = "\n".join([*events, "", *([] if known else [whole]), *tensors])
        publish_text(trainer.loggers, "ctdr/memory_plan", text, trainer.global_step)
        picture = self._memory_report.picture()
        if picture is not None:
            publish_figure(trainer.loggers, "ctdr/memory", picture, trainer.global_step)

    def close(self, trainer: Any, module: LightningModule, coach: Coach | None) -> None:
        """Print the summary of the run, and give it to the loggers.

        Args:
            trainer: At the end of a fit.
            module: The model at its end.
            coach: Knows the progress of the recovery; None without recovery.
        """
        if not trainer.is_global_zero:
            return
        if not self._measured and trainer.log_every_n_steps and not trainer.barebones:
            self.interval(trainer)  # of a run that is shorter than one
        self._publish_run(trainer, module)
        if not self._surgeon.decomposes and self._memory.session is None:
            return
        after = sum(parameter.numel() for parameter in module.parameters())
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "ctdr/" not in name}
        facts = RunFacts(
            parameters_before=self._surgeon.parameters_before or after,
            parameters_after=after,
            monitor=(coach.recovery.monitor or "") if coach is not None else "",
            progress=coach.progress if coach is not None else None,
            metrics=metrics,
            peaks=self._memory_report.plan_peaks(),
            budget_bytes=self._memory.budget_bytes,
            over_bytes=self._memory_report.over_budget_bytes(),
            measured=self._measured,
            counted=trainer.strategy.root_device.type != "cuda",
            fit=self.fit,
        )
        text = closing_summary(facts)
        if self._verbose:
            rank_zero_info(f"CTDR:\n{wrapped(text)}")
        publish_text(trainer.loggers, "ctdr/summary", text, trainer.global_step)

    def _publish_run(self, trainer: Any, module: LightningModule) -> None:
        """Write the run as an HTML page, with its record and its plan."""
        after = sum(parameter.numel() for parameter in module.parameters())
        parts = self._history.parts(
            type(module).__name__,
            self._report(module),
            self._memory.last_plan,
            self.fit,
            parameters_before=self._surgeon.parameters_before or after,
            parameters_after=after,
        )
        publish_run(trainer.loggers, parts)

    def write_out_of_memory_report(self, trainer: Any, module: LightningModule, error: BaseException) -> None:
        """Write an account of the tensors and their holders after a step ran out of memory."""
        name = f"ctdr-out-of-memory-step{trainer.global_step}-rank{trainer.global_rank}"
        path = write_account(Path(trainer.default_root_dir), name, error, module, self._memory.session)
        hint = "" if self._memory.session is not None else _UNPLANNED
        _log.error("CTDR: the step ran out of memory; %s lists the tensors and their layers%s", path, hint)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
