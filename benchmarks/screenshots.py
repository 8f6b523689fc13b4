"""Screenshots of a run's report for docs/report.md, in light and dark mode; needs Chromium on the path.

python -m benchmarks.screenshots                       # runs the quickstart with rank="auto", then its pictures
python -m benchmarks.screenshots --report report.html  # of a report that is there
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCHEMES = {"light": 1, "dark": 0}
WIDTH, HEIGHT, SCALE, MARGIN = 1040, 1600, 1.4, 18
# By the picture's name: the heading of the section, and those parts of it that are hidden.
SHOTS = {
    "options": ("Options under the budget", "figure"),
    "memory": ("Memory over the step", ""),
    "layers": ("Layers", ""),
    "epochs": ("Over the epochs", "figure ~ figure"),
}
CHANGES = {"rank=0.3": 'rank="auto"', '"epochs": 2': '"epochs": 8', "max_epochs=2": "max_epochs=8"}
ONLY = """<script>
for (const part of document.body.children) {{
  const heading = part.querySelector("h2");
  part.hidden = !(heading && heading.textContent === "{heading}") && !({with_head} && !part.matches("section"));
}}
for (const part of document.querySelectorAll("{hidden}")) part.hidden = true;
</script>
<style>[hidden] {{ display: none !important; }} body {{ padding: 12px; }} section > h2 {{ margin-top: 8px; }}</style>
</body>"""


def run_quickstart(folder: Path) -> Path:
    """Run the first two parts of the quickstart with the ranks left to the callback, and for more epochs.

    Args:
        folder: Where it runs.

    Returns:
        Its report.
    """
    page = (ROOT / "docs" / "quickstart.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2])
    for before, after in CHANGES.items():
        if before not in code:
            raise ValueError(f"the quickstart has no {before!r} any more")
        code = code.replace(before, after)
    (folder / "quickstart.py").write_text(code)
    subprocess.run([sys.executable, "quickstart.py"], cwd=folder, check=True)
    return next(folder.rglob("report.html"))


def shoot(report: Path, name: str, scheme: str, path: Path) -> None:
    """One section of a report as a picture of 64 colours, without the empty rest of the window."""
    from PIL import Image, ImageChops

    heading, hidden = SHOTS[name]
    only = ONLY.format(heading=heading, hidden=hidden or "none", with_head=str(name == "memory").lower())
    browser = next(filter(None, map(shutil.which, BROWSERS)), BROWSERS[0])
    with tempfile.TemporaryDirectory() as own:
        page, taken = Path(own, "page.html"), Path(own, "taken.png")
        page.write_text(report.read_text().replace("</body>", only))
        options = (
            "headless no-sandbox disable-gpu hide-scrollbars disable-quic no-first-run disable-background-networking "
            f"disable-component-update disable-sync force-device-scale-factor={SCALE} window-size={WIDTH},{HEIGHT} "
            f"blink-settings=preferredColorScheme={SCHEMES[scheme]} user-data-dir={own}/user screenshot={taken}"
        )
        command = [browser, *(f"--{option}" for option in options.split()), page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        whole = Image.open(taken).convert("RGB")
    empty = Image.new("RGB", whole.size, whole.getpixel((0, 0)))
    _, _, _, bottom = ImageChops.difference(whole, empty).getbbox() or (0, 0, 0, whole.height)
    part = whole.crop((0, 0, whole.width, min(bottom + MARGIN, whole.height)))
    path.parent.mkdir(parents=True, exist_ok=True)
    part.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take every picture.

    Returns:
        0.
    """
    parser = ArgumentParser(prog="python -m benchmarks.screenshots", description="Screenshots of a run's report.")
    parser.add_argument("--report", type=Path, help="a report that is there; by default the quickstart is run")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "img")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = options.report or run_quickstart(Path(folder))
        for name in SHOTS:
            for scheme in SCHEMES:
                path = options.folder / f"report-{name}-{scheme}.png"
                shoot(report, name, scheme, path)
                print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
