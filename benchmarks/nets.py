"""The nets that the benchmarks share: R, T, RN18 (small, exactly reproducible), and published ones at small sizes.

Each entry of ``NETS`` makes ``(module, inputs, step)``; ``step(module, inputs)`` gives a scalar loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.vision_import import import_torchvision

Net = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]


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

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(N, T, width)``."""
        n, t, d = x.shape
        q, k, v = self.qkv(self.l1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d)
        x = x + self.o(a)
        return x + self.f2(F.gelu(self.f1(self.l2(x))))


def _sum(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sum()


def net_r(batch: int = 16) -> Net:
    """R: CIFAR ResNet, nine basic blocks of width 16, 32, 64."""
    torch.manual_seed(0)
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    stem = nn.Sequential(_conv(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    blocks = [BasicBlock(i, o, s, inplace=False) for i, o, s in widths]
    return nn.Sequential(stem, *blocks, head, nn.Linear(64, 10)), torch.randn(batch, 3, 32, 32), _sum


def net_t() -> Net:
    """T: four transformer blocks on 8 x 128 tokens."""
    torch.manual_seed(0)
    return nn.Sequential(*[Attention() for _ in range(4)]), torch.randn(8, 128, 128), _sum


def net_rn18(batch: int = 16, size: int = 64) -> Net:
    """RN18: ResNet-18 without the stem's pooling, the net of the promise."""
    torch.manual_seed(0)
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [BasicBlock(i, o, s, inplace=True) for i, o, s in [*widths, (512, 512, 1)]]
    stem = [_conv(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(batch, 3, size, size), _sum


def vision(name: str, batch: int = 4, size: int = 64, **options: Any) -> Net:
    """A classification net of torchvision by name."""
    torch.manual_seed(0)
    net = getattr(import_torchvision().models, name)(num_classes=10, **options)
    return net, torch.randn(batch, 3, size, size), _sum


def vit(batch: int = 8) -> Net:
    """A small vision transformer."""
    torch.manual_seed(0)
    make = import_torchvision().models.VisionTransformer
    net = make(image_size=64, patch_size=16, num_layers=3, num_heads=4, hidden_dim=128, mlp_dim=512)
    return net, torch.randn(batch, 3, 64, 64), _sum


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


NETS: dict[str, Callable[[], Net]] = {
    "R": net_r,
    "T": net_t,
    "ResNet-50": lambda: vision("resnet50"),
    "DenseNet-121": lambda: vision("densenet121"),
    "VGG-16-bn": lambda: vision("vgg16_bn"),
    "GoogLeNet": lambda: vision("googlenet", aux_logits=False, init_weights=False),
    "GPT-2": gpt2,
    "ViT": vit,
}
