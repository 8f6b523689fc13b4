"""A small network with its step and batches, which the tests of the joint choice share."""

import torch
from torch import nn
from torch.nn import functional


def network(dropout=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def batches(count=2, size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 12, 12, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


def step(net, batch):
    return functional.cross_entropy(net(batch[0]), batch[1])
