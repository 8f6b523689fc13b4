"""Whole runs with the callback on a card of less memory: batches foretold and run, and budgets kept."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.cards import CASES, Case
from benchmarks.gpu_parts.cases import MIXED, Words, card, emptied
from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.devices import DeviceModel, device_model
from ctdr_lightning.basics.gpu_memory import begin_interval, highest
from ctdr_lightning.command_line.planned import MOST_TIME
from ctdr_lightning.memory import max_batch
from ctdr_lightning.memory.holders.optimizer_bytes import optimizer_of, predict
from ctdr_lightning.memory.recorder.gpu_workspace import cublas_bytes

CAP_GIB, STEPS = 8, 8
FIGURES = Path("docs/data/gpu.json")
TOKENS, VOCABULARY = 512, 50_257


@dataclass(frozen=True)
class Fit:
    """A run of a Trainer under a cap on the card's memory.

    Attributes:
        net: The net's name.
        way: Arguments of the callback, or without it.
        cap_gib: All that the process may take of the card.
        batch: Samples a step.
        foretold: Whether the batch is the largest one that was foretold for the way.
        ended: Whether all steps ran.
        loss: Of the last step.
        step_s: Median seconds of the last steps.
        allocated_gib: Most of tensors.
        reserved_gib: Most that the allocator took.
        said: Warnings of the callback, or the error.
    """

    net: str
    way: str
    cap_gib: float
    batch: int
    foretold: bool = False
    ended: bool = False
    loss: float = 0.0
    step_s: float = 0.0
    allocated_gib: float = 0.0
    reserved_gib: float = 0.0
    said: str = ""


class Module(LightningModule):
    """A net with its loss, and Adam; it notes losses and times."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.net, self.of = net, loss
        self.allocated = self.reserved = 0
        self.losses: list[Tensor] = []
        self.at_s: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        torch.cuda.synchronize()
        self.at_s.append(perf_counter())
        loss = self.of(self.net, batch[0])
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the peaks: the callback sets torch's own back at the end."""
        found = highest()
        self.allocated = max(self.allocated, found.allocated_peak)
        self.reserved = max(self.reserved, found.reserved_peak)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-4)


def _gpt() -> Case:
    return Case(
        lambda: Words(12, 768, TOKENS, VOCABULARY), f"{TOKENS} tokens",
        lambda n: torch.empty(n, TOKENS, dtype=torch.int64, device="meta"), lambda net, ids: net(ids),
    )  # fmt: skip


NETS: dict[str, Callable[[], Case]] = {"ResNet-50": CASES["ResNet-50"], "GPT-2 small": _gpt}


def _limit_bytes(gpu: DeviceModel) -> int:
    """All that torch's allocator has on a card of so many GiB."""
    return (CAP_GIB << 30) - gpu.context_bytes


def _here() -> DeviceModel:
    gpu = card()
    assert gpu is not None, "these rows are a GPU's"
    return gpu


def _foretold(name: str) -> tuple[int, int]:
    """From the committed figures: a search takes a minute, and needs no card."""
    known = json.loads(FIGURES.read_text()).get("foretold", []) if FIGURES.exists() else []
    found = [row for row in known if row["net"] == name] or [vars(row) for row in foretell() if row.net == name]
    return found[0]["plain"], found[0]["most"]


def rows(small: bool = False) -> Iterator[Fit]:
    """For each net: what is foretold, and runs at it."""
    if card() is None or small:
        return  # a Trainer under a cap is a GPU's
    for name in NETS:
        yield from _of(name)


@dataclass(frozen=True)
class Foretold:
    """The largest batches that a card of `CAP_GIB` holds, found without it.

    Attributes:
        net: The net's name.
        card: The card's name.
        plain: Without a plan.
        most: With one.
        seconds: Of the search.
    """

    net: str
    card: str
    plain: int
    most: int
    seconds: float


def foretell(small: bool = False) -> Iterator[Foretold]:
    """The largest batches of each net, on the card that is here or else an H100."""
    gpu = card() or device_model("h100")
    for name in NETS if not small else ():
        torch.manual_seed(0)
        case = NETS[name]()
        net = case.make().train()
        adam = predict([optimizer_of("adam", list(net.parameters()))], foreach=True)
        assert adam is not None
        start = perf_counter()
        found = max_batch(
            net, case.inputs, case.step, _limit_bytes(gpu) - cublas_bytes(gpu), optimizer=adam, device=gpu,
            precision=MIXED, progress=False, max_slowdown=MOST_TIME,
        )  # fmt: skip
        yield Foretold(name, gpu.name, found.plain_size, found.size, perf_counter() - start)


def _of(name: str) -> Iterator[Fit]:
    plain, most = _foretold(name)
    limit = _limit_bytes(_here())
    above = int(1.3 * plain)
    yield _run(name, "memory_budget, rank=None", most, True, memory_budget=limit, rank=None)
    yield _run(name, "memory_budget", above, False, memory_budget=limit)
    yield _run(name, "memory_budget, rank=None", above, False, memory_budget=limit, rank=None)
    yield _run(name, "no callback", int(0.97 * plain), True)
    yield _run(name, "no callback", int(1.08 * plain), False)
    yield _run(name, "no callback, no cap", above, False)


def _run(name: str, way: str, batch: int, foretold: bool, **options: Any) -> Fit:
    case = NETS[name]()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if "no cap" in way else _limit_bytes(_here()) / total)
    torch.manual_seed(0)
    module = Module(case.make(), case.step)
    data = torch.empty_like(case.inputs(batch), device="cpu")
    data = data.normal_() if data.is_floating_point() else data.random_(VOCABULARY)
    callbacks = [CTDRCallback(verbose=False, **options)] if options else []
    emptied()
    begin_interval()
    trainer = Trainer(
        accelerator="gpu", devices=1, precision=MIXED, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    said, ended = [], True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader([[data]] * STEPS, batch_size=None), ckpt_path=None)
        except Exception as error:
            ended, said = False, [f"{type(error).__name__}: {error}"]
            traceback.print_exc()
    module.on_train_batch_end()  # a step that failed has had no end
    said += [str(w.message) for w in caught if "CTDR" in str(w.message)]
    times = sorted(b - a for a, b in zip(module.at_s[-5:], module.at_s[-4:], strict=False))
    row = Fit(
        name, way, CAP_GIB, batch, foretold, ended, float(module.losses[-1]) if module.losses else 0.0,
        times[len(times) // 2] if times else 0.0, module.allocated / 2**30,
        module.reserved / 2**30, " | ".join(said),
    )  # fmt: skip
    del module, trainer, data, callbacks
    torch.cuda.set_per_process_memory_fraction(1.0)
    emptied()
    return row
