"""Steps that run out of memory under a real limit of the address space end like those of a run without one."""

import ctypes
import resource

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback
from ctdr_lightning.trainer.reports.event_words import words_of
from tests import forks, parts
from tests.in_turn import in_turn
from tests.trainer.training_step import test_retry

ROWS, WIDTH, DEPTH = 2**16, 64, 12  # an activation is 16 MiB, and the forward saves 12 and more of them
# The step takes 290 MiB above what stands between two steps. It is planned anew for a fifth less than what it reached:
# 118 MiB of 155, 168 of 216. Where a part of a step cannot be undone, there is room enough for the rest of it.
HEADROOM_MIB, HEADROOM_OF_ONE_TRY_MIB = 155, 216
HEADROOM_OF_RANKS_MIB = 185  # memory runs out in the forward, as late as a rank may be rescued
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


class Large:
    """Before another kind of module: the same, with a network that is deep and wide enough to fill memory."""

    def prepare(self):
        body = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        head = (nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1))
        self.net = nn.Sequential(*head, *body, nn.Linear(WIDTH, 1))
        super().prepare()


class Cap(Callback):
    """From one batch on the process may have little more memory than it has between two steps."""

    def __init__(self, batch, rank, headroom_mib=HEADROOM_MIB):
        self.batch, self.rank, self.headroom_bytes = batch, rank, headroom_mib * 2**20

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == self.batch and trainer.global_rank == self.rank:
            with open("/proc/self/statm") as status:
                taken = int(status.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + self.headroom_bytes, resource.RLIM_INFINITY))


def fit(kind, cap, folder, **options):
    """What four batches leave behind, and what the callback said."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)  # what is freed goes back, and counts no more
    # An allocation that fails opens another arena, 64 MiB of the limit or 128 by chance. With 40 MiB
    # left by the limit, planning died of it or not.
    libc.mallopt(M_ARENA_MAX, 1)
    seed_everything(0, verbose=False)
    net = type(f"Large{kind.__name__}", (Large, kind), {})()
    # Whole batches: to collate them from single rows took a third of the time.
    batches = [[rows.clone()] for rows in torch.randn(4 * ROWS, 8).split(ROWS)]
    data = DataLoader(batches, batch_size=None)
    callback = CTDRCallback(rank=None, memory_budget="8GiB", verbose=False)
    trainer = Trainer(
        default_root_dir=folder, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", callbacks=[callback, *([cap] if cap else [])], **options,
    )  # fmt: skip
    trainer.fit(net, data)
    left = {"state": dict(net.state_dict()), "torch": torch.get_rng_state(), "calls": net.calls, **net.state()}
    return left, " ".join(map(words_of, callback.run.memory.session.events))


def rescued(kind, batch, folder, options):
    want, quiet = fit(kind, None, folder, **options)
    once = kind is test_retry.Manual or "accumulate_grad_batches" in options
    cap = Cap(batch, 0, HEADROOM_OF_ONE_TRY_MIB if once else HEADROOM_MIB)
    found, said = fit(kind, cap, folder, **options)
    assert "ran out of memory" not in quiet
    assert "allocate memory" in said or "not enough memory" in said, said
    assert want.keys() == found.keys()
    differing = [name for name in want if not parts.same(want[name], found[name])]
    assert differing == []


CASES = {
    "BatchNorm, dropout, a metric": (test_retry.Net, 1, {}),
    "from the first batch on": (test_retry.Net, 0, {}),
    "an EMA teacher": (test_retry.LargeTeacher, 1, {}),
    "a teacher through .data": (test_retry.TeacherOfData, 1, {}),
    "a queue of 64 x 2048": (test_retry.Queue, 1, {}),
    "a hidden state": (test_retry.Attributes, 1, {}),
    "every random generator": (test_retry.Random, 1, {}),
    "a batch written in place": (test_retry.Batch, 1, {}),
    "manual optimization": (test_retry.Manual, 1, {}),
    "accumulated gradients": (test_retry.Net, 2, {"accumulate_grad_batches": 2}),
}


# Each takes 40 s: its processes import torch and Lightning afresh, under a limit of their address space.
@pytest.mark.parametrize("case", in_turn(CASES, pytest.mark.slow, *[pytest.mark.exhaustive] * 9))
def test_a_rescued_run_ends_like_one_with_memory_enough(case, tmp_path):
    kind, batch, options = CASES[case]
    assert forks.run(rescued, kind, batch, tmp_path, options, timeout_s=300, start="spawn") == [0]


def on_ranks(name, cap, folder):
    left, said = fit(test_retry.Net, cap, folder, strategy="ddp", devices=2)
    torch.save([left["state"], left["torch"], said], folder / f"{name}{parts.rank()}.pt")


@pytest.mark.exhaustive
def test_one_of_two_ranks_is_rescued_in_its_forward(tmp_path):
    assert forks.run(on_ranks, "plain", None, tmp_path, ranks=2, timeout_s=300, start="spawn") == [0, 0]
    assert forks.run(
        on_ranks, "capped", Cap(1, 1, HEADROOM_OF_RANKS_MIB), tmp_path, ranks=2, timeout_s=300, start="spawn"
    ) == [0, 0]
    for rank in (0, 1):
        plain, capped = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("plain", "capped"))
        assert parts.same(plain[:2], capped[:2])
        assert ("ran out of memory" in capped[2]) is (rank == 1), capped[2]
