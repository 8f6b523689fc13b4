"""A fit under a policy about zeros records them, plans with them, and is the plain fit, to the bit."""

from itertools import chain, pairwise

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback, Memory
from tests.memory.harness import noise
from tests.parts import fit


class Rectified(LightningModule):
    """Convolutions with ReLUs, most of whose outputs are zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        widths = [1, *[16] * 8]
        layers = [(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in pairwise(widths)]
        self.net = nn.Sequential(*chain(*layers), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 4))
        for layer in self.net:
            if isinstance(layer, nn.Conv2d):
                nn.init.constant_(layer.bias, -0.2)
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(*callbacks):
    module = Rectified()
    data = TensorDataset(noise(24, 1, 64, 64, seed=1).cpu(), torch.arange(24, device="cpu") % 4)
    fit(module, *callbacks, data=(DataLoader(data, 8), None), max_epochs=1, limit_val_batches=0)
    return module


@pytest.fixture(scope="module")
def plain():
    return fitted()


@pytest.mark.parametrize(
    ("policy", "memory", "zeros"),
    [
        ("cdma", {"offload": "disk"}, True),
        ("cswap", {"offload": "disk"}, True),
        ("gist", {}, True),
        ("vdnn_all", {"offload": "disk", "codecs": "exact"}, True),
        ("cdma", {"offload": "disk", "codecs": None}, False),
    ],
)
def test_a_fit_is_the_plain_fit(policy, memory, zeros, plain, tmp_path):
    folder = {"disk_folder": tmp_path} if "offload" in memory else {}
    callback = CTDRCallback(rank=None, policy=policy, memory=Memory(**memory, **folder), verbose=False)
    found = fitted(callback)
    made = callback.run.memory.session.plan
    assert made.away, "nothing was put away"
    assert any(v.zeros > 0.5 for v in made.trace.values) is zeros
    if policy in ("cdma", "gist"):
        assert any("zvc" in action.codecs for action in made.away.values()) is zeros
    assert all(map(torch.equal, plain.losses, found.losses))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name
