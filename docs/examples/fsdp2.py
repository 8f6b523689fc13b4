"""FSDP2 through ModelParallelStrategy: a transformer whose blocks are sharded, with a memory plan on each process."""

import argparse

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback


class Transformer(LightningModule):
    """Reads the 64 pixels of a digit as a sequence."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.pixel, self.position = nn.Linear(1, width), nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)
        self.is_sharded = False

    def configure_model(self) -> None:
        if not self.is_sharded:  # Lightning calls it again for validate, test and predict
            for unit in (*self.blocks, self):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])
            self.is_sharded = True

    def forward(self, images: Tensor) -> Tensor:
        x = self.pixel(images) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--memory-budget", default="32MiB")
    args = parser.parse_args()

    seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).unsqueeze(2)
    data = TensorDataset(pixels, torch.tensor(labels))
    strategy = ModelParallelStrategy(
        data_parallel_size=args.devices,
        tensor_parallel_size=1,
        process_group_backend=None if torch.cuda.is_available() else "gloo",
    )
    # The budget is that of each process. With rank=0.25 layers would be decomposed before they are sharded.
    ctdr = CTDRCallback(memory_budget=args.memory_budget, rank=None)
    trainer = Trainer(
        max_epochs=args.epochs, strategy=strategy, devices=args.devices, callbacks=[ctdr], log_every_n_steps=5
    )
    trainer.fit(Transformer(), DataLoader(data, batch_size=32, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
