"""A page for each policy, method and codec, made from the head of its file while mkdocs builds.

mkdocs calls ``on_files`` (see ``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ctdr_lightning"
NOT_ONE = {"__init__", "base", "registry", "groups", "packing"}  # files that hold no policy, method or codec


@dataclass(frozen=True)
class Kind:
    """One folder of files, each on one system.

    Attributes:
        title: Of the index page.
        folder: Within the package.
        use: How one is asked for; ``{name}`` is its name.
        about: A sentence.
    """

    title: str
    folder: str
    use: str
    about: str


KINDS = {
    "systems": Kind(
        "Policies one by one", "memory/policies", 'CTDRCallback(policy="{name}")',
        "Each published system is one file. What it reproduces, models and leaves out stands at its head, and here.",
    ),
    "methods": Kind(
        "Methods one by one", "decomposition/methods", 'CTDRCallback(method="{name}")',
        "Each way to write a layer as a chain of smaller ones is one file. Its head is this page.",
    ),
    "codecs": Kind(
        "Codecs one by one", "memory/codecs", 'CTDRCallback(codecs="{name}")',
        "Each way to write a tensor in fewer bytes is one file. Its head is this page.",
    ),
}  # fmt: skip


def pages() -> dict[str, str]:
    """Markdown by its place under ``docs/``."""
    found = {}
    for place, kind in KINDS.items():
        rows = []
        for path in sorted((PACKAGE / kind.folder).glob("*.py")):
            if path.stem not in NOT_ONE:
                head = ast.get_docstring(ast.parse(path.read_text())) or ""
                found[f"{place}/{path.stem}.md"] = _page(path, head, kind)
                rows.append(f"| [{path.stem}]({path.stem}.md) | {head.splitlines()[0].replace('|', '/')} |")
        table = "\n".join(["| file | does |", "|---|---|", *rows])
        found[f"{place}/index.md"] = f"# {kind.title}\n\n{kind.about}\n\n{table}\n"
    return found


def _page(path: Path, head: str, kind: Kind) -> str:
    names = registered(path)
    uses = "\n".join(kind.use.format(name=name) for name in names)
    shown = ["```python", uses, "```"] if names else []
    where = f"`{path.relative_to(ROOT)}`"
    return "\n".join([f"# {', '.join(names) or path.stem}", "", _markdown(head), "", *shown, "", f"File: {where}", ""])


def registered(path: Path) -> list[str]:
    """The names under which a file registers something, or that its classes bear."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register"):
            found += [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if isinstance(node, ast.ClassDef):
            found += list(_name_of(node))
    return list(dict.fromkeys(found))


def _name_of(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        target = (
            line.target
            if isinstance(line, ast.AnnAssign)
            else line.targets[0]
            if isinstance(line, ast.Assign)
            else None
        )
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id == "name" and isinstance(value, ast.Constant):
            yield str(value.value)


def _markdown(head: str) -> str:
    """A file's head as paragraphs: hanging lines joined, its labels in bold, double backticks as single ones."""
    text = re.sub(r"\n {2,}", " ", head).replace("``", "`")
    text = re.sub(r"(?m)^(Paper|Reproduced|Modelled|Left out|Claimed|Changed|Complexity|No paper)\b", r"\n**\1**", text)
    return re.sub(r"\. (Reproduced|Modelled|Left out|Claimed|Changed|Complexity):", r".\n\n**\1**:", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those that mkdocs found."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files
