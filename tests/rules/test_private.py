"""Lightning is used by its public face only, and everything that is loaded is loaded as tensors and primitives."""

import re
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "ctdr_lightning").rglob("*.py"))
OWNERS = "trainer|pl_module|strategy|fit_loop|epoch_loop|val_loop|precision_plugin|logger|callback|datamodule|lightning"
PRIVATE = re.compile(rf"\b(?:{OWNERS})\._(?!_)\w+|from (?:lightning|pytorch_lightning)[\w.]*\._")
UNSAFE = re.compile(r"\bpickle\.|(?<![.\w])(?:eval|exec)\(|yaml\.load\(|torch\.load\((?![^)]*weights_only=True)")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_private_lightning_attribute_and_no_unsafe_load(path):
    text = path.read_text()
    lightning = [hit for hit in PRIVATE.findall(text) if "lightning" in text]
    assert not lightning
    assert not UNSAFE.findall(text)


def test_the_patterns_find_what_they_are_for():
    assert PRIVATE.search("trainer._logger_connector")
    assert PRIVATE.search("from lightning.pytorch._private import x")
    assert UNSAFE.search("torch.load(path)")
    assert UNSAFE.search("eval(text)")
    assert not UNSAFE.search("net.eval()")
    assert not UNSAFE.search('torch.load(path, map_location="cpu", weights_only=True)')
