"""The nets of ``benchmarks.planner``: published ones at the batch sizes of a large GPU, recorded on fake tensors.

``TUNED`` are the nets that the planner's constants were chosen on, ``HELD_OUT`` those that judge them. Each entry makes
``(module, inputs, step)``. Nothing is computed with: only shapes count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.nets import Net, gpt2, net_r, net_rn18, net_t, vision


def _sum(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sum()


def _unit(inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm and ReLU; keeps height and width where ``stride`` is 1."""
    sizes = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = (sizes[0] // 2, sizes[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, sizes, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Branches(nn.Module):
    """Branches of one input, side by side along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(N, C, H, W)``, out ``(N, sum of the branches' channels, H', W')``."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _inception(channels: int, narrow: int, rows: int) -> nn.Module:
    """An Inception block of four branches; the second and third factor their kernel into rows and columns."""
    fourth = channels // 4
    second = nn.Sequential(
        _unit(channels, narrow, 1), _unit(narrow, narrow, (1, rows)), _unit(narrow, fourth, (rows, 1))
    )
    third = nn.Sequential(
        _unit(channels, narrow, 1), _unit(narrow, narrow, (rows, 1)), _unit(narrow, narrow, (1, rows)),
        _unit(narrow, narrow, (rows, 1)), _unit(narrow, fourth, (1, rows)),
    )  # fmt: skip
    pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(channels, fourth, 1))
    return Branches(_unit(channels, fourth, 1), second, third, pooled)


def _reduction(channels: int) -> nn.Module:
    """Halves height and width and adds channels."""
    half = channels // 2
    return Branches(
        _unit(channels, half, 3, 2), nn.Sequential(_unit(channels, half, 1), _unit(half, half, 3, 2)),
        nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip


def inception(batch: int, size: int) -> Net:
    """Like Inception-v4: 4, 7 and 3 blocks of four branches with two reductions between."""
    stem = [_unit(3, 32, 3, 2), _unit(32, 64, 3), nn.MaxPool2d(3, 2, 1), _unit(64, 192, 3), _unit(192, 384, 3, 2)]
    blocks: list[nn.Module] = [_inception(384, 96, 3) for _ in range(4)]
    blocks += [_reduction(384), *(_inception(768, 192, 7) for _ in range(7))]
    blocks += [_reduction(768), *(_inception(1536, 384, 3) for _ in range(3))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1536, 10)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(batch, 3, size, size), _sum


class UNet(nn.Module):
    """Ronneberger et al., 2015, with BatchNorm: each level down is carried over to the level up of its size."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.downs = nn.ModuleList(self._double(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.rises = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for i, o in pairs)
        self.ups = nn.ModuleList(self._double(i, o) for i, o in pairs)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(_unit(inputs, outputs, 3), _unit(outputs, outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(N, 3, H, W)``, out ``(N, 2, H, W)``; height and width divisible by ``2 ** depth``."""
        carried = []
        for down in self.downs:
            x = down(x if not carried else nn.functional.max_pool2d(x, 2))
            carried.append(x)
        for rise, up, across in zip(self.rises, self.ups, carried[-2::-1], strict=True):
            x = up(torch.cat([across, rise(x)], dim=1))
        return self.head(x)


def unet(batch: int, size: int, width: int = 64) -> Net:
    """A U-Net of four levels."""
    return UNet(width, 4), torch.randn(batch, 3, size, size), _sum


class LSTM(nn.Module):
    """Layers of LSTM cells, written out step by step."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(T, N, width)``."""
        hidden = [torch.zeros_like(x[0]) for _ in self.gates]
        cell = list(hidden)
        last = []
        for token in x:
            for i, gate in enumerate(self.gates):
                take, forget, give, new = gate(torch.cat([token, hidden[i]], dim=1)).chunk(4, dim=1)
                cell[i] = forget.sigmoid() * cell[i] + take.sigmoid() * new.tanh()
                token = hidden[i] = give.sigmoid() * cell[i].tanh()
            last.append(token)
        return torch.stack(last)


def lstm(tokens: int, batch: int, width: int, layers: int = 2) -> Net:
    """Unrolled over the tokens: a few ops a token, all of them small."""
    return LSTM(width, layers), torch.randn(tokens, batch, width), _sum


class TreeLSTM(nn.Module):
    """Tai et al., 2015: a binary tree of cells; a node reads both children's hidden and cell states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaf, self.gates = nn.Linear(width, 2 * width), nn.Linear(2 * width, 5 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(leaves, N, width)``, out ``(N, width)``; the number of leaves is a power of two."""
        return self._state(x)[0]

    def _state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if len(x) == 1:
            hidden, cell = self.leaf(x[0]).chunk(2, dim=1)
            return hidden.tanh(), cell
        (h1, c1), (h2, c2) = (self._state(half) for half in x.chunk(2))
        take, left, right, give, new = self.gates(torch.cat([h1, h2], dim=1)).chunk(5, dim=1)
        cell = take.sigmoid() * new.tanh() + left.sigmoid() * c1 + right.sigmoid() * c2
        return give.sigmoid() * cell.tanh(), cell


def tree_lstm(leaves: int, batch: int, width: int) -> Net:
    """A complete binary tree."""
    return TreeLSTM(width), torch.randn(leaves, batch, width), _sum


TUNED: dict[str, Callable[[], Net]] = {
    "R": net_r,
    "RN18": net_rn18,
    "ResNet-50": partial(vision, "resnet50", 192, 224),
    "DenseNet-121": partial(vision, "densenet121", 96, 224),
    "DenseNet small": partial(vision, "densenet121", 8, 64),
    "U-Net": partial(unet, 16, 512),
    "GPT-2 12": partial(gpt2, 12, 768, 12, 16, 1024),
    "TreeLSTM": partial(tree_lstm, 64, 4096, 1024),
    "MobileNet-v2": partial(vision, "mobilenet_v2", 256, 224),
}
HELD_OUT: dict[str, Callable[[], Net]] = {
    "T": net_t,
    "ResNet-152": partial(vision, "resnet152", 96, 224),
    "GoogLeNet": partial(vision, "googlenet", 256, 224, aux_logits=False, init_weights=False),
    "GoogLeNet small": partial(vision, "googlenet", 8, 64, aux_logits=False, init_weights=False),
    "Inception": partial(inception, 128, 299),
    "U-Net small": partial(unet, 2, 64, 16),
    "VGG-16": partial(vision, "vgg16_bn", 128, 224),
    "GPT-2 48": partial(gpt2, 48, 1600, 25, 2, 1024),
    "LSTM": partial(lstm, 128, 2048, 1024),
    "LSTM small": partial(lstm, 32, 16, 64),
    "TreeLSTM small": partial(tree_lstm, 32, 8, 64),
}
NETS = TUNED | HELD_OUT
