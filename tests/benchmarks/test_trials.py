from benchmarks.harness import write_figures
from benchmarks.trials import BENCHMARK, Figure, figures, measure
from ctdr_lightning.memory import Prepared
from tests.memory.graphs import chain, graph_trace


def test_a_trial_of_a_larger_group_is_more_work():
    step = Prepared(graph_trace(chain([4] * 40)))
    alone, joined = measure(step, 1), measure(step, 30)
    assert alone.n_ops == joined.n_ops == len(step.trace.ops)
    assert joined.work > alone.work + 29


def test_every_group_that_a_net_has_room_for_is_measured():
    found = list(figures(layers=[1]))
    assert [figure.group for figure in found] == [1, 10]


def test_the_table_has_a_row_a_step_and_a_column_a_group(tmp_path):
    found = [Figure(900, 1, 71.6, 12), Figure(900, 10, 144.2, 40), Figure(3500, 1, 1600.0, 12)]
    write_figures(tmp_path / "trials.json", rows=found)
    lines = BENCHMARK.table((tmp_path / "trials.json").read_text(), "table").splitlines()
    assert lines[0] == "| ops | 1 dropped | 10 dropped |"
    assert lines[2:-2] == ["| 900 | 72 µs | 144 µs |", "| 3,500 | 1,600 µs |  |"]
