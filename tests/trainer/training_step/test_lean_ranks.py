"""Lean steps on two processes: the weights are those of plain training, up to rounding."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from tests import forks, parts
from tests.trainer.training_step import test_lean, test_tiled
from tests.trainer.training_step.runs import events_of


def language_model():
    return test_lean.LanguageModel(), DataLoader(torch.randint(test_lean.WORDS, (4 * test_lean.BATCH, 300)), 4)


def wide():
    module = test_tiled.Wide(dropout=0.2)
    return module, DataLoader(TensorDataset(torch.randn(6, test_tiled.LENGTH, test_tiled.WIDTH)), 1)


CASES = {
    "outputs": (language_model, test_lean.TIGHT, "output of head is not made"),
    "tiles": (wide, test_tiled.TIGHT, "run in 4 tiles each"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(tmp_path, case):
    make, budget, said = CASES[case]

    def train(folder, name, *callbacks):
        torch.manual_seed(0)
        module, data = make()
        trainer = parts.fit(
            module, *callbacks, data=(data, None), strategy="ddp", devices=2, max_epochs=1, limit_val_batches=0
        )
        told = [words for callback in callbacks for words in events_of(callback) if said in words]
        torch.save([module.state_dict(), told], folder / f"{name}{trainer.global_rank}.pt")

    callback = CTDRCallback(memory_budget=budget, rank=None, verbose=False)
    assert forks.run(train, tmp_path, "plain", ranks=2) == [0, 0]
    assert forks.run(train, tmp_path, "lean", callback, ranks=2) == [0, 0]
    for rank in (0, 1):
        (plain, _), (lean, told) = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("plain", "lean"))
        assert told
        for name, wanted in plain.items():
            difference, size = (t.double().norm() for t in (lean[name] - wanted, wanted))
            assert difference <= 1e-5 * size + 1e-6, name
