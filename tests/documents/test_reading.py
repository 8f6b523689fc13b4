"""Pages read with ease: short sentences and cells, an introduction first, and words that users know."""

import re
from pathlib import Path

import pytest

from tests.rules.test_words import FORBIDDEN

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
MOST_WORDS_IN_A_SENTENCE = 35
MOST_WORDS_IN_A_CELL = 20
MOST_WORDS_IN_AN_INTRODUCTION = 60

GENERATED = re.compile(r"<!-- from \S+: \w+ -->.*?<!-- end -->", re.DOTALL)
FRONT_MATTER = r"\A(?:---\n(?s:.*?)\n---\n)?"
NO_TEXT = re.compile(rf"{FRONT_MATTER}|```(?s:.*?)```|<!--(?s:.*?)-->|^:::.*\n(?: +.*\n)*|^!!!.*$", re.MULTILINE)
INTRODUCTION = re.compile(rf"{FRONT_MATTER}\s*# .*\n\s*(?=\S)(?!#|\||!|<|:::|```|[*+-] |\d+\. )((?s:.+?))(?:\n\n|\Z)")
HEADING, ROW, ITEM = re.compile(r"#+ "), re.compile(r"\|"), re.compile(r"(?:[*+-]|\d+\.) ")
SENTENCE_END = re.compile(r"(?<=[.!?])[\")]*\s+(?=[^a-z])")
FRAGMENT = re.compile(r"(?:It|Its|They|Their|These|Those|That|Which|Here|And|But|So|Or|Also|Then)\b|This (?!page\b)")
UNKNOWN = re.compile(
    r"\b(made (again|anew)|of (ours|yours)|wins? (\w+ ){0,3}back|a wish|hears?|bought|moving and compressing"
    r"|noted, not made|lean(er)?|told|twins?)\b",
    re.IGNORECASE,
)


def written(page):
    """A page without the parts that a benchmark generates."""
    return GENERATED.sub("\n", (ROOT / page).read_text())


def lines(text):
    """Lines of a text without code, comments and front matter."""
    return [line.strip() for line in NO_TEXT.sub("\n", text).splitlines()]


def cells(text):
    """The words of each cell of the tables."""
    rows = [line.strip("|") for line in lines(text) if ROW.match(line)]
    return [words(cell) for row in rows for cell in re.split(r"(?<!\\)\|", row)]


def paragraphs(text):
    """Paragraphs and items of lists, each as one line."""
    found = [""]
    for line in lines(text):
        if not line or HEADING.match(line) or ROW.match(line):
            found.append("")
        elif ITEM.match(line):
            found.append(ITEM.sub("", line, count=1))
        else:
            found[-1] += f" {line}"
    return [plain(paragraph) for paragraph in found if paragraph]


def plain(text):
    """A text without markup; an expression in backticks counts as a word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]+`", "`code`", text).replace("*", "").strip()


def words(text):
    return [word for word in plain(text).split() if re.search(r"\w", word)]


def sentences(text):
    return [sentence for paragraph in paragraphs(text) for sentence in SENTENCE_END.split(paragraph)]


def introduction(text):
    """The first paragraph, if nothing is between it and the title."""
    found = INTRODUCTION.match(text)
    return paragraphs(found[1])[0] if found else ""


def long_sentences(text):
    return [sentence for sentence in sentences(text) if len(words(sentence)) > MOST_WORDS_IN_A_SENTENCE]


def long_cells(text):
    return [" ".join(cell) for cell in cells(text) if len(cell) > MOST_WORDS_IN_A_CELL]


def unknown_words(text):
    read = [*sentences(text), *(" ".join(cell) for cell in cells(text))]
    return [part for part in read if FORBIDDEN.search(part) or UNKNOWN.search(part)]


def flaws_of_introduction(text):
    first = introduction(text)
    opening = " ".join(SENTENCE_END.split(first)[:2])
    flaws = {
        "no paragraph of text follows the title": not first,
        "begins with a pronoun or in mid-thought": FRAGMENT.match(first),
        "its last sentence has no end": not re.search(r"[.:]\)?$", first),
        "its first two sentences are long": len(words(opening)) > MOST_WORDS_IN_AN_INTRODUCTION,
    }
    return [flaw for flaw, is_there in flaws.items() if is_there]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    assert long_sentences(written(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_cells_are_short_in_generated_tables_too(page):
    assert long_cells((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_first_paragraph_introduces_the_page(page):
    assert flaws_of_introduction(written(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_words_are_known_to_users(page):
    assert unknown_words(written(page)) == []


LONG = " ".join(["word"] * 36)


def test_flaws_are_found():
    assert long_sentences(f"Short. {LONG.capitalize()}. `a b` end.\n\n* {LONG}\n* short") == [
        f"{LONG.capitalize()}.",
        LONG,
    ]
    assert long_sentences(f"A line\n{' word' * 34}.") == [f"A line {' word' * 34}.".replace("  ", " ")]
    assert long_cells(f"| `{LONG}` | [{LONG}](a.md) |\n|---|---|\n| a \\| b | c |") == [LONG]
    assert unknown_words("A tensor is made again.\n\n| the user is told |\n") == [
        "A tensor is made again.",
        "the user is told",
    ]
    for text in (f"```python\n{LONG}\n```", f"# {LONG}", f"<!-- from a.json: table -->\n{LONG}\n<!-- end -->"):
        assert long_sentences(GENERATED.sub("", text)) == []


@pytest.mark.parametrize(
    "text",
    ["# A\n\n## B\n\nText.", "# A\n```\n1\n```\nText.", "# A\nIt does.", "# A\nA fragment", f"# A\n{LONG}. A {LONG}."],
)
def test_flaws_of_an_introduction_are_found(text):
    assert flaws_of_introduction(text)
    assert flaws_of_introduction("---\na: b\n---\n# A\nThis page is short:\n```\n1\n```\n") == []
