import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose, restore
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.decomposition.layers.from_checkpoint import rebuild_from_state_dict


def dense_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 24))


@pytest.fixture
def trained():
    net = dense_net()
    decompose(net, rank=0.5, allocate=None)
    net(torch.randn(4, 3, 6, 6))
    return net.eval()


@pytest.mark.parametrize("form", ["path", "lightning", "state dict"])
def test_restores_a_dense_model_to_the_saved_one(trained, form, tmp_path):
    checkpoint = trained.state_dict()
    if form != "state dict":
        checkpoint = {"state_dict": checkpoint, "epoch": 3}
    if form == "path":
        torch.save(checkpoint, tmp_path / "net.ckpt")
        checkpoint = tmp_path / "net.ckpt"
    model = restore(dense_net(), checkpoint).eval()
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(model(x), trained(x))


def test_prefix_of_a_module_that_held_the_model(trained):
    state = {f"net.{key}": value for key, value in trained.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        restore(dense_net(), state)
    assert 'prefix="net."' in caught.value.hint
    model = restore(dense_net(), {"state_dict": {**state, "loss.weight": torch.ones(3)}}, prefix="net.").eval()
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(model(x), trained(x))


def test_restores_over_other_ranks(trained):
    model = dense_net()
    decompose(model, rank=2)
    restore(model, trained.state_dict())
    assert model[0].ranks == trained[0].ranks


def test_works_as_a_pre_hook_on_copies_and_under_prefixes(trained):
    def hook(module, state_dict, prefix, *_):
        rebuild_from_state_dict(module, state_dict, prefix)

    model = dense_net()
    model.register_load_state_dict_pre_hook(hook)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        wrapped = nn.ModuleDict({"module": each})
        wrapped.load_state_dict({f"module.{key}": value for key, value in trained.state_dict().items()})
        assert torch.equal(each[0].weight, trained[0].weight)


def test_dense_state_dict_changes_nothing(trained):
    assert rebuild_from_state_dict(trained, dense_net().state_dict()) == {}


def other_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 16, 5), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(64, 24))


@pytest.mark.parametrize("make", [other_net, lambda: nn.Sequential(nn.Linear(3, 4)), lambda: dense_net()[:2]])
def test_another_architecture_is_named_and_the_model_left_as_it_was(trained, make):
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="checkpoint"):
        restore(model, trained.state_dict())
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_hostile_pickle_is_refused_and_not_run(tmp_path):
    torch.save({"state_dict": Hostile(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    for name in ("bad.ckpt", "plain.ckpt"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            restore(dense_net(), tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_truncated_file(trained, kept, tmp_path):
    buffer = io.BytesIO()
    torch.save(trained.state_dict(), buffer)
    data = buffer.getvalue()
    (tmp_path / "cut.ckpt").write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(dense_net(), tmp_path / "cut.ckpt")


@pytest.mark.parametrize(
    "content", [{}, [], 3, {"state_dict": {}}, {"a": 1}, {1: torch.zeros(1)}, {"state_dict": None}]
)
def test_what_is_no_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError, match="checkpoint"):
        restore(dense_net(), tmp_path / "odd.ckpt")


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        restore(dense_net(), tmp_path / "none.ckpt")


def test_damaged_factor_shapes(trained):
    state = trained.state_dict()
    key = next(k for k in state if k.startswith("3.svd.0"))
    state[key] = state[key][:, :5]
    with pytest.raises(CheckpointError, match="do not fit layer '3'"):
        restore(dense_net(), state)
