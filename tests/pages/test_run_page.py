"""The page on a run: parsed as a browser would, its curves compared with the simulator's numbers."""

import json
import re
from dataclasses import replace

import pytest

from ctdr_lightning import simulate
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.joint.considered import Option
from ctdr_lightning.pages.charts import HEIGHT, WIDTH, Axis, Dot, scatter
from ctdr_lightning.pages.layer_section import layer_section
from ctdr_lightning.pages.run_page import RunParts, run_page
from ctdr_lightning.pages.run_record import RunRecord
from tests.pages.parts import Reader, planned_run


@pytest.fixture(scope="module")
def parts():
    return planned_run()


@pytest.fixture(scope="module")
def text(parts):
    return run_page(parts)


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


def charts(read):
    return [json.loads(data) for data in read.text("script") if data.startswith("{")]


def test_it_loads_nothing_and_is_small(text, read):
    assert not re.search(r"https?://|@import|url\(|<link|<img|<iframe", text)
    assert all("src" not in attributes for _, attributes in read.found)
    assert "default-src 'none'" in text
    assert len(text.encode()) < 2_000_000


def test_it_follows_the_readers_choice_of_light_or_dark(text):
    assert "prefers-color-scheme: dark" in text
    assert "color-scheme: light dark" in text


def test_the_curves_peak_where_the_simulator_says(parts, read):
    memory = charts(read)[0]
    peaks = {curve["name"]: max(curve["ys"]) for curve in memory["curves"]}
    wanted = {
        "dense model": parts.dense.peak_bytes,
        "everything kept": simulate(parts.plan.trace).peak_bytes,
        "plan (auto)": parts.plan.peak_bytes,
    }
    assert peaks == pytest.approx(wanted, rel=1e-5)
    assert peaks["plan (auto)"] <= parts.plan.budget_bytes < peaks["everything kept"]
    last = {curve["name"]: curve["xs"][-1] for curve in memory["curves"]}
    assert last["plan (auto)"] == pytest.approx(parts.plan.seconds * 1e3, rel=1e-5)


def test_every_curve_is_drawn_within_its_picture(read):
    paths = [a["d"] for a in read.all("path", "curve")]
    assert len(paths) == sum(len(chart["curves"]) for chart in charts(read))
    for path in paths:
        numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", path)]
        assert len(numbers) > 4
        assert 0 <= min(numbers) <= max(numbers) <= max(WIDTH, HEIGHT)


def test_each_tensor_at_the_peak_leads_to_its_layers_row(parts, read):
    rows = {a["id"] for a in read.all("tr") if "id" in a}
    links = [a["href"].removeprefix("#") for a in read.all("a")]
    assert len(links) > 10
    assert {f"layer-{layer.name}" for layer in parts.record.layers} <= rows
    assert set(links) <= rows
    assert set(links) & {f"layer-{layer.name}" for layer in parts.record.layers}


def test_the_bars_parts_fill_the_peak(parts, read):
    bars = read.all("svg", "bar")
    assert len(bars) == 3
    tooltips = [t for t in read.text("title") if ": " in t]
    sizes = [t.rpartition(": ")[2] for t in tooltips]
    assert format_bytes(parts.plan.trace.resident_bytes) in sizes


def test_epochs_are_told_as_whole_numbers_and_no_column_is_empty(parts, read):
    shown = set(read.text("text"))
    assert {"0", "1", "2"} <= shown
    assert not shown & {"0.5", "1.5"}
    assert "moved or smaller" not in read.text("th")  # nothing is moved
    assert {"layer", "recomputed"} <= set(read.text("th"))


def test_tensors_of_no_layer_are_the_steps_own():
    assert "the step itself" in Reader(layer_section([], None, [""])).text("td")


def test_a_dots_name_stands_on_the_side_that_has_room():
    axis = Axis("x", str)
    picture = scatter([Dot("left", 1.0, 1.0), Dot("right", 10.0, 2.0)], axis, axis, what="two dots")
    names = {a["x"]: a["class"] for a in Reader(picture).all("text", "name")}
    first, second = sorted(names, key=float)
    assert (names[first], names[second]) == ("name", "name end")
    assert float(second) < WIDTH


def names_of(picture):
    """The names that are drawn, each with its box, a letter of 12 pixels counted as 6.5 wide."""
    read, found = Reader(picture), {}
    for name, a in zip((t for t in read.text("text") if t.startswith("run ")), read.all("text", "name"), strict=True):
        left = float(a["x"]) - (6.5 * len(name) if "end" in a["class"] else 0)
        found[name] = (left, float(a["y"]) - 10, left + 6.5 * len(name), float(a["y"]) + 2)
    return found


def meet(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


CORNERS = [(x, y) for x in (1.0, 10.0) for y in (1.0, 10.0)]


@pytest.mark.parametrize("near", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("corner", CORNERS)
def test_names_of_dots_that_are_close_do_not_meet(corner, near):
    cluster = [(corner[0] + near * i, corner[1] + near * (i % 2)) for i in range(3)]
    places = [*CORNERS, *cluster]
    axis = Axis("x", str)
    picture = scatter([Dot(f"run {i} of the lot", *place) for i, place in enumerate(places)], axis, axis, what="dots")
    boxes = names_of(picture)
    assert len(boxes) == len(places)
    assert not [(a, b) for a in boxes for b in boxes if a < b and meet(boxes[a], boxes[b])]
    dots = [(float(dot["cx"]), float(dot["cy"])) for dot in Reader(picture).all("circle", "dot")]
    assert not [(a, d) for a, box in boxes.items() for d in dots if meet(box, (d[0] - 5, d[1] - 5, d[0] + 5, d[1] + 5))]


def test_of_many_dots_in_one_place_all_names_are_under_the_pointer():
    axis = Axis("x", str)
    picture = scatter([Dot(f"run {i}", 1.0, 1.0) for i in range(30)], axis, axis, what="dots")
    boxes = names_of(picture)
    assert 4 <= len(boxes) < 30
    assert not [(a, b) for a in boxes for b in boxes if a < b and meet(boxes[a], boxes[b])]
    assert sum(title.startswith("run ") for title in Reader(picture).text("title")) == 30


def test_what_stands_in_a_run_cannot_break_the_page(parts):
    evil = "</script><script>alert(1)</script>"
    record = replace(parts.record, name=evil, settings={evil: evil}, events=(evil,))
    read = Reader(run_page(RunParts(record, parts.plan)))
    assert len(read.all("script")) == len(Reader(run_page(parts)).all("script"))
    assert not any(data.strip() == "alert(1)" for data in read.text("script"))


def test_events_layers_and_settings_are_told(parts, text, read):
    assert "A warning about &lt;b&gt;layers&lt;/b&gt;." in text
    cells = read.text("td")
    assert {"Conv2d", "rank", "0.4"} <= set(cells)
    assert any("recompute" in p for p in read.text("p"))
    assert "1.00" in cells  # measured over predicted peak


def test_an_optimizers_step_that_takes_more_than_the_plan_is_what_was_predicted(parts):
    gib = 2 * parts.plan.peak_bytes / 2**30
    history = (
        {"epoch": 0.0, "step": 1.0, "ctdr/predicted_peak_gib": gib, "ctdr/peak_memory_gib": gib},
        {"epoch": 0.0, "step": 2.0, "ctdr/predicted_peak_gib": gib / 4, "ctdr/peak_memory_gib": gib / 4},
    )
    cells = Reader(run_page(RunParts(replace(parts.record, history=history), parts.plan))).text("td")
    at = cells.index("peak of a step")
    assert cells[at + 1 : at + 4] == [format_bytes(gib * 2**30)] * 2 + ["1.00"]


def test_a_run_that_measured_nothing_has_no_columns_for_it(parts):
    text = run_page(RunParts(replace(parts.record, history=()), parts.plan))
    heads = Reader(text).text("th")
    assert "predicted" in heads
    assert not {"measured", "measured / predicted"} & set(heads)
    assert "A measured time" not in text


def test_the_options_of_a_choice_are_a_table_and_a_picture_of_those_that_fit(parts):
    options = (
        Option("dense", 1000, 2**21, 1.25, True, 0.0, True, "the dense model fits"),
        Option("50% of the seconds", 500, 2**20, 0.75, False, 0.5, False),
        Option("75% of the seconds", 750, 2**22, 0.0, False, 0.25, False),
    )
    read = Reader(run_page(RunParts(replace(parts.record, options=options), parts.plan)))
    cells = read.text("td")
    at = cells.index("dense")
    assert cells[at : at + 6] == ["dense", "1,000", "2.0 MiB", "x1.25 timed", "0", "chosen"]
    assert {"x0.75 predicted", "at least 4.0 MiB", "no plan fits"} <= set(cells)
    assert [dot["class"] for dot in read.all("circle", "dot") if dot["r"] == "6"] == ["dot c1", "dot c0"]
    assert any(told.endswith(" Chosen: the dense model fits.") for told in read.text("p"))
    assert "Options under the budget" not in run_page(RunParts(parts.record, parts.plan))


def test_a_run_without_a_plan_or_layers_has_a_page(parts):
    read = Reader(run_page(RunParts(RunRecord("bare"))))
    assert read.text("h1") == ["bare"]
    assert not read.all("svg")
    dense = Reader(run_page(RunParts(replace(parts.record, layers=()))))
    assert dense.all("path", "curve")


def test_a_long_curve_is_thinned_and_keeps_its_peak():
    history = tuple(
        {"epoch": 0.0, "step": float(i), "ctdr/samples_per_s": 99.0 if i == 77_777 else 1.0} for i in range(100_000)
    )
    text = run_page(RunParts(RunRecord("long", history=history)))
    (chart,) = charts(Reader(text))
    assert len(chart["curves"][0]["xs"]) < 3000
    assert max(chart["curves"][0]["ys"]) == 99
    assert len(text.encode()) < 2_000_000
