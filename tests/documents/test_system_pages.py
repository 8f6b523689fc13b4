"""The site: home is the README, every policy, method and codec has a page, the menu names all pages."""

import re

import pytest

from benchmarks.system_pages import KINDS, PACKAGE, ROOT, pages, registered
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
        assert any(re.search(rf'"{name}"}}?\)', text) for where, text in PAGES.items() if where.startswith(f"{place}/"))


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


def test_home_is_the_readme_and_its_links_lead_to_pages():
    home, readme = PAGES["index.md"], (ROOT / "README.md").read_text()
    assert re.sub(r"\]\([^)]*\)|[\[\]]", "", home) == re.sub(r"\]\([^)]*\)|[\[\]]", "", readme)
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", home)
    assert "budgets.md" in linked
    assert [target for target in linked if not (ROOT / "docs" / target).exists()] == []


def test_the_menu_names_every_page_once():
    named = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(written | {where for where in PAGES if where.endswith("index.md")})


def slug(heading):
    """The anchor that mkdocs gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.stem
)
def test_a_link_into_a_page_meets_a_heading(path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text()):
        page = (path.parent / target).resolve() if target else path
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        assert anchor in map(slug, headings), f"{target}#{anchor}"
