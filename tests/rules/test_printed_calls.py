"""Every call of the callback and of its groups that README, docs and messages print names arguments that exist."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from ctdr_lightning import CTDRCallback, Memory, Ranks

ROOT = Path(__file__).parents[2]
CALLED = {called.__name__: set(inspect.signature(called).parameters) for called in (CTDRCallback, Memory, Ranks)}
PAGES = ["README.md", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]


def calls(text):
    """The name and the named arguments of each call, nested ones apart."""
    for found in re.finditer(rf"\b({'|'.join(CALLED)})\(", text):
        end, depth = found.end(), 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield found[1], set(re.findall(r"(?:^|[(,\s])(\w+)=(?!=)", _flat(text[found.end() : end - 1])))


def _flat(arguments):
    """Arguments without those of calls and mappings among them."""
    while re.search(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]", arguments):
        arguments = re.sub(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]", "", arguments)
    return re.sub(r"\"[^\"]*\"|'[^']*'", "''", arguments)


def test_calls_are_found_with_their_own_arguments_alone():
    text = 'x = CTDRCallback("8GiB", rank="error=0.1", ranks=Ranks(data=None), recovery={"a": f(b=1)})'
    assert list(calls(text)) == [("CTDRCallback", {"rank", "ranks", "recovery"}), ("Ranks", {"data"})]


@pytest.mark.parametrize("page", PAGES)
def test_printed_calls_have_arguments_that_exist(page):
    wrong = [(name, given - CALLED[name]) for name, given in calls((ROOT / page).read_text()) if given - CALLED[name]]
    assert wrong == []


def test_messages_print_calls_that_exist():
    texts = {path: path.read_text() for path in (ROOT / "ctdr_lightning").rglob("*.py")}
    strings = [
        (path.name, node.value)
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    wrong = [(path, name) for path, text in strings for name, given in calls(text) if given - CALLED[name]]
    assert wrong == []
    assert sum(1 for _, text in strings for _ in calls(text)) > 10
