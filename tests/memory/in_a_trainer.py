"""A step of the tables in a Trainer."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.memory.harness import rng_state
from tests.parts import fit


class OneStep(LightningModule):
    """A net and its step, from the net to a loss, as a LightningModule."""

    def __init__(self, net, step):
        super().__init__()
        self.net, self.step = net, step
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.step(self.net)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(make, n_steps, *callbacks):
    """Everything that some steps of a Trainer leave behind."""
    torch.manual_seed(0)
    module = OneStep(*make())
    torch.manual_seed(1)
    batches = DataLoader(torch.zeros(n_steps, 1, device="cpu"), 1)
    fit(module, *callbacks, data=(batches, None), max_epochs=1, limit_val_batches=0)
    left = {n: t.detach().clone() for n, t in module.state_dict().items()}
    return left | {f"loss {i}": loss for i, loss in enumerate(module.losses)} | {"rng": rng_state()}
