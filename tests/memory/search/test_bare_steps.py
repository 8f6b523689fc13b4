"""A search and every policy end where there is nothing to search."""

from contextlib import suppress
from dataclasses import replace

import pytest

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory import Trace, plan, simulate
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.search.local_search import LocalSearch
from tests.memory.graphs import Node, chain, graph_trace


def bare_steps():
    """Steps that leave a search nothing to do: no op at all, weights alone, one op, one that takes no byte."""
    yield "no op", Trace((), (), (), 0)
    yield "no op but weights", Trace((), (), (), 0, resident_bytes=1000)
    yield "one op", graph_trace([Node((), 4, saved=False)])
    yield "ops of no bytes", graph_trace(chain([0] * 5))
    yield "one byte", graph_trace([Node((), 1)])


@pytest.mark.parametrize("resident_bytes", [0, 10**6])
@pytest.mark.parametrize(("name", "trace"), list(bare_steps()))
def test_a_step_with_nothing_to_search_ends(name, trace, resident_bytes):
    standing = replace(trace, resident_bytes=trace.resident_bytes + resident_bytes)
    search = LocalSearch(standing)
    search.deepen(lambda point: False)
    search.improve(0, lambda: False)
    assert search.frontier.least.peak_bytes == simulate(standing).peak_bytes
    for policy in POLICIES:
        for budget in (Budget(peak_bytes=1), Budget(peak_bytes=10**9), Budget(seconds=100.0)):
            with suppress(CTDRError):
                plan(standing, budget, policy)
