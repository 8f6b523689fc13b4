"""Every net of the engine's battery: torchvision's families and the transformers models."""

import copy

import pytest
import torch

from ctdr_lightning import decompose, merge, restore
from ctdr_lightning.decomposition import FactorizedLayer
from tests.in_turn import in_turn
from tests.memory.zoo import ZOO, build

RECURRENT = {"lstm", "gru"}  # no layer of theirs is a module of its own
LARGE = {
    "vgg16",
    "wide_resnet50_2",
    "fcn_resnet50",
    "deeplabv3_resnet50",
    "r3d_18",
    "mc3_18",
    "r2plus1d_18",
    "swin3d_t",
}
NETS = [
    *in_turn(sorted(set(ZOO) - RECURRENT - LARGE), (), pytest.mark.exhaustive),
    *in_turn(sorted(LARGE), pytest.mark.slow, pytest.mark.exhaustive),
]


def outputs(model, step):
    """All tensors that a step's forward returns, and its loss."""
    found = []

    def note(_module, _args, out):
        values = [out] if isinstance(out, torch.Tensor) else list(out.values() if hasattr(out, "values") else out)
        found.extend(value.detach() for value in values if isinstance(value, torch.Tensor))

    handle = model.register_forward_hook(note)
    loss = step(model)
    handle.remove()
    return [*found, loss.detach()], loss


@pytest.mark.parametrize("name", NETS)
def test_decomposes_trains_restores_and_merges_back(name):
    model, step = build(name)
    dense = copy.deepcopy(model)
    report = decompose(model, rank=8, solver="randomized")
    assert report.factorized
    assert report.parameters_after == sum(p.numel() for p in model.parameters()) < report.parameters_before
    _, loss = outputs(model, step)
    loss.backward()
    used = [m for m in model.modules() if isinstance(m, FactorizedLayer)]
    assert all(torch.isfinite(p.grad).all() for m in used for p in m.parameters() if p.grad is not None)
    assert any(p.grad is not None for m in used for p in m.parameters())

    model.eval()
    expected, _ = outputs(model, step)
    restored, _ = outputs(restore(dense, model.state_dict()).eval(), step)
    assert all(torch.equal(a, b) for a, b in zip(expected, restored, strict=True))
    merged, _ = outputs(merge(model), step)
    assert not any(isinstance(m, FactorizedLayer) for m in model.modules())
    for before, after in zip(expected, merged, strict=True):
        assert (before - after).norm() <= 1e-4 * before.norm().clamp_min(1e-3)
