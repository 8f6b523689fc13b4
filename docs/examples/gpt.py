"""A small GPT that reads bytes: it learns the docstrings of Python's standard library."""

import argparse
import builtins
import collections
import inspect

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def docstrings(length: int) -> Tensor:
    found = (inspect.getdoc(thing) for module in (builtins, collections, inspect) for thing in vars(module).values())
    text = "\n".join(doc for doc in found if doc).encode()
    n_samples = len(text) // length
    return torch.tensor(list(text[: n_samples * length])).view(n_samples, length)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--memory-budget", default="50MiB")
    args = parser.parse_args()

    seed_everything(0)
    data = DataLoader(docstrings(length=129), batch_size=32, shuffle=True, drop_last=True)
    # A budget alone: the layers are decomposed only if recomputation is not enough.
    ctdr = CTDRCallback(memory_budget=args.memory_budget)
    trainer = Trainer(max_epochs=args.epochs, callbacks=[ctdr], log_every_n_steps=10)
    trainer.fit(GPT(), data)


if __name__ == "__main__":
    main()
