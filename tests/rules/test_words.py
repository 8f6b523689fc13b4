"""Docstrings and comments are plain technical English: no question as a noun, no expression of another language's."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    path for folder in ("ctdr_lightning", "recipes", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]
QUESTIONS = ("What", "Whether", "Where", "How")
FORBIDDEN = re.compile(
    r"\b(hangs? on|stands?(?! (for|in for)\b)|is told|is said|none of|(?<!long )(?<!soon )as it is|besides)\b",
    re.IGNORECASE,
)
MOST_WHATS_PER_1000_WORDS = 2


@cache
def docstrings(path):
    """``(node, text)`` of each docstring."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return [(node, text) for node in nodes if (text := ast.get_docstring(node))]


@cache
def prose(path):
    """Docstrings and comments of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [text for _, text in docstrings(path)] + comments


def returns_bool(node):
    returns = getattr(node, "returns", None)
    return returns is not None and ast.unparse(returns).startswith(("bool", "TypeGuard"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_begins_with_a_question_unless_it_returns_the_answer(path):
    asked = [text for node, text in docstrings(path) if text.split()[0] in QUESTIONS and not returns_bool(node)]
    assert asked == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_forbidden_expression_is_used(path):
    assert [text for text in prose(path) if FORBIDDEN.search(text)] == []


def test_a_noun_names_a_thing():
    """Rather than ``what``, which hides it."""
    words = [word.lower() for path in MODULES for text in prose(path) for word in re.findall(r"[a-z']+", text, re.I)]
    assert len(words) > 30_000
    assert 1000 * words.count("what") / len(words) < MOST_WHATS_PER_1000_WORDS


def test_the_expressions_are_found():
    for text in ("It hangs on the link.", "what stands there", "The user is told.", "none of the step", "as it is"):
        assert FORBIDDEN.search(text)
    assert not FORBIDDEN.search("A name stands for a value; a fake stands in for it, beside it.")
