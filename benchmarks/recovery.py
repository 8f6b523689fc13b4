"""Recovery on scikit-learn's digits: one cut against four, at equal fine-tuning after a cut and at equal epochs in all.

``python -m benchmarks.recovery`` trains the digits network densely, then decomposes every convolution but the first to
an eighth of its parameters in a Trainer with `CTDRCallback`. The learning rate is held and falls to zero over the last
two epochs. It prints test accuracy after the last epoch, one row a way, one column a seed, and the median and the mean.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import warnings
from statistics import mean, median

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.digits import BATCH, RATE, Digits, augment, network, train
from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Distillation, Phase

FALLING = 2
Way = tuple[list[int], int, Distillation | None]
TEACHER = Distillation(module="net")
WAYS: dict[str, Way] = {
    "one cut, 2 epochs": ([0], 2, None),
    "one cut, 8 epochs": ([0], 8, None),
    "one cut, 8 epochs, teacher": ([0], 8, TEACHER),
    "cuts at 0, 2, 4, 6 of 8": ([0, 2, 4, 6], 8, None),
    "cuts at 0, 1, 2, 3 of 8": ([0, 1, 2, 3], 8, None),
    "the same, teacher": ([0, 1, 2, 3], 8, TEACHER),
}


class FineTuned(LightningModule):
    """The digits network with SGD at a small rate that falls to zero in the end.

    Args:
        net: Trained.
        held: Steps before the rate falls.
        falling: Steps over which it falls.
    """

    def __init__(self, net: nn.Module, held: int, falling: int) -> None:
        super().__init__()
        self.net, self.held, self.falling = net, held, falling

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of shifted and noisy images."""
        return functional.cross_entropy(self.net(augment(batch[0])), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy in percent."""
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean() * 100)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict]]:
        """Nesterov momentum; the rate is held, then half a cosine down to zero."""
        optimizer = torch.optim.SGD(self.parameters(), RATE, momentum=0.9, weight_decay=1e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _share(self, step: int) -> float:
        fallen = min(max(step - self.held, 0) / self.falling, 1)
        return (1 + math.cos(math.pi * fallen)) / 2


def recover(dense: nn.Module, data: Digits, way: Way, rank: float, seed: int) -> tuple[float, int]:
    """Decompose and fine-tune a copy; returns accuracy in percent and parameters."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    images = {name: TensorDataset(data.images[part], data.labels[part]) for name, part in
              (("train", data.train), ("test", data.test))}  # fmt: skip
    loader = DataLoader(images["train"], BATCH, shuffle=True)
    cut_epochs, epochs, distill = way
    recovery = Recovery(cut_epochs=cut_epochs, phases=[Phase(1)], distill=distill)
    module = FineTuned(copy.deepcopy(dense), (epochs - FALLING) * len(loader), FALLING * len(loader))
    callback = CTDRCallback(
        rank=rank,
        method="tucker",
        select=["net.*", "!net.0", "!net.17"],
        recovery=recovery,
        policy="keep",
        verbose=False,
    )
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(images["test"], 1000))
    return float(trainer.callback_metrics["accuracy"]), sum(p.numel() for p in module.parameters())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", type=float, default=0.125)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data, found, sizes = Digits(), {way: [] for way in WAYS}, {}
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        np.random.seed(seed)
        dense = network()
        train(dense, data, 15, 0.1)
        for way, options in WAYS.items():
            accuracy, sizes[way] = recover(dense, data, options, arguments.rank, seed)
            found[way].append(accuracy)
    n_dense = sum(p.numel() for p in network().parameters())
    print(f"digits, Tucker at {arguments.rank} of each layer; percent by seed, median, mean")
    for way, column in found.items():
        row = "  ".join(f"{accuracy:6.2f}" for accuracy in column)
        print(f"{way:28} {row}   {median(column):6.2f}  {mean(column):6.2f}   parameters x1/{n_dense / sizes[way]:.1f}")


if __name__ == "__main__":
    main()
