"""Folders of shards are put together in one process, and a hostile one runs no code."""

import os
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from ctdr_lightning import decompose, restore
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.decomposition.layers.saved_shards import read_folder, saved_shapes


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 8))


def saved(folder):
    """A folder as Lightning writes it, with an optimizer's state and entries of every kind."""
    model = net()
    decompose(model, rank=4, select="0", progress=False)
    state = {"state_dict": model.state_dict(), "optimizer_0": {"state": {"0.x": {"step": 1, "m": torch.ones(3)}}}}
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 3}, folder / "meta.pt")
    return model


def test_a_folder_is_read_as_one_file_would_be(tmp_path):
    model = saved(tmp_path)
    found = read_folder(tmp_path)
    assert found["epoch"] == 3
    assert found.keys() == {"epoch", "state_dict"}
    assert all(torch.equal(found["state_dict"][name], tensor) for name, tensor in model.state_dict().items())
    assert saved_shapes(tmp_path) == {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert restore(net(), tmp_path)[0].ranks == (4,)


class Command:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return os.system, (self.text,)


def named_by(module, word, argument, memoized):
    """An index that calls what two words name; these come from the memo where they are named twice."""
    words = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() + b"\x94" for text in (module, word))
    if memoized:
        words += b"00h\x00h\x01"
    text = b"\x8c" + bytes([len(argument)]) + argument.encode()
    return b"\x80\x04" + words + b"\x93" + text + b"\x85R."


def hostile(kind, command):
    match kind:
        case "named by two words":
            return pickle.dumps(Command(command), protocol=4)
        case "named in one line":
            return pickle.dumps(Command(command), protocol=2)
        case "named from the memo":
            return named_by("posix", "system", command, memoized=True)
        case "reached through a harmless module":
            return named_by("torch.distributed.checkpoint.metadata", "os.system", command, memoized=False)


KINDS = ("named by two words", "named in one line", "named from the memo", "reached through a harmless module")


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_folder_runs_nothing(tmp_path, kind):
    saved(tmp_path)
    mark = tmp_path / "ran"
    index = hostile(kind, f"touch {mark}")
    (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match="index names"):
        restore(net(), tmp_path)
    with pytest.raises(ValueError, match="index names"):
        saved_shapes(tmp_path)
    assert not mark.exists()
    pickle.loads(index)
    assert mark.exists(), "the index is no hostile one"
