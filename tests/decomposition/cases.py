"""Layers of every kind, and weights that look trained."""

import torch
from torch import nn

from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of


def decay_(module: nn.Module, power: float = 1.5) -> nn.Module:
    """Give every weight a falling spectrum, as training does."""
    with torch.no_grad():
        for layer in module.modules():
            if kind_of(layer):
                flat = layer.weight.flatten(1)
                u, s, v = torch.linalg.svd(flat, full_matrices=False)
                falling = s[0] * torch.arange(1, len(s) + 1) ** -power
                layer.weight.copy_((u * falling @ v).view_as(layer.weight))
    return module


def geometry_of(layer: nn.Module):
    return KINDS[kind_of(layer)].geometry(layer)


def _convolutions():
    families = {
        1: (nn.Conv1d, nn.ConvTranspose1d),
        2: (nn.Conv2d, nn.ConvTranspose2d),
        3: (nn.Conv3d, nn.ConvTranspose3d),
    }
    for n, (plain, transposed) in families.items():
        taps, stride, padding, dilation = (3, 2, 3)[:n], (2, 1, 2)[:n], (1, 1, 0)[:n], (1, 2, 1)[:n]
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        x = (2, 4, *(7, 6, 5)[:n])
        for groups in (1, 2):
            yield f"conv{n}d groups={groups}", lambda p=plain, t=taps, g=groups, o=options: p(4, 6, t, groups=g, **o), x
            outer = (1, 0, 1)[:n]
            yield (
                f"conv_transpose{n}d groups={groups}",
                lambda p=transposed, t=taps, g=groups, o=options, e=outer: p(4, 6, t, groups=g, output_padding=e, **o),
                x,
            )
        for mode in ("zeros", "reflect", "replicate", "circular"):
            yield (
                f"conv{n}d same {mode}",
                lambda p=plain, t=taps, d=dilation, m=mode: p(
                    4, 6, t, padding="same", dilation=d, padding_mode=m, bias=False
                ),
                x,
            )
    yield "conv2d 1x1 strided", lambda: nn.Conv2d(4, 6, 1, stride=2), (2, 4, 7, 6)
    yield "conv2d unbatched", lambda: nn.Conv2d(4, 6, 3, padding="valid"), (4, 7, 6)


# name -> (maker, input shape; integers below ten for an embedding)
LAYERS = {name: (make, shape) for name, make, shape in _convolutions()}
LAYERS |= {
    "linear": (lambda: nn.Linear(12, 20), (3, 5, 12)),
    "linear vector": (lambda: nn.Linear(12, 18, bias=False), (12,)),
    "embedding": (lambda: nn.Embedding(10, 8), (2, 5)),
}


def layer_and_input(name: str):
    make, shape = LAYERS[name]
    layer = make()
    x = torch.randint(10, shape) if isinstance(layer, nn.Embedding) else torch.randn(shape)
    return layer, x
