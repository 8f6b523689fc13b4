"""Policies of other people: the one in the documentation, by decorator and by entry point."""

import re
from pathlib import Path

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.memory import plan, simulate
from ctdr_lightning.memory.policies import POLICIES
from tests.memory.graphs import chain, graph_trace

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TRACE = graph_trace(chain([4, 8, 2, 8, 4, 2]))


@pytest.fixture
def largest_first():
    names = {}
    with POLICIES.temporarily():
        exec(compile(EXAMPLE, str(PAGE), "exec"), names)
        yield names["largest_first"]
    assert "largest_first" not in POLICIES


def test_the_example_is_short_fits_and_is_known_by_name(largest_first):
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 15
    plain = simulate(TRACE).peak_bytes
    made = plan(TRACE, plain - 6, "largest_first")
    assert made.policy == "largest_first"
    assert made.peak_bytes <= plain - 6
    assert plan(TRACE, plain - 6, largest_first).actions == made.actions
    with pytest.raises(InfeasibleBudgetError):
        plan(TRACE, 1, "largest_first")


def test_entry_points_are_loaded_once_asked_for(monkeypatch):
    class Point:
        name = "theirs"

        def load(self):
            return len

    monkeypatch.setattr(
        "ctdr_lightning.basics.registry.entry_points", lambda group: [Point()] if group == "a.group" else []
    )
    registry = Registry("policy", group="a.group")
    assert list(registry) == ["theirs"]
    assert registry["theirs"] is len
