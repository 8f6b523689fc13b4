"""Recovery on scikit-learn's digits: one cut against four, at equal fine-tuning after a cut and at equal epochs in all.

``python -m benchmarks.recovery`` trains the digits network densely, then decomposes every convolution but the first to
an eighth of its parameters in a Trainer with `CTDRCallback`. The learning rate falls to zero after each cut and starts
anew with the next. It prints test accuracy after the last epoch, one row a way, one column a seed, and the median.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from statistics import median

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.digits import BATCH, RATE, Digits, augment, network, train
from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Distillation, Phase

PER_CUT = 2
Way = tuple[int, int, Distillation | None]
WAYS: dict[str, Way] = {
    "one-shot": (1, PER_CUT, None),
    "one-shot, epochs of staged": (1, 4 * PER_CUT, None),
    "staged": (4, PER_CUT, None),
    "staged, teacher": (4, PER_CUT, Distillation(module="net")),
}  # fmt: skip


class FineTuned(LightningModule):
    """The digits network with SGD at a small rate that falls to zero.

    Args:
        net: Trained.
        steps: Steps after each cut.
    """

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__()
        self.net, self.steps = net, steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of shifted and noisy images."""
        return functional.cross_entropy(self.net(augment(batch[0])), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy in percent."""
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean() * 100)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict]]:
        """Nesterov momentum, cosine to zero after each cut."""
        optimizer = torch.optim.SGD(self.parameters(), RATE, momentum=0.9, weight_decay=1e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def recover(dense: nn.Module, data: Digits, way: Way, rank: float, seed: int) -> tuple[float, int]:
    """Decompose and fine-tune a copy; returns accuracy in percent and parameters."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    images = {name: TensorDataset(data.images[part], data.labels[part]) for name, part in
              (("train", data.train), ("test", data.test))}  # fmt: skip
    loader = DataLoader(images["train"], BATCH, shuffle=True)
    n_cuts, epochs, distill = way
    recovery = Recovery(cut_epochs=[epochs * cut for cut in range(n_cuts)], phases=[Phase(epochs)], distill=distill)
    module = FineTuned(copy.deepcopy(dense), epochs * len(loader))
    callback = CTDRCallback(
        rank=rank,
        method="tucker",
        select=["net.*", "!net.0", "!net.17"],
        recovery=recovery,
        policy="keep",
        verbose=False,
    )
    trainer = Trainer(
        max_epochs=n_cuts * epochs, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
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
    print(f"digits, Tucker at {arguments.rank} of each layer, {PER_CUT} epochs after a cut; percent by seed, median")
    for way, column in found.items():
        row = "  ".join(f"{accuracy:6.2f}" for accuracy in column)
        print(f"{way:28} {row}   {median(column):6.2f}   parameters x1/{n_dense / sizes[way]:.1f}")


if __name__ == "__main__":
    main()
