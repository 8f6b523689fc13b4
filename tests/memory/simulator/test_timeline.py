import importlib

import numpy as np
import pytest

from ctdr_lightning.memory import RECOMPUTE, simulate
from ctdr_lightning.memory.simulator.timeline import Timeline, segments_of
from tests.memory.graphs import GRAPHS, chain, graph_trace


def test_steps_become_segments():
    assert segments_of({}) == []
    steps = {3: 5, 7: -2, 9: -3}
    assert segments_of(steps) == [(3, 7, 5), (7, 9, 3)]


def test_an_empty_step():
    trace = graph_trace(chain([4]))
    empty = Timeline(trace, {}, np.zeros(0, dtype=np.int64), 0.0, 0.0, 0, np.zeros(0, dtype=np.int64), ())
    assert empty.peak_tick == 0
    assert empty.peak_bytes == trace.resident_bytes


@pytest.mark.parametrize("name", GRAPHS)
def test_the_peak_is_reached_where_it_is_said(name):
    trace = graph_trace(GRAPHS[name])
    timeline = simulate(trace, dict.fromkeys(trace.droppable, RECOMPUTE))
    assert timeline.bytes_at[timeline.peak_tick] == timeline.peak_bytes == timeline.bytes_at.max()
    assert (timeline.bytes_at[: timeline.peak_tick] < timeline.peak_bytes).all()


def test_it_can_be_drawn():
    importlib.import_module("matplotlib").use("Agg")
    timeline = simulate(graph_trace(chain([4] * 5)))
    axes = timeline.plot(label="keep")
    assert timeline.plot(axes) is axes
    (line, _) = axes.get_lines()
    assert line.get_label() == "keep"
    assert max(line.get_ydata()) == timeline.peak_bytes / 2**20
