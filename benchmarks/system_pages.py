"""Pages made while mkdocs builds: home from the README, and one for each policy, method and codec from its file's head.

mkdocs calls ``on_files`` (see ``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ctdr_lightning"
NOT_ONE = {"__init__", "base", "registry", "groups", "packing"}  # files that hold no policy, method or codec


@dataclass(frozen=True)
class Kind:
    """One folder of the package, each of whose files is on one system; ``{name}`` in ``use`` is how it is asked for."""

    title: str
    folder: str
    use: str
    about: str


KINDS = {
    "systems": Kind(
        "Policies one by one", "memory/policies", 'CTDRCallback(policy="{name}")',
        "Each published system is one file. Its head says what is reproduced, modelled and left out.",
    ),
    "methods": Kind(
        "Methods one by one", "decomposition/methods", 'CTDRCallback(rank=0.25, ranks={{"method": "{name}"}})',
        "Each way to write a layer as a chain of smaller ones is one file. Its head is this page.",
    ),
    "codecs": Kind(
        "Codecs one by one", "memory/codecs", 'CTDRCallback(memory_budget="8GiB", memory={{"codecs": "{name}"}})',
        "Each way to write a tensor in fewer bytes is one file. Its head is this page.",
    ),
}  # fmt: skip


def home() -> str:
    """The README as a page of ``docs/``; a link to a file outside of it becomes its text."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    link = r"\[([^]]+)\]\((?!https?:)([^)#]+)[^)]*\)"
    return re.sub(link, lambda found: found[0] if (ROOT / "docs" / found[2]).exists() else found[1], text)


def pages() -> dict[str, str]:
    """Markdown by its place under ``docs/``."""
    found = {"index.md": home()}
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
    named = r'\.register\(\s*"(\w+)"|^    name(?:: [^=]+)? = "(\w+)"'
    return list(dict.fromkeys("".join(found) for found in re.findall(named, path.read_text(), re.MULTILINE)))


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
