"""A step that runs out of memory on one of two processes: repeated there where nobody waits in it, else refused."""

import pytest
import torch
import torch.distributed as dist

from ctdr_lightning import CTDRCallback
from ctdr_lightning.trainer.reports.event_words import words_of
from tests import forks, parts


class Fails(parts.Blobs):
    """Runs out of memory once, on the second rank, with or without a gather before."""

    def __init__(self, where=None, gathers=False):
        super().__init__()
        left = [where]
        self.gathers = gathers

        def fails(place, index):
            if left[0] == place and index == 1 and parts.rank() == 1:
                left[0] = None
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

        self.fails = fails

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.gathers:
            dist.all_reduce(torch.ones(1))
        self.fails("forward", index)
        return loss

    def backward(self, loss, *args, **kwargs):
        self.fails("backward", self.trainer.global_step)
        super().backward(loss, *args, **kwargs)


def train(folder, name, where=None, gathers=False, policy="sqrt"):
    parts.seed_everything(0, verbose=False)
    module = Fails(where, gathers)
    callback = CTDRCallback(rank=None, memory_budget="1GiB", policy=policy, verbose=False)
    try:
        parts.fit(module, callback, strategy="ddp", devices=2, max_epochs=2, default_root_dir=folder)
    except torch.OutOfMemoryError as error:
        (folder / f"error{parts.rank()}").write_text(str(error))
        raise
    events = [said for said in map(words_of, callback.run.memory.session.events) if "ran out" in said]
    torch.save([module.state_dict(), module.losses, events], folder / f"{name}{parts.rank()}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sqrt", "keep"])
def test_a_forward_in_which_nobody_waits_is_repeated_on_one_rank_alone(tmp_path, policy):
    assert forks.run(train, tmp_path, "plain", ranks=2) == [0, 0]
    assert forks.run(train, tmp_path, "failed", "forward", False, policy, ranks=2) == [0, 0]
    for rank in (0, 1):
        plain, failed = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("plain", "failed"))
        assert parts.same(plain[0], failed[0])
        assert parts.same(plain[1], failed[1])
        assert len(failed[2]) == rank


@pytest.mark.parametrize(("where", "gathers"), [("forward", True), ("backward", False)])
def test_where_others_wait_the_error_names_memory_and_rank(tmp_path, where, gathers):
    assert 1 in forks.run(train, tmp_path, "failed", where, gathers, ranks=2)
    said = (tmp_path / "error1").read_text()
    assert "Tried to allocate 1 GiB" in said
    assert "memory ran out on rank 1 of 2" in said
    assert "other processes take part" in said
    assert not (tmp_path / "error0").exists()
