"""The page around the sections: title, style and a little script, all in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files

from ctdr_lightning.pages.markup import Markup, element, joined

# Nothing may be loaded or sent, whatever a run's name or an error's text holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, lead: str, sections: Iterable[object]) -> str:
    """A whole HTML document."""
    here = files("ctdr_lightning.pages")
    style, script = ((here / name).read_text() for name in ("page.css", "page.js"))
    head = joined(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            element("title", title),
            Markup(f"<style>\n{style}</style>"),
        ]
    )
    top = [element("h1", title), element("p", lead, class_="lead")]
    body = element("body", *top, *sections, Markup(f"<script>\n{script}</script>"))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n{body}</html>\n'


def section(title: str, *content: object) -> Markup:
    """A part with a heading."""
    return element("section", element("h2", title), *content)


def facts(values: Mapping[str, str]) -> Markup:
    """Numbers in boxes: value over name."""
    return element(
        "div", *(element("div", element("b", v), element("span", n)) for n, v in values.items()), class_="facts"
    )
