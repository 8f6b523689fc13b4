"""Small steps of many kinds for a GPU; run as a module it prints their traces as JSON."""

import json
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ctdr_lightning.memory import record_fake


class Block(nn.Module):
    """A transformer's block that keeps to no library's module: causal attention, dropout, GELU."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.heads, self.dropout = heads, dropout

    def forward(self, x, mask=None):
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=mask is None)
        x = x + self.out(found.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self, masked=False, width=64, heads=4, dropout=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(2))
        self.head, self.masked = nn.Linear(width, 100, bias=False), masked

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        square = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        mask = square.to(tokens.device) if self.masked else None
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = kind(24, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1]).square().mean()


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(24, 32), nn.GRUCell(32, 32)

    def forward(self, x):
        state = hidden = None
        for step in x.unbind(1):
            state = self.lstm(step, state)
            hidden = self.gru(state[0], hidden)
        return hidden.square().mean()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(32, 8, 1), nn.InstanceNorm2d(8), nn.Dropout2d(0.1), nn.Conv2d(8, 1, 1))

    def forward(self, x):
        high = self.down(x)
        joined = torch.cat([high, self.up(self.deep(high))], 1)
        small = F.interpolate(joined, scale_factor=0.5, mode="bilinear")
        target = torch.zeros(len(x), 1, *small.shape[2:], device=x.device)
        return F.binary_cross_entropy_with_logits(self.out(small), target)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, 7)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):  # as rotary embeddings do
            x = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        shares = F.softmax(self.head(self.layer(x)).mean(1), -1, dtype=torch.float32)
        return F.nll_loss(shares.clamp(min=1e-6).log(), torch.zeros(len(x), dtype=torch.long, device=x.device))


def called(net, batch):
    return net(batch)


IMAGES, WORDS, ROWS = partial(torch.empty, 4, 3, 16, 16), partial(torch.zeros, 4, 24, dtype=torch.long), (8, 6)
STEPS = {
    "gpt": (Gpt, WORDS),
    "gpt_masked": (partial(Gpt, masked=True), WORDS),
    "gpt_wide": (partial(Gpt, width=320, heads=1), WORDS),
    "gpt_odd": (partial(Gpt, width=60, heads=5, dropout=0.0), WORDS),
    "lstm": (partial(Recurrent, nn.LSTM), partial(torch.empty, *ROWS, 24)),
    "gru": (partial(Recurrent, nn.GRU), partial(torch.empty, *ROWS, 24)),
    "cells": (Cells, partial(torch.empty, *ROWS, 24)),
    "unet": (UNet, IMAGES),
    "encoder": (Encoder, partial(torch.empty, 8, 6, 64)),
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")


def traces(name, gpu="a100"):
    """The step's traces by precision, as JSON."""
    build, batch = STEPS[name]
    torch.manual_seed(0)
    with torch.device("meta"):
        net, inputs = build(), batch()
    return {p: record_fake(net, inputs, called, device=gpu, precision=p).to_json() for p in PRECISIONS}


if __name__ == "__main__":
    print(json.dumps({name: traces(name) for name in sys.argv[1:]}))
