"""The largest batch that networks of published size reach on a named card, without a plan and with one.

Predicted: each step is recorded on tensors without data with the operators that the card would run, planned by
``auto`` for all memory that torch's allocator can use on it, and played through a model of that allocator. Weights
stay as they are: no layer is decomposed. A step takes twice the time of a plain one at most. Weights, gradients and
Adam's state count. Precision is ``bf16-mixed``; seconds are those of a roofline model. Nothing was measured on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Benchmark, table
from benchmarks.nets import UNet
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.basics.devices import device_model
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.command_line.planned import MOST_TIME
from ctdr_lightning.memory import Plan, max_batch, plan, record_fake
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import served_in_words
from ctdr_lightning.memory.holders.optimizer_bytes import optimizer_of, predict
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import left_out

Step = Callable[[Any, Any], Tensor]
PRECISION = "bf16-mixed"
CLASSES = 1000


@dataclass(frozen=True)
class Row:
    """One network on one card.

    Attributes:
        network: Its name.
        sample: One sample, in words.
        device: Name of the card.
        plain_batch: The largest batch without a plan; 0 where not even one sample fits.
        twice_ratio: Predicted time of a sample in twice that batch over its time without recomputation; None
            where no plan was found.
        batch: The largest batch for which a plan was found.
        time_ratio: The same of the largest batch.
        peak_bytes: Predicted peak of the larger batch's tensors.
    """

    network: str
    sample: str
    device: str
    plain_batch: int
    twice_ratio: float | None
    batch: int
    time_ratio: float
    peak_bytes: int


@dataclass(frozen=True)
class Case:
    """A network with its samples.

    Attributes:
        make: Builds it.
        sample: One sample, in words.
        inputs: From a batch to its tensors.
        step: From the network and its inputs to a loss.
    """

    make: Callable[[], nn.Module]
    sample: str
    inputs: Callable[[int], Any]
    step: Step


def _images(n: int, size: int = 224) -> Tensor:
    return torch.empty(n, 3, size, size, device="meta")


def _classes(net: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.int64, device=x.device))


def _vision(name: str) -> Case:
    make = getattr(import_torchvision().models, name)
    return Case(lambda: make(num_classes=CLASSES), "224 x 224 pixels", _images, _classes)


def _gpt2() -> Case:
    import_torchvision()  # transformers imports it where it is installed
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(loss_type="ForCausalLMLoss")
    tokens = config.n_positions

    def ids(n: int) -> Tensor:
        return torch.empty(n, tokens, dtype=torch.int64, device="meta")

    return Case(lambda: GPT2LMHeadModel(config), f"{tokens:,} tokens", ids, lambda net, ids: net(ids, labels=ids).loss)


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-50": lambda: _vision("resnet50"),
    "ViT-B/16": lambda: _vision("vit_b_16"),
    "GPT-2": _gpt2,
    "U-Net": lambda: Case(
        lambda: UNet(64, 4), "256 x 256 pixels", partial(_images, size=256), lambda net, x: net(x).square().mean()
    ),
}
CARDS = ("rtx3060", "rtx4090")


def predicted(name: str, card: str) -> Row:
    """One network on one card."""
    torch.manual_seed(0)
    case, device = CASES[name](), device_model(card)
    net = case.make().train()
    optimizer = predict([optimizer_of("adam", list(net.parameters()))], foreach=True)
    assert optimizer is not None
    limit_bytes = device.usable_bytes
    found = max_batch(
        net, case.inputs, case.step, limit_bytes,
        optimizer=optimizer, device=card, precision=PRECISION, max_slowdown=MOST_TIME,
    )  # fmt: skip

    def account(lean: LeanStep) -> BatchAccount:
        inputs = case.inputs(2 * found.plain_size)
        return BatchAccount(record_fake(net, inputs, lean.step(case.step), device=card, precision=PRECISION), optimizer)

    lean = left_out(net, account, limit_bytes)
    try:
        made = plan((lean.account if lean is not None else account(LeanStep())).whole, limit_bytes)
    except InfeasibleBudgetError:
        made = None
    steady = made is not None and not served_in_words(made.trace, made.actions, limit_bytes)
    ratio, peak_bytes = _ratio(found.plan), found.plan.peak_bytes
    # a plan of a larger batch serves a smaller one
    others = ratio if found.size >= 2 * found.plain_size else None
    twice_ratio = _ratio(made) if made is not None and steady else others
    return Row(name, case.sample, card, found.plain_size, twice_ratio, found.size, ratio, peak_bytes)


def _ratio(made: Plan) -> float:
    return made.seconds / (made.seconds - made.recompute_seconds)


def figures(*, networks: Sequence[str] = tuple(CASES), cards: Sequence[str] = CARDS) -> Iterator[Row]:
    """Every network on every card.

    Args:
        networks: Their names.
        cards: Names of cards.
    """
    for name in networks:
        for card in cards:
            yield predicted(name, card)


def _line(row: Row) -> str:
    memory_gib = device_model(row.device).memory_bytes / 2**30
    twice = f"x{row.twice_ratio:.2f}" if row.twice_ratio is not None else "none found"
    larger = f" (x{row.batch / row.plain_batch:.1f})" if row.plain_batch else ""
    batches = f"{row.plain_batch or 'does not fit'} | {twice} | **{row.batch}**{larger}"
    return f"{row.network}, {row.sample} | {row.device}, {memory_gib:.1f} GiB | {batches} | x{row.time_ratio:.2f}"


TABLE = table(
    Row, "network, sample | card | batch before | time a sample at twice it | batch after | time a sample", _line
)
BENCHMARK = Benchmark("cards", figures, {"rows": Row}, {"table": TABLE}, key=("network", "device"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
