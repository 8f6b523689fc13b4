"""The callback's arguments are checked before anything starts, and come back from a checkpoint as they were."""

import pytest

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.trainer.options import CallbackOptions


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_budget": "much"}, "much"),
        ({"memory_budget": 8}, 'Did you mean "8GiB"?'),
        ({"memory_budget": "12"}, r"is 12 bytes.\n?.*Did you mean \"12GiB\"?"),
        ({"policy": "best"}, "best"),
        ({"rank": "if_neded"}, "Did you mean 'if_needed'"),
        ({"rank": "None"}, 'Write None, "if_needed"'),
        ({"rank": "0.5"}, "Write the number: rank=0.5"),
        ({"max_slowdown": 0}, "max_slowdown"),
        ({"verbose": 3}, "verbose must be True or False, got 3"),
        ({"keep_gradients": "yes"}, "keep_gradients must be True, False or None, got 'yes'"),
        ({"over_budget": "ignore"}, "over_budget='ignore'"),
        ({"optimizer_step": "now"}, "optimizer_step='now'"),
        ({"optimizer_step": "in_backward", "optimizer_state": "disk"}, "are given"),
        ({"sub_batches": 0}, "sub_batches=0"),
        ({"sub_batches": "auto"}, "needs a budget"),
        ({"sub_batches": 2, "optimizer_step": "in_backward"}, "updates each parameter"),
        ({"rank": "auto", "data": None}, "needs data"),
        ({"max_loss": 0.1}, "bounds the choice of ranks"),
        ({"rank": [1.5, True]}, "rank"),
        ({"method": "best"}, "best"),
        ({}, "neither memory_budget nor rank"),
        ({"verbose": False}, "neither memory_budget nor rank"),
    ],
)
def test_what_cannot_be_used_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        CallbackOptions(**given)


@pytest.mark.parametrize(
    ("given", "plans"),
    [
        ({"rank": None}, False),
        ({"rank": None, "memory_budget": "1GiB"}, True),
        ({"rank": 0.5}, True),
        ({"rank": 0.5, "policy": "keep"}, False),
        ({"rank": None, "max_slowdown": 1.2}, True),
        ({"rank": None, "policy": "sqrt"}, True),
        ({"policy": "sqrt"}, True),
        ({"policy": "keep"}, False),
        ({"max_slowdown": 1.2}, True),
        ({"optimizer_state": "disk"}, False),
    ],
)
def test_memory_is_planned_where_there_is_a_budget_or_time_to_spend(given, plans):
    assert CallbackOptions(**given).plans_memory is plans


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"memory_budget": "1GiB"}, "auto"),
        ({"memory_budget": "1GiB", "max_loss": 0.1}, "auto"),
        ({"memory_budget": "1GiB", "sub_batches": "auto"}, None),
        ({"memory_budget": "1GiB", "offload": "disk"}, None),
        ({"policy": "sqrt"}, None),
        ({"memory_budget": "1GiB", "rank": None}, None),
        ({"rank": 0.25}, 0.25),
    ],
)
def test_ranks_are_chosen_where_they_are_given_or_a_budget_is_all_there_is(given, asked):
    made = CallbackOptions(**given).decomposition()
    assert (made["rank"] if made is not None else None) == asked


@pytest.mark.parametrize(("rank", "hindered"), [("auto", True), ("if_needed", False), (0.5, False), (None, False)])
def test_sub_batches_may_be_advised_unless_ranks_are_chosen_for_the_whole_batch(rank, hindered):
    assert bool(CallbackOptions(rank=rank, memory_budget="1GiB").cuts_hindrance("auto")) is hindered


def test_arguments_come_back_from_primitives():
    given = CallbackOptions(rank={"net.*": 0.25}, memory_budget="8GiB", offload=("host",), sub_batches=2, verbose=False)
    again = CTDRCallback(**CallbackOptions.arguments(given.to_dict())).options
    assert again.to_dict() == given.to_dict()
    with pytest.raises(CheckpointError, match="damaged"):
        CallbackOptions.arguments({"another": 1})
