"""A training process killed (SIGKILL) anywhere and resumed ends to the bit as one that was never interrupted."""

import os
import random
import threading
import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from ctdr_lightning import CTDRCallback, Ranks, Recovery
from ctdr_lightning.basics import files
from ctdr_lightning.recovery import Distillation, Phase
from ctdr_lightning.trainer.accuracy import batchnorm_pass as estimator
from ctdr_lightning.trainer.accuracy import coach
from ctdr_lightning.trainer.surgeon import Surgeon
from tests import forks, parts
from tests.in_turn import in_turn

N_EPOCHS = 5
PHASES = [Phase(1, "factors", lr_scale=0.5, warmup_epochs=0.5), Phase(1)]
STAGED = Recovery(cut_epochs=[0, 2, 3], phases=PHASES, distill=Distillation(module="net"))
ROLLED_BACK = Recovery(
    layers_per_stage=2, phases=PHASES, monitor="val_acc", reference=2.0, max_drop=0.01, batchnorm_batches=2
)  # fmt: skip


class Killer(Callback):
    """Dies at one hook of one epoch (and batch), where the rank is the one to die."""

    def __init__(self, hook, epoch, batch=0):
        self.at = (hook, epoch, batch)

    def _reach(self, trainer, hook, batch=0):
        if self.at == (hook, trainer.current_epoch, batch) and os.environ.get("LOCAL_RANK", "0") == VICTIM:
            forks.die()

    def on_train_epoch_start(self, trainer, pl_module):
        self._reach(trainer, "epoch start")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._reach(trainer, "batch end", batch_idx)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._reach(trainer, "before the optimizer's step")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self._reach(trainer, "validation", batch_idx)

    def on_train_epoch_end(self, trainer, pl_module):
        self._reach(trainer, "epoch end")

    def on_train_end(self, trainer, pl_module):
        if self.at[0] == "train end":
            forks.die()


VICTIM = "0"


def before(owner, name, call):
    """Die when a function is called for the n-th time, before it does anything."""
    inner, calls = getattr(owner, name), iter(range(1, 1000))

    def dies(*args, **kwargs):
        if next(calls) == call:
            forks.die()
        return inner(*args, **kwargs)

    setattr(owner, name, dies)


def after(owner, name, call):
    """Die when a function has been called for the n-th time."""
    inner, calls = getattr(owner, name), iter(range(1, 1000))

    def dies(*args, **kwargs):
        result = inner(*args, **kwargs)
        if next(calls) == call:
            forks.die()
        return result

    setattr(owner, name, dies)


class _HalfWriter:
    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        forks.die()


def mid_write(call):
    """Die when half of the n-th file is written."""
    inner, calls = files.os.fdopen, iter(range(1, 1000))
    files.os.fdopen = lambda *a, **k: _HalfWriter(inner(*a, **k)) if next(calls) == call else inner(*a, **k)


def train(folder, schedule, arrange=None, killers=(), saving=None):
    """One (perhaps resumed) run; writes how it ended."""
    if arrange is not None:
        arrange()
    distributed = "LOCAL_RANK" in os.environ
    ours = CTDRCallback(rank=0.5, ranks=Ranks(allocate=None), policy="sqrt", recovery=schedule, verbose=False)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_last=True, **(saving or {}))
    module = parts.blobs()
    last = folder / "last.ckpt"
    trainer = parts.fit(
        module, *(k for k, first in killers if first), ours, *(k for k, first in killers if not first), saver,
        max_epochs=N_EPOCHS, enable_checkpointing=True, ckpt_path=last if last.exists() else None,
        strategy="ddp" if distributed else "auto", devices=2 if distributed else 1,
    )  # fmt: skip
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(("val", "loss"))}
    assert bool(metrics) == bool(module.losses)
    state = {"weights": module.state_dict(), "metrics": metrics, "progress": ours.run.coach.progress.to_dict()}
    torch.save(state, folder / f"end{trainer.global_rank}.pt")
    torch.save(torch.load(last, weights_only=True)["optimizer_states"], folder / f"moments{trainer.global_rank}.pt")


def ending(folder, ranks=1):
    return [torch.load(folder / f"{name}{rank}.pt") for rank in range(ranks) for name in ("end", "moments")]


def agree(whole, again):
    """Whether two runs ended alike; metrics are there only where an epoch was left to run."""
    for one, other in zip(whole, again, strict=True):
        names = [name for name in one if name != "metrics" or other["metrics"]] if isinstance(one, dict) else None
        if not (
            parts.same({n: one[n] for n in names}, {n: other[n] for n in names}) if names else parts.same(one, other)
        ):
            return False
    return True


_ENDINGS = {}


def uninterrupted(tmp_path_factory, name, schedule, ranks=1, saving=None):
    key = (name, ranks, str(saving))
    if key not in _ENDINGS:
        folder = tmp_path_factory.mktemp("whole")
        assert forks.run(train, folder, schedule, None, (), saving, ranks=ranks) == [0] * ranks
        _ENDINGS[key] = ending(folder, ranks)
    return _ENDINGS[key]


def killed_and_resumed(folder, schedule, arrange=None, killers=(), ranks=1, saving=None):
    codes = forks.run(train, folder, schedule, arrange, killers, saving, ranks=ranks)
    assert -9 in codes
    assert not (folder / "end0.pt").exists() or arrange is not None
    assert forks.run(train, folder, schedule, None, (), saving, ranks=ranks) == [0] * ranks
    return ending(folder, ranks)


STAGED_POINTS = {
    "in setup": (lambda: after(Surgeon, "decide", 1), ()),
    "before the first cut": (lambda: before(Surgeon, "cut", 1), ()),
    "first batch": (None, [(Killer("batch end", 0, 0), False)]),
    "before the first optimizer step": (None, [(Killer("before the optimizer's step", 0), False)]),
    "last batch of an epoch": (None, [(Killer("batch end", 0, 3), False)]),
    "first validation": (None, [(Killer("validation", 0, 1), False)]),
    "end of an epoch": (None, [(Killer("epoch end", 1), False)]),
    "phase boundary": (None, [(Killer("epoch start", 1), False)]),
    "middle of the second phase": (None, [(Killer("batch end", 1, 1), False)]),
    "just before a stage": (None, [(Killer("epoch start", 2), True)]),
    "before the layers of a stage are cut": (lambda: before(Surgeon, "cut", 2), ()),
    "between cut and new optimizer": (lambda: before(coach.optimizers, "rebuild", 1), ()),
    "between new optimizer and BatchNorm": (lambda: after(coach.optimizers, "rebuild", 1), ()),
    "while BatchNorm is re-estimated": (lambda: before(estimator, "copy_statistics", 4), ()),
    "while BatchNorm is re-estimated before a validation": (lambda: before(estimator, "copy_statistics", 3), ()),
    "just after a stage": (None, [(Killer("epoch start", 2), False)]),
    "middle of a stage": (None, [(Killer("batch end", 2, 2), False)]),
    "after the last stage": (None, [(Killer("batch end", 3, 1), False)]),
    "last epoch": (None, [(Killer("batch end", 4, 2), False)]),
    "while the first checkpoint is written": (lambda: mid_write(1), ()),
    "while a checkpoint is written": (lambda: mid_write(5), ()),
    "while last.ckpt is written": (lambda: mid_write(6), ()),
    "before a file is moved to its place": (lambda: before(files.os, "replace", 4), ()),
    "after a file is moved to its place": (lambda: after(files.os, "replace", 4), ()),
}


# One of each kind of moment, as each takes three seconds; the slow tests have every second one of the others.
OFTEN = (
    "in setup", "before the first cut", "middle of the second phase", "between cut and new optimizer",
    "while BatchNorm is re-estimated", "middle of a stage", "while last.ckpt is written",
    "before a file is moved to its place",
)  # fmt: skip


SELDOM = [point for point in STAGED_POINTS if point not in OFTEN]


@pytest.mark.slow
@pytest.mark.parametrize("point", [*OFTEN, *in_turn(SELDOM, pytest.mark.slow, pytest.mark.exhaustive)])
def test_killed_in_a_staged_run(tmp_path, tmp_path_factory, point):
    whole = uninterrupted(tmp_path_factory, "staged", STAGED)
    assert whole[0]["progress"]["stage"] == 3
    assert parts.same(whole, killed_and_resumed(tmp_path, STAGED, *STAGED_POINTS[point]))


def test_killed_when_nothing_is_left_to_train(tmp_path, tmp_path_factory):
    whole = uninterrupted(tmp_path_factory, "staged", STAGED)
    again = killed_and_resumed(tmp_path, STAGED, None, [(Killer("train end", 0), False)])
    assert again[0]["metrics"] == {}
    assert agree(whole, again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrange", "killers"),
    [
        pytest.param(lambda: before(coach.Coach, "_put_back_weights", 1), (), marks=pytest.mark.slow),
        (lambda: after(coach.Coach, "_put_back_weights", 1), ()),
        pytest.param(None, [(Killer("batch end", 3, 1), False)], marks=pytest.mark.slow),
    ],
    ids=["before the rollback", "in the rollback", "after the rollback"],
)
def test_killed_around_a_rollback(tmp_path, tmp_path_factory, arrange, killers):
    whole = uninterrupted(tmp_path_factory, "rolled back", ROLLED_BACK)
    assert whole[0]["progress"]["rolled_back"]
    assert parts.same(whole, killed_and_resumed(tmp_path, ROLLED_BACK, arrange, killers))


@pytest.mark.slow
def test_killed_with_checkpoints_written_in_validation(tmp_path, tmp_path_factory):
    saving = {"save_on_train_epoch_end": False}
    whole = uninterrupted(tmp_path_factory, "staged", STAGED, saving=saving)
    killers = [(Killer("batch end", 3, 1), False)]
    assert parts.same(whole, killed_and_resumed(tmp_path, STAGED, None, killers, saving=saving))


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, tmp_path_factory):
    whole = uninterrupted(tmp_path_factory, "staged", STAGED)
    for epoch in range(N_EPOCHS):
        killers = [(Killer("batch end", epoch, 2), False)]
        assert forks.run(train, tmp_path, STAGED, None, killers) == [-9]
    assert forks.run(train, tmp_path, STAGED) == [0]
    assert parts.same(whole, ending(tmp_path))


@pytest.mark.slow
def test_killed_from_outside_at_any_moment(tmp_path, tmp_path_factory):
    start = time.monotonic()
    whole = uninterrupted(tmp_path_factory, "timed", STAGED)
    taken_s = time.monotonic() - start
    chance = random.Random(0)
    for index in range(4):
        folder = tmp_path / str(index)
        folder.mkdir()
        timer = threading.Timer(chance.uniform(0.05, 0.9) * taken_s, forks.die)
        forks.run(train, folder, STAGED, timer.start)
        assert forks.run(train, folder, STAGED) == [0]
        assert agree(whole, ending(folder))


DDP_POINTS = {
    "middle of a stage": (None, [(Killer("batch end", 2, 1), False)]),
    "just after a stage": (None, [(Killer("epoch start", 2), False)]),
    "while BatchNorm is re-estimated": (lambda: before(estimator, "copy_statistics", 2), ()),
    "while a checkpoint is written": (lambda: mid_write(4), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", in_turn(DDP_POINTS, (), pytest.mark.exhaustive))
def test_killed_with_two_ranks(tmp_path, tmp_path_factory, point):
    whole = uninterrupted(tmp_path_factory, "staged", STAGED, ranks=2)
    assert parts.same(whole[0]["weights"], whole[2]["weights"])
    assert parts.same(whole, killed_and_resumed(tmp_path, STAGED, *DDP_POINTS[point], ranks=2))


@pytest.mark.slow
def test_killed_with_two_ranks_around_a_rollback_where_only_rank_one_dies(tmp_path, tmp_path_factory, monkeypatch):
    whole = uninterrupted(tmp_path_factory, "rolled back", ROLLED_BACK, ranks=2)
    monkeypatch.setattr(f"{__name__}.VICTIM", "1")
    killers = [(Killer("batch end", 2, 1), False)]
    assert parts.same(whole, killed_and_resumed(tmp_path, ROLLED_BACK, None, killers, ranks=2))
