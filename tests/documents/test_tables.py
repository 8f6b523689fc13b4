"""What is made from something else is what that makes of it."""

import re

import pytest

from benchmarks.documents import PARTS, ROOT, drifted, filled, notebook_of

PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def test_no_document_differs_from_its_data():
    assert drifted() == []


def test_a_document_that_names_a_benchmark_shows_its_data():
    named = {(path, name) for path, text in PAGES.items() for name in re.findall(r"python -m benchmarks\.(\w+)", text)}
    assert not {(path.name, name) for path, name in named if f"docs/data/{name}.json" not in PAGES[path]}


def test_all_data_is_shown_and_every_table_that_can_be_made_is():
    shown = {name for text in PAGES.values() for name in re.findall(r"from docs/data/([\w-]+)\.json", text)}
    assert {path.stem for path in (ROOT / "docs" / "data").glob("*.json")} == shown
    assert set(PARTS) == {name.partition("-")[0] for name in shown}  # of one machine after another


def test_the_notebook_is_the_page():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert notebook_of(page) == (ROOT / "docs" / "quickstart.ipynb").read_text()
    assert notebook_of(page.replace("rank=0.3", "rank=0.4")) != notebook_of(page)


def test_an_edited_number_of_the_evaluation_is_written_over():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    row = page.index("| LeNet | 4096 |")
    edited = page[:row] + page[row:].replace("4096", "4097", 1)
    assert edited != page
    assert filled(edited) == page


@pytest.mark.parametrize(("path", "shown"), [("README.md", "1,940,970"), ("docs/joint.md", "x0.93")])
def test_an_edited_figure_of_the_demo_or_the_joint_benchmark_is_written_over(path, shown):
    page = (ROOT / path).read_text()
    assert page.count(shown) == 1
    assert filled(page.replace(shown, "1")) == page


def test_a_block_is_made_anew_from_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.documents.PARTS", {"ours": lambda text, part: f"{part} of {text}"})
    (tmp_path / "ours.json").write_text("the data")
    page = "before\n<!-- from ours.json: table -->\ntyped by hand\n<!-- end -->\nafter\n"
    new = filled(page, tmp_path)
    assert new == "before\n<!-- from ours.json: table -->\n\ntable of the data\n<!-- end -->\nafter\n"
    assert filled(new, tmp_path) == new
