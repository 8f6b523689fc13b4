"""Holders that make mistakes show: landing memory is not a number until it has landed, and every transfer is late."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from ctdr_lightning.memory.holders import HOLDERS, HolderOptions


class Late:
    """A lane's or a disk's copies after a random delay, into memory that was filled with NaN when it was taken."""

    def __init__(self, seed: int, most_s: float = 0.003) -> None:
        self.draw, self.most_s = random.Random(seed), most_s

    def sleep(self) -> None:
        """Be late."""
        time.sleep(self.draw.random() * self.most_s)


def poison(tensors: list[Tensor]) -> None:
    """All bits set: NaN in every float, an index far outside."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(255)


def late_disk(options: HolderOptions, seed: int):
    """A disk whose transfers are late."""
    disk, late = HOLDERS["disk"](options), Late(seed)
    write, read = disk.write_all, disk.read_all

    def write_all(*args):
        late.sleep()
        write(*args)

    def read_all(targets, *args):
        poison(targets)
        late.sleep()
        read(targets, *args)

    disk.write_all, disk.read_all = write_all, read_all
    return disk


def late_host(options: HolderOptions, seed: int):
    """A host whose transfers are late."""
    host, late = HOLDERS["host"](options), Late(seed)
    for lane in (host.out, host.back):
        copy = lane._copy

        def slow(pairs, after, copy=copy, lane=lane):
            if lane is host.back:
                poison([target for target, _ in pairs])
            late.sleep()
            copy(pairs, after)

        lane._copy = slow
    return host


def late_holders(seed: int, folder=None):
    """Both, by name."""
    options = HolderOptions(folder=folder)
    return {"disk": late_disk(options, seed), "host": late_host(options, seed)}
