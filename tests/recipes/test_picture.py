from PIL import Image

from ctdr_recipes.measure import MemoryUse
from ctdr_recipes.picture import draw_memory


def test_draws_every_curve_with_its_peak_into_a_new_folder(tmp_path):
    uses = {
        "dense": MemoryUse((0.0, 0.1, 0.2), (10 << 20, 90 << 20, 10 << 20)),
        "ours": MemoryUse((0.0, 0.1, 0.15), (5 << 20, 30 << 20, 5 << 20)),
    }
    path = tmp_path / "new" / "memory.svg"
    draw_memory(uses, path, "One step")
    drawn = path.read_text()
    for text in ("90 MiB", "30 MiB", "dense", "ours", "One step"):
        assert f"<!-- {text} -->" in drawn


def test_a_png_is_as_wide_as_a_page(tmp_path):
    path = tmp_path / "memory.png"
    draw_memory({"dense": MemoryUse((0.0, 1.0), (1 << 20, 2 << 20))}, path, "One step")
    assert Image.open(path).width > 1000
