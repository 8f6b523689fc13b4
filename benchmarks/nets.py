"""The nets that the benchmarks share.

Each entry of a table makes ``(module, inputs, step)``; ``step(module, inputs)`` gives a scalar loss. ``NETS`` are small
and exactly reproducible: R, T, and published ones at small sizes. ``TUNED`` and ``HELD_OUT`` are recorded on fake
tensors, published ones at the batch sizes of a large GPU: those that the planner's constants were chosen on, and those
that judge them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.vision_import import import_torchvision

Net = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
# Input and output channels and stride.
R_BLOCKS = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, inplace: bool) -> None:
        super().__init__()
        self.c1, self.b1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.c2, self.b2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.down = nn.Identity() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(N, inputs, H, W)``, out ``(N, outputs, H / stride, W / stride)``."""
        y = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
        return self.relu(y + self.down(x))


class Attention(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int = 128, heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(N, T, width)``."""
        n, t, d = x.shape
        q, k, v = self.qkv(self.l1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(n, t, d)
        x = x + self.o(a)
        return x + self.f2(F.gelu(self.f1(self.l2(x))))


def _sum(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sum()


def net_r(batch: int = 16) -> Net:
    """R: CIFAR ResNet, nine basic blocks of width 16, 32, 64."""
    torch.manual_seed(0)
    stem = nn.Sequential(_conv(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    blocks = [BasicBlock(*widths, inplace=False) for widths in R_BLOCKS]
    return nn.Sequential(stem, *blocks, head, nn.Linear(64, 10)), torch.randn(batch, 3, 32, 32), _sum


def transformer(blocks: int = 4, width: int = 128, batch: int = 8, tokens: int = 128) -> Net:
    """Transformer blocks; T, the default, is four."""
    torch.manual_seed(0)
    return nn.Sequential(*[Attention(width) for _ in range(blocks)]), torch.randn(batch, tokens, width), _sum


def net_rn18(batch: int = 16, size: int = 64) -> Net:
    """RN18: ResNet-18 without the stem's pooling, the net of the promise."""
    torch.manual_seed(0)
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [BasicBlock(*block, inplace=True) for block in [*widths, (512, 512, 1)]]
    stem = [_conv(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(batch, 3, size, size), _sum


def vision(name: str, batch: int = 4, size: int = 64, **options: Any) -> Net:
    """A classification net of torchvision by name."""
    torch.manual_seed(0)
    net = getattr(import_torchvision().models, name)(num_classes=10, **options)
    return net, torch.randn(batch, 3, size, size), _sum


def vit(patch: int = 16, dropout: float = 0.0) -> Net:
    """A small vision transformer."""
    torch.manual_seed(0)
    make = import_torchvision().models.VisionTransformer
    net = make(64, patch, num_layers=3, num_heads=4, hidden_dim=128, mlp_dim=512, dropout=dropout)
    return net, torch.randn(8, 3, 64, 64), _sum


def gpt2(layers: int = 3, width: int = 128, heads: int = 4, batch: int = 4, tokens: int = 128) -> Net:
    """A small GPT-2 with dropout on."""
    import_torchvision()  # transformers imports it where it is installed
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=max(tokens, 128), vocab_size=1000,
        bos_token_id=1, eos_token_id=1, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    ids = torch.randint(0, 1000, (batch, tokens))
    return GPT2LMHeadModel(config), ids, lambda net, x: net(x, labels=x).loss


def bert() -> Net:
    """A small BERT; attention and hidden dropout are 0.1."""
    import_torchvision()
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    net = BertModel(BertConfig(vocab_size=500, **sizes))
    return net, torch.randint(0, 500, (8, 128)), lambda net, x: net(x).last_hidden_state.square().mean()


def t5() -> Net:
    """A small T5; dropout is 0.1."""
    import_torchvision()
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    net = T5ForConditionalGeneration(
        T5Config(vocab_size=500, d_model=128, d_ff=512, num_layers=3, num_heads=4, d_kv=32, decoder_start_token_id=0)
    )
    return net, torch.randint(0, 500, (8, 128)), lambda net, x: net(x, labels=x).loss


def unit(
    inputs: int, outputs: int, kernel: int | tuple[int, int] = 3, stride: int = 1, inplace: bool = True
) -> nn.Sequential:
    """Convolution, BatchNorm and ReLU; keeps height and width where ``stride`` is 1."""
    sizes = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = (sizes[0] // 2, sizes[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, sizes, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace))


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
    second = nn.Sequential(unit(channels, narrow, 1), unit(narrow, narrow, (1, rows)), unit(narrow, fourth, (rows, 1)))
    third = nn.Sequential(
        unit(channels, narrow, 1), unit(narrow, narrow, (rows, 1)), unit(narrow, narrow, (1, rows)),
        unit(narrow, narrow, (rows, 1)), unit(narrow, fourth, (1, rows)),
    )  # fmt: skip
    pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(channels, fourth, 1))
    return Branches(unit(channels, fourth, 1), second, third, pooled)


def _reduction(channels: int) -> nn.Module:
    """Halves height and width and adds channels."""
    half = channels // 2
    return Branches(
        unit(channels, half, 3, 2), nn.Sequential(unit(channels, half, 1), unit(half, half, 3, 2)),
        nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip


def inception(batch: int, size: int) -> Net:
    """Like Inception-v4: 4, 7 and 3 blocks of four branches with two reductions between."""
    stem = [unit(3, 32, 3, 2), unit(32, 64, 3), nn.MaxPool2d(3, 2, 1), unit(64, 192, 3), unit(192, 384, 3, 2)]
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
        return nn.Sequential(unit(inputs, outputs, 3), unit(outputs, outputs, 3))

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


NETS: dict[str, Callable[[], Net]] = {
    "R": net_r,
    "T": transformer,
    "ResNet-50": partial(vision, "resnet50"),
    "DenseNet-121": partial(vision, "densenet121"),
    "VGG-16-bn": partial(vision, "vgg16_bn"),
    "GoogLeNet": partial(vision, "googlenet", aux_logits=False, init_weights=False),
    "GPT-2": gpt2,
    "ViT": vit,
}
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
    "T": transformer,
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
