"""Resumed within an epoch, where loaders keep their place: the batches and weights of the undisturbed run."""

import warnings
from itertools import product

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Phase
from tests import forks, parts
from tests.in_turn import in_turn

N_BATCHES, STEPS = 5, (1, 3, 4, 7)


def numbered(count=20, seed=0):
    return TensorDataset(*parts.images(count, seed=seed).tensors, torch.arange(count))


class Stream(IterableDataset):
    """Begins at its start; torchdata's loader skips what was seen."""

    def __iter__(self):
        return iter(numbered())


class PlacedStream(IterableDataset):
    """Keeps its place itself, so its loader does not skip."""

    def __init__(self):
        self.data, self.start, self.at = numbered(), 0, 0

    def __iter__(self):
        start, self.start = self.start, 0
        for index in range(start, len(self.data)):
            self.at = index + 1
            yield self.data[index]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


class OwnLoader:
    """The protocol of Lightning and nothing else; its order is another one in each epoch."""

    def __init__(self):
        self.data, self.epoch, self.at, self.start = numbered(), -1, 0, 0

    def __len__(self):
        return N_BATCHES

    def __iter__(self):
        self.epoch += not self.start
        self.at, self.start = self.start, 0
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for first in range(4 * self.at, 20, 4):
            self.at += 1
            yield list(self.data[order[first : first + 4]])

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.start = state["epoch"], state["at"]


def combined():
    first, second = (StatefulDataLoader(numbered(*how), 4, shuffle=True) for how in ((20, 0), (9, 4)))
    return CombinedLoader({"a": first, "b": second}, "max_size_cycle")


LOADERS = {
    "map": lambda: StatefulDataLoader(numbered(), 4, shuffle=True),
    "workers": lambda: StatefulDataLoader(numbered(), 4, shuffle=True, num_workers=1),
    "iterable": lambda: StatefulDataLoader(Stream(), 4),
    "iterable with its place": lambda: StatefulDataLoader(PlacedStream(), 4),
    "combined": combined,
    "own": OwnLoader,
}
RECOVERY = {
    "rank": None,
    "recovery": Recovery(phases=[Phase(1, "factors", lr_scale=0.5), Phase(1)], batchnorm_batches=2),
    "staged": Recovery(cut_epochs=[0, 1], phases=[Phase(1)], batchnorm_batches=2),
}


def ours(kind):
    if kind == "auto":
        return CTDRCallback(rank="auto", memory_budget="1MiB", max_slowdown=50.0, verbose=False)
    return CTDRCallback(rank=0.5, policy="sqrt", recovery=RECOVERY[kind], verbose=False)


class Noting(parts.Blobs):
    """Notes which samples it is given."""

    def __init__(self):
        super().__init__(width=4)
        self.seen = []

    def training_step(self, batch, batch_idx):
        each = batch.values() if isinstance(batch, dict) else [batch]
        self.seen.append([part[2].tolist() for part in each])
        return sum(super(Noting, self).training_step(part, batch_idx) for part in each)


def run(loader, *callbacks, seed=0, ckpt_path=None, kind=Noting, **options):
    parts.seed_everything(seed, verbose=False)
    module = kind()
    given = {"limit_train_batches": N_BATCHES, "max_epochs": 2, **options}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = parts.quiet_trainer(*callbacks, enable_checkpointing=saves, **given)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module


def saver(folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


OFTEN = {("map", kind) for kind in RECOVERY} | {(name, "rank") for name in LOADERS} | {("map", "auto")}


REST = [case for case in product(LOADERS, (*RECOVERY, "auto")) if case not in OFTEN]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*sorted(OFTEN), *in_turn(REST, pytest.mark.exhaustive)], ids="-".join)
def test_a_resumed_epoch_goes_on_with_the_batches_of_the_undisturbed_one(tmp_path, case):
    loader, kind = case
    whole = run(LOADERS[loader], ours(kind), saver(tmp_path))
    for step in STEPS:
        again = run(LOADERS[loader], ours(kind), seed=step, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert again.seen == whole.seen[step:], step
        assert parts.same(again.state_dict(), whole.state_dict()), step


class Scheduled(Noting):
    """Has Lightning make the loader before the checkpoint is read."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)]


def test_a_schedule_that_asks_for_the_number_of_steps_does_not_lose_the_place(tmp_path):
    callback = CTDRCallback(rank=None, policy="sqrt", verbose=False)
    whole = run(LOADERS["map"], callback, saver(tmp_path), kind=Scheduled)
    again = run(LOADERS["map"], callback, seed=1, ckpt_path=tmp_path / "step=3.ckpt", kind=Scheduled)
    assert again.seen == whole.seen[3:]
    assert parts.same(again.state_dict(), whole.state_dict())


def of_ranks():
    data = numbered()
    return StatefulDataLoader(data, 4, sampler=StatefulDistributedSampler(data, 2, parts.rank()))


def of_ranks_without_a_state():
    data = numbered()
    return StatefulDataLoader(data, 4, sampler=DistributedSampler(data, 2, parts.rank()))


TWO_RANKS = {"strategy": "ddp", "devices": 2, "limit_train_batches": 3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rank", *in_turn(("recovery", "staged", "auto"), pytest.mark.slow)])
def test_each_of_two_ranks_goes_on_with_its_own_batches(tmp_path, kind):
    def train(folder):
        whole = run(of_ranks, ours(kind), saver(folder), **TWO_RANKS)
        for step in (1, 2, 4, 5):
            again = run(of_ranks, ours(kind), seed=step, ckpt_path=folder / f"step={step}.ckpt", **TWO_RANKS)
            assert again.seen == whole.seen[step:], step
            assert parts.same(again.state_dict(), whole.state_dict()), step
        torch.save(whole.seen[:3], folder / f"{parts.rank()}.pt")

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
    assert sorted(first_epoch(tmp_path)) == list(range(20)), "each sample on one rank"


def first_epoch(folder):
    """The samples of the first epoch on both ranks."""
    return [n for rank in (0, 1) for step in torch.load(folder / f"{rank}.pt") for part in step for n in part]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "step", "expected"),
    [
        (LOADERS["map"], 2, True),
        (of_ranks_without_a_state, 2, False),
        (of_ranks_without_a_state, 4, True),
        (of_ranks, 4, False),
    ],
)
def test_a_sampler_of_several_processes_without_a_place_is_named_when_resumed(tmp_path, loader, step, expected):
    def train(folder):
        plain = run(loader, **TWO_RANKS)
        whole = run(loader, ours("rank"), saver(folder), **TWO_RANKS)
        assert whole.seen == plain.seen
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = run(loader, ours("rank"), ckpt_path=folder / f"step={step}.ckpt", **TWO_RANKS)
        if parts.rank() == 0:
            assert any("StatefulDistributedSampler" in str(w.message) for w in caught) is expected
            assert expected or again.seen == whole.seen[step:]

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]


def test_data_without_a_length_are_said_to_skip_a_batch(tmp_path):
    run(LOADERS["iterable"], ours("rank"), saver(tmp_path), limit_train_batches=1.0)
    for limit, expected in ((1.0, 1), (N_BATCHES, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            path = tmp_path / "step=3.ckpt"
            run(LOADERS["iterable"], ours("rank"), ckpt_path=path, limit_train_batches=limit)
        assert sum("limit_train_batches" in str(w.message) for w in caught) == expected


def test_reloads_come_when_they_would_have(tmp_path):
    callback = ours("rank")
    run(LOADERS["map"], callback, saver(tmp_path), reload_dataloaders_every_n_epochs=1)
    parts.seed_everything(1, verbose=False)
    trainer = parts.quiet_trainer(callback, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Noting(), LOADERS["map"](), ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.reload_dataloaders_every_n_epochs == 1
