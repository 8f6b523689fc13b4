"""Small data that the recipes' tests write themselves."""

import pytest
from PIL import Image


@pytest.fixture
def image_root(tmp_path):
    for split in ("train", "val"):
        for value, label in ((30, "dark"), (220, "light")):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (40, 30), (value + number,) * 3).save(folder / f"{number}.png")
    return tmp_path
