"""Events of a run in words."""

from __future__ import annotations

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.guide import events as of_steps
from ctdr_lightning.trainer.training_step import events as of_batches


def words_of(event: of_steps.Event) -> str:
    """An event as a sentence.

    Example:
        >>> words_of(of_steps.Differed("op 3 is another"))
        'A step differed from its plan: op 3 is another.'
    """
    match event:
        case of_steps.PlanMade(summary, shapes, foreseen):
            batches = f" For batches of {' and '.join(shapes)}." if shapes else ""
            return summary + batches + " Foreseen from those of other sizes." * foreseen
        case of_steps.OverBudget(n_bytes):
            return f"A step was {format_bytes(n_bytes)} over the budget while it ran without a plan."
        case of_steps.Differed(where):
            return f"A step differed from its plan: {where}."
        case of_steps.Refuted(problem):
            return problem
        case of_steps.Recorded(what, why):
            return f"{what} {why}"
    return _words_of_batches(event)


def _words_of_batches(event: of_steps.Event) -> str:
    match event:
        case of_batches.GradientsRead(reader):
            return f"{reader} reads gradients before the backward: those of the last step are kept until then."
        case of_batches.GradientsFreed(n_bytes):
            return (
                f"The gradients of the last step ({format_bytes(n_bytes)}) are freed before the forward, as the plan "
                "needs their bytes; memory=Memory(keep_gradients=True) keeps them."
            )
        case of_batches.RestGrew(n_bytes):
            return f"After the backward a batch takes {format_bytes(n_bytes)} more for a while."
        case of_batches.ClosureMeasured(n_bytes):
            return f"Beside a closure of the optimizer stand {format_bytes(n_bytes)}."
        case of_batches.BatchesCut(n, number):
            return f"Batches of {n} samples run as {number} sub-batches of {-(-n // number)} or less."
        case of_batches.MadeLean(summary):
            return summary
        case of_batches.UnitsChosen(summary):
            return summary[:1].upper() + summary[1:]
        case of_batches.OutputMade(layer, asked_by):
            return f"The output of {layer} was to be left out, and was made for {asked_by}."
        case of_batches.RunsWhole(module, reason):
            return f"{module or 'The model'} was to run in tiles, and runs whole: it {reason}."
        case of_batches.RanOutOfMemory(message, budget_bytes):
            return f"A step ran out of memory ({message}); it is tried again under {format_bytes(budget_bytes)}."
        case of_batches.RecordedOverBudget(n_bytes):
            return f"A batch took {format_bytes(n_bytes)}, more than the budget, while its step was recorded."
    raise TypeError(f"{type(event).__name__} has no words")
