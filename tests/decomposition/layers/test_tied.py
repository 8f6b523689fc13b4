import copy

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition.layers.surgery import factorize
from ctdr_lightning.decomposition.layers.tied import TiedLayer, factors_of, tied_groups
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of


def pair(first, second):
    layers = {"embedding": lambda: nn.Embedding(30, 8, padding_idx=0), "linear": lambda: nn.Linear(8, 30)}
    a, b = layers[first](), layers[second]()
    b.weight = a.weight
    return a, b


def own(dense, rank):
    return factorize(dense, KINDS[kind_of(dense)].geometry(dense), "svd", (rank,))


def example(layer):
    return torch.randint(0, 30, (4, 5)) if isinstance(layer, nn.Embedding) else torch.randn(4, 5, 8)


CASES = [("embedding", "linear"), ("linear", "embedding"), ("embedding", "embedding"), ("linear", "linear")]


@pytest.mark.parametrize(("first", "second"), CASES)
def test_at_full_rank_both_compute_what_they_did(first, second):
    a, b = pair(first, second)
    owner = own(a, 8)
    twin = TiedLayer(b, owner)
    for old, new in ((a, owner), (b, twin)):
        x = example(old)
        torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-5)
    left, right = factors_of(owner)
    torch.testing.assert_close(left @ right, a.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), CASES)
def test_the_factors_gradient_is_the_sum_of_both_uses(first, second):
    a, b = pair(first, second)
    owner = own(a, 3)
    twin = TiedLayer(b, owner)
    assert [name for name, _ in twin.named_parameters()] == ([] if isinstance(b, nn.Embedding) else ["bias"])
    weights = [layer.weight for layer in owner.factor_layers]
    losses = [lambda: owner(example_a).square().sum(), lambda: twin(example_b).square().sum()]
    example_a, example_b = example(a), example(b)
    alone = [torch.autograd.grad(loss(), weights) for loss in losses]
    both = torch.autograd.grad(losses[0]() + losses[1](), weights)
    for whole, one, other in zip(both, *alone, strict=True):
        assert other.abs().sum() > 0
        torch.testing.assert_close(whole, one + other)


@pytest.mark.parametrize(("first", "second"), CASES)
def test_merged_they_are_one_tensor_again(first, second):
    a, b = pair(first, second)
    owner = own(a, 3)
    twin = TiedLayer(b, owner)
    x = example(b)
    before = twin(x)
    dense = owner.to_dense()
    merged = twin.to_dense(dense.weight)
    assert type(merged) is type(b)
    assert merged.weight is dense.weight
    torch.testing.assert_close(merged(x), before, rtol=1e-4, atol=1e-5)


def test_a_copy_refers_to_its_own_owner_and_the_state_dict_holds_factors_once():
    a, b = pair("embedding", "linear")
    owner = own(a, 3)
    model = nn.ModuleDict({"wte": owner, "head": TiedLayer(b, owner)})
    assert sorted(model.state_dict()) == ["head.bias", "wte.svd.0.weight", "wte.svd.1.weight"]
    again = copy.deepcopy(model)
    assert again["head"].owner is again["wte"] is not owner


def test_groups_are_found_and_weights_used_otherwise_are_not():
    a, b = pair("embedding", "linear")
    model = nn.Sequential(a, nn.Linear(8, 8), b)
    assert [[name for name, _ in group] for group in tied_groups(model)] == [["0", "2"]]
    model.table = a.weight
    assert tied_groups(model) == []
