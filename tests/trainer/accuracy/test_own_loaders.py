"""Drawing from a copy of a loader moves nothing that the training draws from."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.trainer.accuracy.own_loaders import own_loader
from tests import parts

DATA = torch.arange(24)


class Drawing(Sampler):
    """Draws from a generator of NumPy, and goes on where it stood."""

    def __init__(self):
        self.generator, self.at = np.random.default_rng(0), 0

    def __len__(self):
        return len(DATA)

    def __iter__(self):
        while self.at < len(DATA):
            self.at += 1
            yield int(self.generator.integers(len(DATA)))
        self.at = 0


class Inner:
    def __init__(self):
        self.at = 0


class Stream(IterableDataset):
    """Goes on where it stood."""

    def __init__(self):
        self.at, self.random = 0, random.Random(0)

    def __iter__(self):
        while self.at < len(DATA):
            self.at += 1
            yield DATA[self.at - 1] + self.random.randrange(100)
        self.at = 0


class DeepStream(Stream):
    """Keeps its place in an object of its own, and tells it."""

    def __init__(self):
        super().__init__()
        self.inner, self.data = Inner(), DATA

    def __iter__(self):
        while self.inner.at < len(self.data):
            self.inner.at += 1
            yield self.data[self.inner.at - 1]
        self.inner.at = 0

    def state_dict(self):
        return {"at": self.inner.at}

    def load_state_dict(self, state):
        self.inner.at = state["at"]


class Wrapping(IterableDataset):
    def __init__(self):
        self.stream = DeepStream()

    def __iter__(self):
        return iter(self.stream)


def shuffled(**options):
    return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


def of_batches():
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(2))
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, False))


class OfSampler(Dataset):
    """The samples that a sampler draws, as Lightning has them under DDP."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def __getitem__(self, index):
        return list(self.sampler)[index]


class InSampler(Sampler):
    def __init__(self, sampler):
        self.dataset = OfSampler(sampler)

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return iter([self.dataset[index] for index in range(len(self))])


LOADERS = {
    "a generator": shuffled,
    "a worker that persists": lambda: shuffled(num_workers=1, persistent_workers=True),
    "a batch sampler": of_batches,
    "a sampler in a sampler": lambda: DataLoader(DATA, 4, sampler=InSampler(shuffled().sampler)),
    "a sampler that draws": lambda: DataLoader(DATA, 4, sampler=Drawing()),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a stream that tells its place": lambda: DataLoader(DeepStream(), 4),
    "a stream in a stream": lambda: DataLoader(Wrapping(), 4),
}


@pytest.mark.parametrize("name", LOADERS)
def test_two_epochs_are_those_of_a_loader_that_nobody_copied(name):
    expected, loader = LOADERS[name](), LOADERS[name]()
    batches = [batch.tolist() for _ in range(2) for batch in expected]
    assert len(list(islice(own_loader(loader), 2))) == 2
    first = iter(loader)
    found = [next(first).tolist()]
    assert len(list(islice(own_loader(loader), 3))) == 3, "in the middle of an epoch"
    found += [batch.tolist() for batch in first]
    assert len(list(islice(own_loader(loader), 3))) == 3, "between two epochs"
    assert found + [batch.tolist() for batch in loader] == batches


def test_a_copy_shares_the_data():
    stream = DeepStream()
    own = own_loader(DataLoader(stream, 4)).dataset
    assert own.data is stream.data
    assert own.inner is not stream.inner
    tensors = TensorDataset(DATA)
    assert own_loader(DataLoader(tensors, 4, shuffle=True)).sampler.data_source is tensors


def test_what_is_no_loader_and_keeps_no_place_is_drawn_from_itself():
    batches = [1, 2, 3]
    assert own_loader(batches) is batches


def test_data_drawn_by_a_loaders_own_generator_come_in_the_plain_order():
    def loaders():
        options = {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        return DataLoader(TensorDataset(*parts.images().tensors, torch.arange(32)), 8, **options), None

    class Noting(parts.Blobs):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(batch[2].tolist())

    orders = []
    for callbacks in ([], [CTDRCallback(rank=0.5, recovery=Recovery(batchnorm_batches=2), verbose=False)]):
        seen = []
        parts.fit(Noting(), *callbacks, data=loaders())
        orders.append(seen)
    assert orders[0] == orders[1]
