import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ctdr_lightning import decompose, merge
from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.decomposition.choose.select import find_layers


def lazy():
    return nn.LazyLinear(8)


def replaced_forward():
    layer = nn.Linear(16, 16)
    layer.forward = lambda x: x
    return layer


def old_weight_norm():
    return torch.nn.utils.weight_norm(nn.Linear(16, 16))


def dynamic_quantised():
    return torch.ao.nn.quantized.dynamic.Linear(16, 16)


def frozen_integers():
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    return layer


class Tagged(torch.Tensor):
    """As quantisation and sharding libraries wrap weights."""


def wrapped_weight():
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(torch.randn(16, 16).as_subclass(Tagged))
    return layer


def hooked():
    layer = nn.Linear(16, 16)
    layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return layer


def updated_in_the_backward():
    layer = nn.Linear(16, 16)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: weight.data.sub_(weight.grad))
    return layer


REFUSED = {
    "gradient has a hook": hooked,
    "has a hook, which factors would not have": updated_in_the_backward,
    "lazy": lazy,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(16, 16)),
    "computed from other parameters": old_weight_norm,
    "computed": lambda: parametrizations.orthogonal(nn.Linear(16, 16)),
    "quantised": dynamic_quantised,
    "int8": frozen_integers,
    "Tagged": wrapped_weight,
    "complex64": lambda: nn.Linear(16, 16, dtype=torch.complex64),
    "replaced on the instance": replaced_forward,
    "max_norm": lambda: nn.Embedding(32, 16, max_norm=1.0),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, groups=16),
}


@pytest.mark.parametrize("words", REFUSED)
def test_left_alone_with_a_reason(words):
    odd = REFUSED[words]()
    model = nn.Sequential(odd, nn.Linear(16, 16))
    report = decompose(model, rank=4)
    assert model[0] is odd
    assert [row.decision for row in report] == ["dense", "factorized"]
    assert words in report.layers[0].reason


def test_the_copy_of_a_layer_with_a_hook_is_left_alone_too():
    copied = duplicate(nn.Sequential(hooked(), nn.Linear(16, 16)))
    assert [bool(layer.refusal) for layer in find_layers(copied)] == [True, False]


def test_parametrized_by_a_custom_module():
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    parametrize.register_parametrization(model[0], "weight", Double())
    report = decompose(model, rank=4)
    assert "computed" in report.layers[0].reason
    assert isinstance(model[0], nn.Linear)


def test_subclass_with_its_own_forward_is_not_a_linear_layer():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    class Plain(nn.Linear):
        pass

    model = nn.Sequential(Odd(16, 16), Plain(16, 16))
    assert [layer.name for layer in find_layers(model)] == ["1"]
    decompose(model, rank=4)
    assert type(merge(model)[1]) is Plain


def test_lora_wrapped_layers_keep_their_wrapper():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down, self.up = (
                nn.Linear(16, 16),
                nn.Linear(16, 2, bias=False),
                nn.Linear(2, 16, bias=False),
            )

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(Lora())
    report = decompose(model, rank=4)
    assert {row.name: row.decision for row in report} == {"0.base": "factorized", "0.down": "dense", "0.up": "dense"}


def test_hugging_face_conv1d():
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(24, 16)
    model = nn.Sequential(copy.deepcopy(layer))
    decompose(model, rank=8, method="svd")
    x = torch.randn(2, 3, 16)
    y = model(x)
    assert (model[0].nf, model[0].nx) == (24, 16)
    assert model[0].weight.shape == (16, 24)
    merge(model)
    assert isinstance(model[0], Conv1D)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)


def test_a_layer_used_twice_in_one_parent_is_replaced_twice():
    layer = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.ReLU(), layer)})
    decompose(model, rank=4)
    assert model["a"] is model["b"][0] is model["b"][2]
    merge(model)
    assert model["a"] is model["b"][0] is model["b"][2]
    assert type(model["a"]) is nn.Linear


def test_tied_biases_and_hooks_are_carried_over():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append("ran"))
    decompose(model, rank=4)
    model(torch.randn(2, 16))
    assert seen == ["ran"]
    handle.remove()
    model(torch.randn(2, 16))
    merge(model)(torch.randn(2, 16))
    assert seen == ["ran"]
