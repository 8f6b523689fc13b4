"""Small nets to compile: each gives a module and a step without arguments."""

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.nets import Attention, BasicBlock
from ctdr_lightning.memory.values.tensors import storage_bytes


def residual():
    torch.manual_seed(0)
    blocks = [BasicBlock(8, 8, 1, inplace=True) for _ in range(3)]
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return net, torch.randn(8, 3, 16, 16), torch.arange(8) % 4


def transformer():
    torch.manual_seed(0)
    blocks = [Attention(32, 2) for _ in range(3)]
    net = nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Dropout(0.1), nn.Linear(32, 50), nn.Flatten(0, 1))
    tokens = torch.randint(0, 50, (8, 32))
    return net, tokens, tokens.flatten()


class Split(nn.Module):
    """Attention on the three parts of one projection: its backward reads three views of one tensor."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        query, key, value = self.project(x).split(32, dim=-1)
        heads = [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in (query, key, value)]
        return x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def split():
    torch.manual_seed(0)
    net = nn.Sequential(*[Split() for _ in range(3)], nn.Linear(32, 4), nn.Flatten(0, 1))
    return net, torch.randn(8, 32, 32), torch.arange(256) % 4


def perceptron():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 4)), torch.randn(256, 64), torch.arange(256) % 4


NETS = {"residual": residual, "transformer": transformer, "perceptron": perceptron, "split": split}


class Step:
    """A net's step: compiled as a whole, its loss included."""

    def __init__(self, name):
        self.net, self.x, self.labels = NETS[name]()
        tensors = (*self.net.parameters(), *self.net.buffers(), self.x, self.labels)
        self.standing_bytes = storage_bytes(tensors)
        self._buffers = [buffer.clone() for buffer in self.net.buffers()]

    def loss(self):
        return F.cross_entropy(self.net(self.x), self.labels)

    def compiled(self, backend, **options):
        torch._dynamo.reset()
        step = torch.compile(self.loss, backend=backend, **options)
        return lambda: step().backward()

    def gradients(self, run):
        """The gradients of a step, and the buffers after it."""
        torch.manual_seed(1)
        self.net.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(self.net.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        run()
        return [p.grad.clone() for p in self.net.parameters()] + [b.clone() for b in self.net.buffers()]
