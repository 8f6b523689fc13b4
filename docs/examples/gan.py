"""A GAN of handwritten digits: two networks, two optimizers, manual optimization."""

import argparse

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback


def generator(latent: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(latent, 4 * width * 16), nn.Unflatten(1, (4 * width, 4, 4)), nn.BatchNorm2d(4 * width), nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 1, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip


def critic(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 3, 1, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * width, 1),
    )  # fmt: skip


class GAN(LightningModule):
    def __init__(self, latent: int = 32, width: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent, self.generator, self.critic = latent, generator(latent, width), critic(width)

    def training_step(self, images: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        fakes = self.generator(torch.randn(len(images), self.latent, device=self.device))

        self.toggle_optimizer(second)
        loss = F.softplus(-self.critic(images)).mean() + F.softplus(self.critic(fakes.detach())).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

        self.toggle_optimizer(first)
        loss_of_fakes = F.softplus(-self.critic(fakes)).mean()
        first.zero_grad()
        self.manual_backward(loss_of_fakes)
        first.step()
        self.untoggle_optimizer(first)
        self.log_dict({"critic": loss, "generator": loss_of_fakes}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), 2e-4, betas=(0.5, 0.999)) for net in (self.generator, self.critic)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--memory-budget", default="13MiB")
    args = parser.parse_args()

    seed_everything(0)
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32).unsqueeze(1)
    data = DataLoader(F.interpolate(images, size=(16, 16)), batch_size=128, shuffle=True, drop_last=True)
    # Manual optimization: the layers stay dense, and each of the two backward passes follows the plan.
    ctdr = CTDRCallback(memory_budget=args.memory_budget)
    Trainer(max_epochs=args.epochs, callbacks=[ctdr], log_every_n_steps=5).fit(GAN(), data)


if __name__ == "__main__":
    main()
