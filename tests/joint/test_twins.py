"""Candidates share the dense model's tensors and leave everything else of it alone."""

import torch

from ctdr_lightning import decompose, record
from ctdr_lightning.decomposition import Choices, FactorizedLayer, LayerChoice
from ctdr_lightning.joint.twins import structure_of, twin_of, unmoved
from tests.joint import parts


def test_a_twin_has_its_own_modules_and_the_same_tensors():
    net = parts.network()
    twin = twin_of(net)
    assert all(a is b for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert all(a is b for a, b in zip(net.buffers(), twin.buffers(), strict=True))
    decompose(twin, rank=0.5, progress=False)
    assert not any(isinstance(layer, FactorizedLayer) for layer in net.modules())


def test_a_stored_tensor_with_a_graph_is_copied_without_it():
    net = parts.network()
    net.total = sum(p.sum() for p in net.parameters())
    twin = twin_of(net)
    assert not twin.total.requires_grad
    assert torch.equal(twin.total, net.total)


def test_a_structure_has_the_shapes_of_the_factorized_model():
    net = parts.network()
    made = twin_of(net)
    report = decompose(made, rank=0.4, progress=False)
    shapes = {name: tensor.shape for name, tensor in structure_of(net, report.choices).state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in made.state_dict().items()}
    plain = structure_of(net, Choices({"3": LayerChoice(reason="dense")}))
    assert not any(isinstance(layer, FactorizedLayer) for layer in plain.modules())


def test_nothing_moves_while_steps_are_tried():
    net, (batch,) = parts.network(), parts.batches(1)
    parts.step(net, batch).backward()
    gradient = net[0].weight.grad.clone()
    kept, random = net[0].weight.grad, torch.get_rng_state()
    statistics = net[1].running_mean.clone()
    with unmoved(net):
        assert net[0].weight.grad is None
        net[6].eval()
        record(lambda: parts.step(net, batch))
    assert net[0].weight.grad is kept
    assert torch.equal(kept, gradient)
    assert torch.equal(net[1].running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), random)
    assert net[6].training
