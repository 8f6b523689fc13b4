"""Small trained networks that the benchmarks of ranks share; each is trained once a seed and kept in a folder.

* C: six layers, BatchNorm, 8 x 8 digits (278,890 parameters).
* D: the demo's CNN, 16 x 16 digits (1,940,970).
* R: a residual network of nine blocks, 16 x 16 digits (272,186).
* V: a vision transformer, 16 x 16 digits (about 452,000).
* G: a character GPT on the text of Python's own library (about 838,000); its score is a loss in nats.

Nothing was tuned on the following five, which judge the choices of ``one_number``:

* U: a U-Net that tells each pixel of a 16 x 16 digit to be the background or a part of that digit (263,027).
* L: an LSTM of two layers that reads the rows of a digit (208,138).
* X: an MLP-Mixer, 16 x 16 digits (161,450).
* M: inverted residuals as MobileNet's, 16 x 16 digits (84,322).
* H: G with dropout.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.nets import R_BLOCKS, Attention, BasicBlock, unit
from ctdr_lightning.recovery.batchnorm import reestimate
from ctdr_recipes.classifier import cnn
from ctdr_recipes.demo import STRIDES, WIDTHS

Batch = tuple[Tensor, Tensor]
FOLDER = Path(os.environ.get("CTDR_NETS", Path(tempfile.gettempdir()) / "ctdr_trained_nets"))
BATCH = 64


@dataclass(frozen=True)
class Net:
    """One trained network with its task.

    Args:
        name: One of the letters above.
        model: Trained, in evaluation mode. Copy it before you change it.
        batches: Training batches ``(inputs, targets)`` in order, not augmented.
        held_out: What ``score`` is taken on.
        augment: Changes a batch of inputs while training.
        rate: Learning rate of fine-tuning; a fifth of it for the transformers' AdamW.
        is_text: Whether the score is a mean loss in nats (less is better), not an accuracy in percent.
    """

    name: str
    model: nn.Module
    batches: Sequence[Batch] = field(repr=False)
    held_out: Sequence[Batch] = field(repr=False)
    augment: Callable[[Tensor], Tensor]
    rate: float
    is_text: bool = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch; the logits' classes are their last axis."""
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy in percent on what is held out; of text the mean loss in nats."""
        was, right, lost, seen = model.training, 0, 0.0, 0
        model.eval()
        for inputs, targets in self.held_out:
            logits = model(inputs)
            right += int((logits.argmax(-1) == targets).sum())
            lost += float(F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"))
            seen += targets.numel()
        model.train(was)
        return lost / seen if self.is_text else 100 * right / seen

    def reestimated(self, model: nn.Module) -> nn.Module:
        """The same model after its BatchNorm statistics were taken again on all training batches."""
        reestimate(model, lambda batch: model(batch[0]), self.batches)
        return model

    def fine_tune(self, model: nn.Module, epochs: int, seed: int = 0) -> nn.Module:
        """Train in place for some epochs under a cosine schedule (SGD with momentum, AdamW for transformers)."""
        _train(self, model, epochs, seed, self.rate)
        return model


def trained(name: str, seed: int = 0) -> Net:
    """A trained network, from the folder where it was trained before.

    Args:
        name: One of the letters above.
        seed: Seed of its initialisation and of its training.
    """
    path = FOLDER / f"{name}{seed}.pt"
    torch.manual_seed(seed)
    task, epochs, rate = TASKS[name]()
    if path.exists():
        task.model.load_state_dict(torch.load(path, weights_only=True))
    else:
        _train(task, task.model, epochs, seed, rate)
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(task.model.state_dict(), partial)
        partial.rename(path)
    task.model.eval()
    return task


def _train(net: Net, model: nn.Module, epochs: int, seed: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * len(net.batches)
    if net.name in BY_ADAM:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.15)
    torch.manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for batch in _shuffled(net.batches, generator):
            loss = net.loss(model, (net.augment(batch[0]), batch[1]))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
    model.eval()


def _shuffled(batches: Sequence[Batch], generator: torch.Generator) -> list[Batch]:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    size = len(batches[0][0])
    order = torch.randperm(len(inputs), generator=generator)
    return [(inputs[rows], targets[rows]) for rows in order.split(size) if len(rows) == size]


@lru_cache
def digits(side: int) -> tuple[list[Batch], list[Batch]]:
    """The 1,797 digits at so many pixels a side in order, 1,078 of them for training, the others held out."""
    loaded = load_digits()
    images = torch.tensor(loaded.images / 16.0, dtype=torch.float32)[:, None]
    images = F.interpolate(images, size=(side, side), mode="bilinear") if side != 8 else images
    labels = torch.tensor(loaded.target)
    parts = train_test_split(range(len(labels)), test_size=0.4, random_state=0, stratify=loaded.target)
    train, test = ([(images[r], labels[r]) for r in torch.tensor(part).split(BATCH)] for part in parts)
    return train, test


def _shift_and_noise(images: Tensor) -> Tensor:
    most = images.shape[-1] // 16
    dx, dy = torch.randint(-most, most + 1, (2,)).tolist()
    return torch.roll(images, (dx, dy), (2, 3)) + 0.15 * torch.randn_like(images)


def _c() -> tuple[Net, int, float]:
    widths = [(1, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    layers = [layer for pair in widths for layer in unit(*pair, inplace=False)]
    layers.insert(9, nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return Net("C", model, *digits(8), _shift_and_noise, 0.02), 15, 0.1


def _d() -> tuple[Net, int, float]:
    return Net("D", cnn(WIDTHS, STRIDES), *digits(16), _shift_and_noise, 0.02), 10, 0.1


def _r() -> tuple[Net, int, float]:
    blocks = [BasicBlock(*widths, inplace=False) for widths in R_BLOCKS]
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return Net("R", model, *digits(16), _shift_and_noise, 0.02), 15, 0.1


class _VisionTransformer(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Attention(width, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def _v() -> tuple[Net, int, float]:
    return Net("V", _VisionTransformer(), *digits(16), _shift_and_noise, 3e-4), 30, 2e-3


class CharacterGPT(nn.Module):
    """A small GPT on characters; its output has one logit a token."""

    def __init__(self, n_tokens: int, length: int, dropout: float = 0.0, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(n_tokens, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.Sequential(*(Attention(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, tokens)."""
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(self.drop(x))
        return self.head(self.norm(x))


@lru_cache
def library_text(length: int, n_batches: int, n_held_out: int) -> tuple[list[Batch], list[Batch]]:
    """Batches of 16 pieces of the standard library's sources, for training and held out."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(errors="ignore") for path in sources)
    characters = "".join(c for c in text if " " <= c <= "~" or c == "\n")
    codes = torch.tensor(list(characters.encode())) - 31
    codes = codes.clamp_min(0)  # the newline becomes 0, a printable character 1 to 95
    pieces = codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    batches = [(piece[:, :-1], piece[:, 1:]) for piece in pieces.split(16)[: n_batches + n_held_out]]
    return batches[n_held_out:], batches[:n_held_out]


def _g() -> tuple[Net, int, float]:
    batches = library_text(96, 500, 16)
    return Net("G", CharacterGPT(96, 96), *batches, lambda tokens: tokens, 3e-4, is_text=True), 1, 2e-3


class _UNet(nn.Module):
    def __init__(self, n_classes: int = 11, width: int = 24) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self._pair(1, width), self._pair(width, 2 * width), self._pair(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([nn.ConvTranspose2d(width << k, width << (k - 1), 2, 2) for k in (2, 1)])
        self.join = nn.ModuleList([self._pair(width << k, width << (k - 1)) for k in (2, 1)])
        self.head = nn.Conv2d(width, n_classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(*unit(inputs, outputs, inplace=False), *unit(outputs, outputs, inplace=False))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, layers in enumerate(self.down):
            x = layers(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, join, beside in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([beside, up(x)], 1))
        return self.head(x).movedim(1, -1)


class _RowReader(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[:, 0])[0][:, -1])


class _MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        sizes = ((tokens, 4 * tokens), (width, 2 * width))
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, a)) for a, b in sizes])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlps[0](self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlps[1](self.norms[1](x))


class _Mixer(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, 4)
        self.blocks = nn.Sequential(*(_MixerBlock(16, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch(x).flatten(2).transpose(1, 2))).mean(1))


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide, self.adds = 4 * inputs, stride == 1 and inputs == outputs
        deep = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        grown = [nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        narrow = [nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*grown, deep, nn.BatchNorm2d(wide), nn.ReLU6(), *narrow)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def _u() -> tuple[Net, int, float]:
    parts = [[(x, _pixels(x, y)) for x, y in part] for part in digits(16)]
    return Net("U", _UNet(), *parts, lambda images: images + 0.05 * torch.randn_like(images), 0.02), 10, 0.1


def _pixels(images: Tensor, labels: Tensor) -> Tensor:
    """The class of each pixel: 10 is the background."""
    return torch.where(images[:, 0] > 0.4, labels[:, None, None], 10)


def _l() -> tuple[Net, int, float]:
    return Net("L", _RowReader(), *digits(16), _shift_and_noise, 3e-4), 30, 4e-3


def _x() -> tuple[Net, int, float]:
    return Net("X", _Mixer(), *digits(16), _shift_and_noise, 3e-4), 30, 2e-3


def _m() -> tuple[Net, int, float]:
    widths = [(24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 64, 2), (64, 64, 1)]
    model = nn.Sequential(
        *unit(1, 24, inplace=False), *(_Inverted(*block) for block in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return Net("M", model, *digits(16), _shift_and_noise, 0.02), 15, 0.1


def _h() -> tuple[Net, int, float]:
    batches = library_text(96, 500, 16)
    return Net("H", CharacterGPT(96, 96, dropout=0.1), *batches, lambda tokens: tokens, 3e-4, is_text=True), 1, 2e-3


TASKS: dict[str, Callable[[], tuple[Net, int, float]]] = {
    "C": _c, "D": _d, "R": _r, "V": _v, "G": _g, "U": _u, "L": _l, "X": _x, "M": _m, "H": _h
}  # fmt: skip
BY_ADAM = "VGLXH"
