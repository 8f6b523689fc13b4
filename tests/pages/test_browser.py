"""The page on a run as a real browser shows it: headless Chromium, curves looked for by their colours.

Run by ``make test-browser``: a browser is no Python package, so that the default tests cannot ask for one.
"""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from PIL import Image

from ctdr_lightning.pages.run_page import run_page
from tests.pages.parts import planned_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1200, 1500)
# --c0, --c1, --c2 and --back of page.css
THEMES = {
    "light": ("1", [(0x8B, 0x94, 0x9E), (0x1A, 0x73, 0xE8), (0xD9, 0x48, 0x0F)], (255, 255, 255)),
    "dark": ("0", [(0x8B, 0x94, 0x9E), (0x58, 0xA6, 0xFF), (0xFF, 0x92, 0x2B)], (0x0D, 0x11, 0x17)),
}


def browse(tmp_path, *words):
    """What headless Chromium prints."""
    browser = next((found for found in map(shutil.which, NAMES) if found), None)
    assert browser, f"none of {NAMES} is on the path"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}/own"]
    found = subprocess.run([browser, *options, *words], check=True, capture_output=True, timeout=120, text=True)
    return found.stdout


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_the_three_curves_are_drawn(tmp_path, theme):
    scheme, colours, back = THEMES[theme]
    (tmp_path / "page.html").write_text(run_page(planned_run()))
    picture = tmp_path / "page.png"
    browse(
        tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={SIZE[0]},{SIZE[1]}",
        f"--screenshot={picture}", (tmp_path / "page.html").as_uri(),
    )  # fmt: skip
    pixels = Image.open(picture).convert("RGB")
    assert pixels.getpixel((2, 2)) == back
    counts = {colour: n for n, colour in pixels.getcolors(SIZE[0] * SIZE[1])}
    # A line of 1.6 pixels over half of the page's width has some hundred pixels of its full colour.
    assert all(counts.get(colour, 0) > 200 for colour in colours), {c: counts.get(c, 0) for c in colours}


@pytest.mark.browser
def test_a_narrow_window_shows_the_page_without_scrolling_sideways_and_its_labels_stay_readable(tmp_path):
    measured = """<script>const label = document.querySelector("text.tick").getBoundingClientRect();
    document.title = [document.documentElement.scrollWidth, innerWidth, label.height].join(" ");</script></body>"""
    (tmp_path / "page.html").write_text(run_page(planned_run()).replace("</body>", measured))
    shown = browse(tmp_path, "--window-size=400,900", "--dump-dom", (tmp_path / "page.html").as_uri())
    wide, window, label = map(float, re.search(r"<title>(\S+) (\S+) (\S+)</title>", shown).groups())
    assert wide <= window <= 500
    assert label >= 8  # pixels


@pytest.mark.browser
def test_a_laptops_window_shows_every_column_of_the_layers(tmp_path):
    parts = planned_run(share=0.6)
    asked = {"kind": "NonDynamicallyQuantizableLinear", "ranks": (128, 256), "reason": "dense is as fast and no larger"}
    sizes = {"parameters_before": 23_592_960, "parameters_after": 1_179_648}
    long = [replace(layer, name=f"encoder.{layer.name}", **asked, **sizes) for layer in parts.record.layers]
    parts = replace(parts, record=replace(parts.record, layers=tuple(long)))
    measured = """<script>const tables = [...document.querySelectorAll("div.scroll")];
    const table = tables.find(t => t.innerText.includes("recomputed"));
    document.title = [table.scrollWidth, table.clientWidth].join(" ");</script></body>"""
    (tmp_path / "page.html").write_text(run_page(parts).replace("</body>", measured))
    shown = browse(tmp_path, "--window-size=1200,900", "--dump-dom", (tmp_path / "page.html").as_uri())
    wide, seen = map(float, re.search(r"<title>(\S+) (\S+)</title>", shown).groups())
    assert wide <= seen
