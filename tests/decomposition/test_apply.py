import copy
import json
import math

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose, merge, restore
from ctdr_lightning.basics.errors import ConfigError
from tests.decomposition.cases import decay_


def small_net() -> nn.Sequential:
    """Convolutions, a 1x1, a linear layer; weights of decaying spectrum, as trained ones have."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 40),
    )
    with torch.no_grad():
        for module in net:
            if isinstance(module, nn.Conv2d | nn.Linear):
                flat = module.weight.flatten(1)
                u, s, v = torch.linalg.svd(flat, full_matrices=False)
                decay = torch.arange(1, len(s) + 1).float() ** -1.5
                module.weight.copy_((u * decay * s[0] @ v).view_as(module.weight))
    return net


@pytest.fixture
def image():
    return torch.randn(2, 3, 12, 12)


def test_every_layer_keeps_its_share_where_none_is_allocated():
    net = small_net()
    report = decompose(net, rank=0.5, allocate=None)
    for row in report.factorized:
        bias = (
            0
            if getattr(net.get_submodule(row.name), "bias", None) is None
            else net.get_submodule(row.name).bias.numel()
        )
        assert row.parameters_after - bias <= 0.5 * (row.parameters_before - bias)
    assert report.parameters_after == sum(p.numel() for p in net.parameters()) < report.parameters_before
    assert len(report.factorized) == 4


@pytest.mark.parametrize("rank", [0.5, 8, "vbmf", "vbmf=0.5", "error=0.3", "energy=0.9", {"2": (8, 8), "*": 0.5}])
def test_every_rank_rule_makes_a_smaller_model_that_trains(rank, image):
    net = small_net()
    report = decompose(net, rank=rank)
    assert report.factorized
    net(image).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    assert sum(p.numel() for p in net.parameters()) == report.parameters_after < report.parameters_before


@pytest.mark.parametrize("allocate", [None, "parameters"])
def test_twice_is_once(image, allocate):
    net = small_net()
    decompose(net, rank=0.5, allocate=allocate)
    before = net.eval()(image)
    for share in (0.5, 0.25):
        again = decompose(net, rank=share, allocate=allocate)
        assert torch.equal(net(image), before)
        assert again.parameters_before == again.parameters_after
    assert any(row.reason.startswith("already factorized") for row in again)


def test_reported_error_is_the_error_of_the_weight():
    dense = small_net()
    net = copy.deepcopy(dense)
    for row in decompose(net, rank=0.4).factorized:
        old, new = dense.get_submodule(row.name).weight, net.get_submodule(row.name).weight
        assert row.relative_error == pytest.approx(float((old - new).norm() / old.norm()), rel=1e-4)


def test_error_bound_holds():
    net = small_net()
    rows = decompose(net, rank="error=0.2").factorized
    assert rows
    assert all(row.relative_error <= 0.2 + 1e-6 for row in rows)


def test_plan_survives_json_and_gives_the_same_model(image):
    dense = small_net().eval()
    first, second = copy.deepcopy(dense), copy.deepcopy(dense)
    choices = json.loads(json.dumps(decompose(first, rank={"2": 8, "7": 0.5}).choices.to_dict()))
    report = decompose(second, choices=choices)
    assert torch.equal(first(image), second(image))
    assert report.choices.to_dict()["layers"]["2"]["ranks"] == choices["layers"]["2"]["ranks"]
    assert decompose(second, choices=choices).parameters_after == report.parameters_after


@pytest.mark.parametrize("method", ["tucker", "cp", "tt", "spatial", "svd"])
@pytest.mark.parametrize("rank", [0.5, "vbmf=0.9", "error=0.5", 13])
def test_ranks_are_rounded_to_a_multiple(method, rank):
    net = nn.Sequential(decay_(nn.Conv2d(32, 32, 3)))
    (row,) = decompose(net, rank=rank, method=method, multiple=8).layers
    assert row.decision == "factorized"
    assert all(r % 8 == 0 for r in row.ranks)


def test_weakened_vbmf_keeps_more():
    kept = []
    for rank in ("vbmf", "vbmf=0.8", "vbmf=0.4"):
        net = nn.Sequential(decay_(nn.Conv2d(32, 32, 3), 1.0))
        kept.append(decompose(net, rank=rank, method="tucker").layers[0].ranks)
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_auto_has_the_least_error_at_equal_parameters():
    for power in (0.3, 1.0, 2.0):
        layer = decay_(nn.Conv2d(24, 24, 3), power)
        errors = {}
        for method in ("auto", "tucker", "spatial", "svd"):
            net = nn.Sequential(copy.deepcopy(layer))
            row = decompose(net, rank=0.3, method=method).layers[0]
            assert row.parameters_after - 24 <= 0.3 * layer.weight.numel()
            errors[method] = row.relative_error
        assert errors["auto"] <= min(errors.values()) + 5e-3  # chosen by the HOSVD's error, which HOOI still lowers


def test_merge_keeps_outputs_and_classes(image):
    net = small_net().eval()
    names = [type(m) for m in net.modules()]
    decompose(net, rank=0.5)
    before = net(image)
    assert merge(net) is net
    assert [type(m) for m in net.modules()] == names
    torch.testing.assert_close(net(image), before, rtol=1e-4, atol=1e-5)


def test_shared_module_is_decomposed_once_and_stays_shared():
    layer = nn.Linear(32, 32)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    decompose(net, rank=8)
    assert net[0] is net[2]
    assert net[0].ranks == (8,)


def tied_net():
    net = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, 16),
            "body": nn.Linear(16, 16),
            "head": nn.Linear(16, 50),
            "table": nn.Embedding(50, 16),
        }
    )
    net["head"].weight = net["table"].weight = net["embed"].weight
    return net


def run_tied(net, words):
    return net["head"](torch.relu(net["body"](net["embed"](words) + net["table"](words))))


def test_tied_weights_are_factorized_once_and_stay_tied():
    net, words = tied_net(), torch.randint(0, 50, (4, 6))
    n_before = sum(p.numel() for p in net.parameters())
    report = decompose(net, rank=0.5, allocate=None)
    assert [row.decision for row in report] == ["factorized", "factorized", "dense", "dense"]
    assert "tied to embed" in report.layers[2].reason
    assert sum(row.parameters_before for row in report) == n_before
    assert sum(p.numel() for p in net.parameters()) < 0.6 * n_before
    run_tied(net, words).square().sum().backward()
    assert decompose(net, rank=0.5).layers[0].reason.startswith("already factorized")
    before = run_tied(net, words)
    copied = restore(tied_net(), net.state_dict())
    torch.testing.assert_close(run_tied(copied, words), before)
    assert copied["head"].owner is copied["embed"]
    merge(net)
    assert net["head"].weight is net["table"].weight is net["embed"].weight
    torch.testing.assert_close(run_tied(net, words), before, rtol=1e-4, atol=1e-5)


def test_a_tied_group_with_one_that_may_not_be_factorized_stays_dense():
    net = tied_net()
    net["table"].max_norm = 1.0
    report = decompose(net, rank=0.5, allocate=None)
    assert [row.decision for row in report] == ["dense", "factorized", "dense", "dense"]
    assert "tied" in report.layers[0].reason


def test_attention_is_decomposed_projection_by_projection():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    x = torch.randn(3, 5, 32)
    n_before = sum(p.numel() for p in encoder.parameters())
    untouched = encoder.layers[0].self_attn
    decompose(encoder, rank=0.5, select="*.linear1")
    assert encoder.layers[0].self_attn is untouched
    report = decompose(encoder, rank=0.25)
    assert {name.split(".")[-1] for name in (row.name for row in report)} >= {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert sum(p.numel() for p in encoder.parameters()) < 0.4 * n_before
    before = encoder(x)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    torch.testing.assert_close(restore(plain, encoder.state_dict())(x), before)
    encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), before, rtol=1e-4, atol=1e-5)
    merge(encoder)
    assert type(encoder.layers[0].self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(encoder(x), before, rtol=1e-4, atol=1e-5)


def test_frozen_stays_frozen_and_the_bias_is_the_same_parameter():
    net = small_net()
    net[7].weight.requires_grad_(False)
    bias = net[7].bias
    decompose(net, rank=0.5)
    assert not any(stage.weight.requires_grad for stage in net[7].chain)
    assert net[7].bias is bias


def test_random_state_is_untouched():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    decompose(small_net_seeded := small_net(), rank=0.5)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    decompose(small_net_seeded, rank=0.5)
    merge(small_net_seeded)
    decompose(small_net_seeded, rank=0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.rand(3), expected)


def test_report_prints_one_line_a_layer_and_the_reasons():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    text = str(decompose(net, rank=16))
    assert "svd" in text
    assert "would have" in text
    assert "whole model" in text


@pytest.mark.parametrize(
    "rank",
    [
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        math.nan,
        math.inf,
        True,
        None,
        "half",
        "error",
        "error=2",
        "error=x",
        (),
        (0,),
        {},
        {"7": 0},
    ],
)
def test_bad_rank_is_an_error_that_names_it(rank):
    with pytest.raises(ConfigError, match="rank"):
        decompose(small_net(), rank=rank)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "tuker"}, "Did you mean 'tucker'"),
        ({"method": []}, "names no method"),
        ({"select": "layer9.*"}, "matches no layer"),
        ({"select": []}, "select is empty"),
        ({"select": ["!*"]}, "leaves no layer"),
        ({"rank": {"nothing": 0.5}}, "matches no layer"),
        ({"rank": {"re:(": 0.5}}, "not a regular expression"),
        ({"rank": {"[23]": 0.5, "[24]": 0.25}}, "say different things"),
        ({"rank": {"7": (99,)}}, "not in 1"),
        ({"rank": {"2": (1, 2, 3)}}, "has 2 ranks"),
        ({"rank": 4096}, "above the largest rank"),
        ({"rank": {"7": 64, "*": 0.5}}, "above the largest rank, 40"),
        ({"select": 3}, "neither a pattern"),
        ({"method": 3}, "names no method"),
        ({"method": [["tucker"]]}, "names no method"),
        ({"solver": "magic"}, "solver 'magic'"),
        ({"choices": {}}, "version"),
        ({"choices": {"version": 1, "layers": {"nope": {"decision": "dense"}}}}, "not in the model"),
        ({"choices": {"version": 1, "layers": {"7": {"decision": "maybe"}}}}, "maybe"),
        (
            {"choices": {"version": 1, "layers": {"7": {"decision": "factorized", "method": "svd", "ranks": [99]}}}},
            "not in 1",
        ),
        (
            {"choices": {"version": 1, "layers": {"7": {"decision": "factorized", "method": "tucker", "ranks": [9]}}}},
            "fit",
        ),
    ],
)
def test_bad_arguments_are_errors_with_a_hint(arguments, words):
    net = small_net()
    with pytest.raises(ConfigError, match=words) as caught:
        decompose(net, **arguments)
    assert caught.value.hint
    assert not any("svd" in name or "tucker" in name for name, _ in net.named_modules())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(poison):
    net = small_net()
    net[4].weight.data[0, 0] = poison
    with pytest.raises(ConfigError, match=r"'4'.*1 of"):
        decompose(net)


def test_nothing_to_decompose():
    with pytest.raises(ConfigError, match="nothing to decompose"):
        decompose(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match="itself a Linear"):
        decompose(nn.Linear(4, 4))
