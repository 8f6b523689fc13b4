"""The README's Python, run as it stands on a small model."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ctdr_lightning.decomposition import FactorizedLayer
from ctdr_recipes.classifier import Classifier, cnn
from ctdr_recipes.data import DigitsData

README = (Path(__file__).parents[2] / "README.md").read_text()
TRAINER, FUNCTIONS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _run(block, **names):
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_trainer_example_is_short_exact_and_learns():
    assert len([line for line in TRAINER.splitlines() if line.strip()]) <= 8
    model = Classifier(cnn([32, 32, 32], [1, 2, 1]), 10, partial(torch.optim.AdamW, lr=0.01))
    names = _run(TRAINER, model=model, data=DigitsData(16, 8))
    assert names["ctdr"].fit is None  # no ranks are chosen
    assert not any(isinstance(layer, FactorizedLayer) for layer in model.modules())
    trainer = names["trainer"]
    assert trainer.callback_metrics["val/acc"] > 0.7


def test_the_functions_example_runs_and_gives_dense_layers_back():
    model = cnn([8, 16, 16], [1, 2, 1])
    images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    names = _run(FUNCTIONS, model=model, step=lambda: F.cross_entropy(model(images), labels))
    assert not any(isinstance(layer, FactorizedLayer) for layer in model.modules())
    assert names["simulate"](names["trace"], names["memory_plan"]).peak_bytes < names["trace"].resident_bytes + 10**8
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.ndim == 1)
