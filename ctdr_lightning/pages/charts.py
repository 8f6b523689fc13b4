"""Curves, bars and points as plain SVG. The page defines the colours; each picture carries its numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctdr_lightning.pages.markup import Markup, element, joined

WIDTH, HEIGHT = 920, 320
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 16, 44
# Two of each bucket are kept, so that a curve has at most this many points: three a pixel's width.
MOST_POINTS = 2600
COLOURS = 8  # as many as page.css has
_RADIUS = 6  # of a dot
# Of a name in page.css's 12 pixels: the mean width of a letter in a wide typeface, and the height about its base line.
_LETTER, _ASCENT, _DESCENT = 7.2, 11, 3
# Base lines of names below their dot's centre: above it, below it, beside it, then a line farther at a time.
_LINES_DOWN = (-9, 17, 4, -23, 31, -37, 45, -51, 59)
Format = Callable[[float], str]


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        name: In the legend.
        xs: Increasing.
        ys: As many; NaN where nothing is known.
        steps: Whether a value holds until the next one, as memory does.
        colour: Index of its colour.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    steps: bool = False
    colour: int = 0


@dataclass(frozen=True)
class Dot:
    """One point of a scatter.

    Attributes:
        name: Text under the pointer.
        x: Across.
        y: Up.
        colour: Index of its colour.
        link: Anchor that a click leads to; none where empty.
    """

    name: str
    x: float
    y: float
    colour: int = 0
    link: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        label: Its name with the unit.
        show: Writes a value of it.
        from_zero: Whether it begins at zero.
        binary: Whether round values are those in powers of 1024.
        whole: Whether there is nothing between two whole numbers, as with epochs.
    """

    label: str
    show: Format
    from_zero: bool = True
    binary: bool = False
    whole: bool = False


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.first + share * (self.last - self.first), 1)


def line_chart(
    curves: Sequence[Curve], x: Axis, y: Axis, *, lines: Sequence[tuple[str, float]] = (), what: str
) -> Markup:
    """Several curves on one axis, each with its highest point.

    Args:
        curves: At least one with a point.
        x: The axis across.
        y: The axis upwards.
        lines: ``(name, y)`` of levels to draw across.
        what: A sentence for those who hear the page.
    """
    curves = [_thinned(_known(curve)) for curve in curves]
    across = _scale([v for c in curves for v in c.xs], x, LEFT, WIDTH - RIGHT)
    up = _scale([v for c in curves for v in c.ys] + [level for _, level in lines], y, HEIGHT - BOTTOM, TOP)
    drawn = [_path(curve, across, up) for curve in curves]
    marks = [_highest(curve, across, up, y.show) for curve in curves]
    levels = [_level(name, level, up, y.show) for name, level in lines]
    points = [{"name": c.name, "xs": [_short(v) for v in c.xs], "ys": [_short(v) for v in c.ys]} for c in curves]
    data = {"curves": points, "x": [across.low, across.high], "x_label": x.label, "y_label": y.label}
    picture = _svg(_grid(x, y, across, up), *levels, *drawn, *marks, _cursor(), what=what)
    legend = _legend([(curve.name, curve.colour) for curve in curves])
    return element("figure", legend, picture, _json(data), class_="chart")


def scatter(dots: Sequence[Dot], x: Axis, y: Axis, *, what: str) -> Markup:
    """Points, each with its name where one fits beside it; the pointer shows all names."""
    across = _scale([dot.x for dot in dots], x, LEFT, WIDTH - RIGHT)
    up = _scale([dot.y for dot in dots], y, HEIGHT - BOTTOM, TOP + 14)
    centres = [(across(dot.x), up(dot.y)) for dot in dots]
    taken = [_Box(cx - _RADIUS, cy - _RADIUS, cx + _RADIUS, cy + _RADIUS) for cx, cy in centres]
    drawn = []
    for dot, (cx, cy) in zip(dots, centres, strict=True):
        title = element("title", f"{dot.name}: {x.label} {x.show(dot.x)}, {y.label} {y.show(dot.y)}")
        mark = element("circle", title, r=_RADIUS, class_=f"dot c{dot.colour % COLOURS}", cx=cx, cy=cy)
        label = _beside_dot(dot.name, cx, cy, taken)
        drawn.append(element("a", mark, label, href=f"#{dot.link}") if dot.link else joined([mark, label]))
    return element("figure", _svg(_grid(x, y, across, up), *drawn, what=what), class_="scatter")


@dataclass(frozen=True)
class _Box:
    """A rectangle of the picture that is taken."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def _beside_dot(name: str, x: float, y: float, taken: list[_Box]) -> Markup | None:
    """A dot's name in the first free place, which is then taken; None where there is none.

    The side with more room comes before the other one, places near the dot before those a line away.
    """
    left = x > (LEFT + WIDTH - RIGHT) / 2
    for down in _LINES_DOWN:
        for end in (left, not left):
            at_x, at_y = x - 9 if end else x + 9, y + down
            begin = at_x - _LETTER * len(name) if end else at_x
            box = _Box(begin, at_y - _ASCENT, begin + _LETTER * len(name), at_y + _DESCENT)
            inside = box.left >= LEFT and box.right <= WIDTH and box.top >= 0 and box.bottom <= HEIGHT - BOTTOM
            if inside and not any(box.meets(other) for other in taken):
                taken.append(box)
                return element("text", name, x=at_x, y=at_y, class_="name end" if end else "name")
    return None


def stacked_bar(parts: Sequence[tuple[str, float, str]], whole: float, *, what: str) -> Markup:
    """One bar made of parts; each shows its text under the pointer and leads to its row on a click.

    Args:
        parts: ``(text, size, anchor)``, the anchor empty where it leads nowhere.
        whole: The size that fills the width.
        what: A sentence for those who hear the page.
    """
    scale = (WIDTH - 2) / max(whole, 1)
    left, drawn = 1.0, []
    for index, (text, size, link) in enumerate(parts):
        width = size * scale
        shape = element(
            "rect", element("title", text), x=round(left, 2), y=1, width=round(max(width, 0.3), 2), height=42,
            class_=f"part {'' if link else 'plain'} p{index % 2}",
        )  # fmt: skip
        drawn.append(element("a", shape, href=f"#{link}") if link else shape)
        left += width
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} 44", role="img", aria_label=what, class_="bar")


def _svg(*drawn: object, what: str) -> Markup:
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=what)


def _legend(names: Sequence[tuple[str, int]]) -> Markup:
    entries = [element("span", element("i", class_=f"c{colour % COLOURS}"), name) for name, colour in names]
    return element("figcaption", *entries)


def _short(value: float) -> float:
    """Six digits: more cannot be seen, and make the page three times as long."""
    return float(f"{value:.6g}")


def _json(data: object) -> Markup:
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{text}</script>')


def _cursor() -> Markup:
    return element("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM, x1=-9, x2=-9)


def _path(curve: Curve, across: _Scale, up: _Scale) -> Markup:
    points = [(across(x), up(y)) for x, y in zip(curve.xs, curve.ys, strict=True)]
    words = [f"M{points[0][0]} {points[0][1]}"] if points else []
    for px, py in points[1:]:
        words.append(f"H{px}V{py}" if curve.steps else f"L{px} {py}")
    return element("path", d="".join(words), class_=f"curve c{curve.colour % COLOURS}", data_name=curve.name)


def _highest(curve: Curve, across: _Scale, up: _Scale, show: Format) -> Markup | None:
    if not curve.ys:
        return None
    index = max(range(len(curve.ys)), key=curve.ys.__getitem__)
    at_x, at_y = across(curve.xs[index]), up(curve.ys[index])
    mark = element("circle", element("title", f"{curve.name}: {show(curve.ys[index])}"), cx=at_x, cy=at_y, r=3.5,
                   class_=f"dot c{curve.colour % COLOURS}")  # fmt: skip
    side = "end" if at_x > WIDTH - 120 else "start"
    text = element("text", show(curve.ys[index]), x=at_x + (-7 if side == "end" else 7), y=at_y - 5, class_="name",
                   text_anchor=side)  # fmt: skip
    return joined([mark, text])


def _level(name: str, level: float, up: _Scale, show: Format) -> Markup:
    line = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(level), y2=up(level), class_="level")
    return joined([line, element("text", f"{name} {show(level)}", x=WIDTH - RIGHT, y=up(level) - 4, class_="tick end")])


def _grid(x: Axis, y: Axis, across: _Scale, up: _Scale) -> Markup:
    drawn = []
    for value in _ticks(up.low, up.high, y):
        drawn.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(value), y2=up(value), class_="grid"))
        drawn.append(element("text", y.show(value), x=LEFT - 8, y=up(value) + 4, class_="tick end"))
    for value in _ticks(across.low, across.high, x):
        drawn.append(element("text", x.show(value), x=across(value), y=HEIGHT - BOTTOM + 17, class_="tick middle"))
    drawn.append(element("text", x.label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="tick middle"))
    drawn.append(element("text", y.label, x=-(TOP + HEIGHT - BOTTOM) / 2, y=12, transform="rotate(-90)",
                         class_="tick middle"))  # fmt: skip
    return joined(drawn)


def _ticks(low: float, high: float, axis: Axis) -> list[float]:
    """Round values between two: three to eight of them, fewer where they are whole."""
    rough = max((high - low) / 5, float(axis.whole))
    unit = 1024 ** math.floor(math.log(rough, 1024)) if axis.binary and rough > 1 else 1
    power = unit * 10 ** math.floor(math.log10(rough / unit))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _scale(values: Sequence[float], axis: Axis, first: float, last: float) -> _Scale:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(low, 0.0) if axis.from_zero else low
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    if first > last:  # upwards: room for the text over the highest point
        high += 2 * room
        low = low if axis.from_zero else low - room
    elif not axis.from_zero or high <= low:
        low, high = low - room, high + room
    return _Scale(low, high if high > low else low + 1, first, last)


def _known(curve: Curve) -> Curve:
    pairs = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return Curve(curve.name, [x for x, _ in pairs], [y for _, y in pairs], curve.steps, curve.colour)


def _thinned(curve: Curve) -> Curve:
    """At most ``MOST_POINTS`` points: the lowest and the highest of each bucket, in order, so that no peak is lost."""
    n = len(curve.xs)
    if n <= MOST_POINTS:
        return curve
    size = math.ceil(2 * n / MOST_POINTS)
    kept = {0, n - 1}
    for begin in range(0, n, size):
        bucket = range(begin, min(begin + size, n))
        kept |= {min(bucket, key=curve.ys.__getitem__), max(bucket, key=curve.ys.__getitem__)}
    order = sorted(kept)
    return Curve(curve.name, [curve.xs[i] for i in order], [curve.ys[i] for i in order], curve.steps, curve.colour)
