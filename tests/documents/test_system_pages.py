"""Every policy, method and codec has a page made from its file's head."""

import re

import pytest

from benchmarks.system_pages import KINDS, PACKAGE, pages, registered
from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.memory import POLICIES
from ctdr_lightning.memory.codecs import CODECS

PAGES = pages()
REGISTERED = {"systems": POLICIES, "methods": METHODS, "codecs": CODECS}


@pytest.mark.parametrize("place", KINDS)
def test_every_registered_name_has_a_page_that_uses_it(place):
    told = {name for path in PACKAGE.glob(f"{KINDS[place].folder}/*.py") for name in registered(path)}
    assert set(REGISTERED[place]) <= told
    for name in REGISTERED[place]:
        assert any(f'"{name}")' in text for where, text in PAGES.items() if where.startswith(f"{place}/"))


@pytest.mark.parametrize("where", [where for where in PAGES if not where.endswith("index.md")])
def test_a_page_tells_its_source(where):
    assert re.search(r"arXiv|No paper|\b(19|20)\d\d\b|Complexity|Exact|bit", PAGES[where]), PAGES[where]
    assert re.match(r"# [\w, ]+\n\n\S", PAGES[where])


def test_the_indices_link_every_page():
    for place in KINDS:
        linked = set(re.findall(r"\]\((\w+\.md)\)", PAGES[f"{place}/index.md"]))
        assert {f"{place}/{name}" for name in linked} == {
            where for where in PAGES if where.startswith(place) and not where.endswith("index.md")
        }
        assert len(linked) > 5
