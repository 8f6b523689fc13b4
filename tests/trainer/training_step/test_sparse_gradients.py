"""Sparse gradients under a budget: the same as without an engine, and counted."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_lightning.trainer.groups import grouped
from tests import parts

WORDS, WIDTH = 200, 16


class Words(LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])

    def training_step(self, batch, batch_idx):
        return self.net(self.embedding(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class ByHand(Words):
    """An optimizer for sparse gradients, and one for the others."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SparseAdam(self.embedding.parameters()), torch.optim.Adam(self.net.parameters())]


def train(kind, *callbacks, **options):
    parts.seed_everything(0, verbose=False)
    module = kind()
    data = DataLoader([torch.randint(WORDS, (64, 8)) for _ in range(6)], batch_size=None), None
    parts.fit(module, *callbacks, data=data, max_epochs=1, **options)
    return module.state_dict()


@pytest.mark.parametrize(
    ("kind", "options", "ours"),
    [
        (Words, {}, {}),
        (Words, {"accumulate_grad_batches": 2}, {}),
        (Words, {}, {"keep_gradients": True}),
        (Words, {}, {"optimizer_step": "in_backward"}),
        (Words, {}, {"offload": "disk"}),
        (ByHand, {}, {}),
    ],
)
@pytest.mark.parametrize("budget", ["60MiB", "300KiB"])
def test_a_run_with_sparse_gradients_is_as_without_us(kind, options, ours, budget):
    callback = CTDRCallback(rank=None, memory_budget=budget, verbose=False, **grouped(ours))
    assert parts.same(train(kind, callback, **options), train(kind, **options))


def test_the_parts_of_sparse_tensors_are_counted():
    dense = torch.eye(8)
    coo = torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 4), (8, 4))  # not coalesced
    assert storage_bytes([dense]) == 256
    assert storage_bytes([coo]) == 2 * 8 + 2 * 16
    for compressed in (dense.to_sparse_csr(), dense.to_sparse_csc()):  # their indices are parts of larger storages
        assert 9 * 8 + 8 * 8 + 8 * 4 <= storage_bytes([compressed]) < 2 * 256
