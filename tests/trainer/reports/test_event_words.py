"""Each event has its sentence."""

import pytest

from ctdr_lightning.memory.guide.events import Differed, Event, PlanMade, Recorded, Refuted
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning.trainer.training_step import events
from tests.memory.graphs import chain, graph_trace


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Differed("op 3"), "A step differed from its plan: op 3."),
        (Refuted("It came back."), "It came back."),
        (Recorded("relu", "keeps its signs"), "relu keeps its signs"),
        (events.GradientsRead("Net.forward"), "Net.forward reads gradients before the backward"),
        (events.GradientsFreed(2**20), "The gradients of the last step (1.0 MiB) are freed before the forward"),
        (events.RestGrew(2**20), "After the backward a batch takes 1.0 MiB more"),
        (events.ClosureMeasured(2**20), "Beside a closure of the optimizer stand 1.0 MiB."),
        (events.BatchesCut(10, 4), "Batches of 10 samples run as 4 sub-batches of 3 or less."),
        (events.UnitsChosen("the weights of 1 of 2 FSDP units stay"), "The weights of 1 of 2 FSDP units stay"),
        (
            events.RanOutOfMemory("no room", 2**20),
            "A step ran out of memory (no room); it is tried again under 1.0 MiB.",
        ),
        (events.RecordedOverBudget(2**20), "A batch took 1.0 MiB, more than the budget, while its step was recorded."),
    ],
)
def test_words(event, said):
    assert words_of(event).startswith(said)


def test_a_plan_is_told_with_its_batches():
    made = plan(graph_trace(chain([8] * 9)), policy="keep")
    first = made.explain().splitlines()[0]
    assert words_of(PlanMade(first)) == first
    assert words_of(PlanMade(first, ("4x8 float32", "4 int64"))) == f"{first} For batches of 4x8 float32 and 4 int64."


def test_an_event_without_words_is_an_error():
    with pytest.raises(TypeError, match="Event has no words"):
        words_of(Event())
