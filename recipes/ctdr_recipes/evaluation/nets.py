"""The nine networks: as published, for predictions on fake tensors, and small, for measurements on two cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Net:
    """One network at one size.

    Attributes:
        build: Makes it.
        batch: Makes a batch of a size on a device: a tensor.
        step: From the network and a batch to a scalar loss.
        size: The batch size that is evaluated.
        shape: One sample, in words.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, str], Tensor]
    step: Step
    size: int
    shape: str


def lenet(n_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling, for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, n_classes),
    )  # fmt: skip


def _images(channels: int, side: int) -> Callable[[int, str], Tensor]:
    return lambda size, device: torch.randn(size, channels, side, side, device=device)


def _tokens(length: int, vocabulary: int) -> Callable[[int, str], Tensor]:
    return lambda size, device: torch.randint(vocabulary, (size, length), device=device)


def _classified(net: nn.Module, images: Tensor) -> Tensor:
    """Cross-entropy with labels of zero: what the labels are changes no byte and no second."""
    found = net(images)
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.long, device=logits.device))


def _next_tokens(net: nn.Module, tokens: Tensor) -> Tensor:
    return net(input_ids=tokens, labels=tokens).loss


def _vision(name: str, size: int, side: int, **options: Any) -> Net:
    def build() -> nn.Module:
        from torchvision.models import get_model

        return get_model(name, weights=None, **options)

    return Net(build, _images(3, side), _classified, size, f"3 x {side} x {side}")


def _vit(size: int, side: int, **sizes: Any) -> Net:
    def build() -> nn.Module:
        from torchvision.models import VisionTransformer

        return VisionTransformer(image_size=side, **sizes)

    return Net(build, _images(3, side), _classified, size, f"3 x {side} x {side}")


def _bert(size: int, length: int, **sizes: Any) -> Net:
    def build() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(BertConfig(**sizes))

    return Net(build, _tokens(length, sizes.get("vocab_size", 30522)), _next_tokens, size, f"{length} tokens")


def _gpt2(size: int, length: int, **sizes: Any) -> Net:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_positions=length, use_cache=False, **sizes))

    return Net(build, _tokens(length, sizes.get("vocab_size", 50257)), _next_tokens, size, f"{length} tokens")


def _googlenet(size: int, side: int) -> Net:
    return _vision("googlenet", size, side, aux_logits=False, init_weights=False)


_VIT_B = {"patch_size": 16, "num_layers": 12, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
_VIT_S = {"patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 192, "mlp_dim": 768}
_BERT_S = {
    "vocab_size": 1000, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768,
}  # fmt: skip
_GPT2_S = {"vocab_size": 256, "n_embd": 192, "n_layer": 4, "n_head": 4}

FULL: dict[str, Net] = {
    "LeNet": Net(lenet, _images(1, 28), _classified, 4096, "1 x 28 x 28"),
    "AlexNet": _vision("alexnet", 512, 224),
    "VGG-16": _vision("vgg16", 64, 224),
    "ResNet-50": _vision("resnet50", 128, 224),
    "GoogLeNet": _googlenet(256, 224),
    "DenseNet-121": _vision("densenet121", 64, 224),
    "ViT-B/16": _vit(128, 224, **_VIT_B),
    "BERT-base": _bert(32, 512),
    "GPT-2": _gpt2(8, 1024),
}
SMALL: dict[str, Net] = {
    "LeNet": Net(lenet, _images(1, 28), _classified, 256, "1 x 28 x 28"),
    "AlexNet": _vision("alexnet", 16, 96, num_classes=10),
    "VGG-16": _vision("vgg16", 4, 64, num_classes=10),
    "ResNet-50": _vision("resnet50", 16, 64, num_classes=10),
    "GoogLeNet": _vision("googlenet", 16, 64, aux_logits=False, init_weights=False, num_classes=10),
    "DenseNet-121": _vision("densenet121", 8, 64, num_classes=10),
    "ViT-B/16": _vit(16, 64, num_classes=10, **_VIT_S),
    "BERT-base": _bert(8, 128, **_BERT_S),
    "GPT-2": _gpt2(8, 128, **_GPT2_S),
}
FAMILIES = {
    "linear": ("LeNet", "AlexNet", "VGG-16"),
    "branching": ("ResNet-50", "GoogLeNet", "DenseNet-121"),
    "transformers": ("ViT-B/16", "BERT-base", "GPT-2"),
}
