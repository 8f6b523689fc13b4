"""The last factors, fitted to the dense network's outputs on what really reaches them."""

import copy
import warnings

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.decomposition.choose.batches import Batches
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.layers.surgery import factorize
from ctdr_lightning.decomposition.methods import METHODS
from ctdr_lightning.decomposition.trials.bench import bench_of, own_bias, standing
from ctdr_lightning.decomposition.trials.refit import DenseRecord, _statistics, refit, set_statistics
from tests.decomposition.cases import decay_

LAYERS = {
    "linear": (lambda: nn.Linear(24, 20), (400, 24)),
    "linear without bias": (lambda: nn.Linear(24, 20, bias=False), (400, 24)),
    "linear on sequences": (lambda: nn.Linear(24, 20), (40, 9, 24)),
    "grouped, strided": (lambda: nn.Conv2d(16, 24, 3, 2, 1, groups=2), (32, 16, 9, 9)),
    "dilated, reflected": (
        lambda: nn.Conv2d(16, 24, 3, padding=2, dilation=2, padding_mode="reflect"),
        (32, 16, 9, 9),
    ),
    "one axis, same": (lambda: nn.Conv1d(16, 24, 5, padding="same"), (32, 16, 30)),
    "three axes": (lambda: nn.Conv3d(12, 16, 3, padding=1), (40, 12, 5, 6, 5)),
    "transposed": (
        lambda: nn.ConvTranspose2d(16, 24, 3, 2, 1, output_padding=1, groups=2),
        (16, 16, 6, 6),
    ),
}  # fmt: skip


def inputs(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Correlated inputs with a mean, as after a ReLU."""
    torch.manual_seed(seed)
    return (torch.randn(shape) + 0.5 * torch.randn(shape[0], *(1 for _ in shape[1:]))).relu()


def compressed(model, method, name="0"):
    """The model's first layer factorized, a bias of its own, and the record of the dense model."""
    (layer,) = [layer for layer in find_layers(model) if layer.name == name]
    form = METHODS[method]
    if not form.supports(layer.geometry):
        form = METHODS["tt_linear" if method == "tt" and not layer.geometry.kernel else "svd"]
    ranks = tuple(max(rank // 3, 1) for rank in form.max_ranks(layer.geometry))
    ranks = form.feasible(layer.geometry, ranks) if form.name != "cp" else (16,)
    new = factorize(layer.module, layer.geometry, form.name, ranks)
    own_bias(new)
    return layer, new


@pytest.mark.parametrize("method", ["svd", "tucker", "cp", "tt", "spatial"])
@pytest.mark.parametrize("case", LAYERS)
def test_every_method_and_layer_comes_nearer_to_the_dense_outputs(case, method):
    torch.manual_seed(0)
    make, shape = LAYERS[case]
    model = nn.Sequential(decay_(make(), 0.6))
    seen, unseen = inputs(shape, 1), inputs(shape, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CP of low rank may say that components cancel
        layer, new = compressed(model, method)
    dense = model(unseen)
    before = (new(unseen) - dense).square().mean()
    record = DenseRecord(model, [layer], Batches.draw([seen], 1, None))
    with standing(model, {"0": layer}, {"0": new}):
        refit(model, {"0": new}, record)
    after = (new(unseen) - dense).square().mean()
    assert after < 0.97 * before
    assert torch.equal(model(unseen), dense)  # the dense layer, its bias too, is as it was


def test_a_last_factor_is_the_least_squares_solution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9))
    layer, new = compressed(model, "svd")
    x = torch.randn(6000, 12) @ torch.randn(12, 12)
    record = DenseRecord(model, [layer], Batches.draw([x], 1, None))
    with standing(model, {"0": layer}, {"0": new}):
        refit(model, {"0": new}, record)
    hidden = torch.cat((new.factor_layers[0](x), torch.ones(len(x), 1)), 1).detach()
    best = torch.linalg.lstsq(hidden.double(), model(x).detach().double()).solution
    found = torch.cat((new.factor_layers[1].weight.T, new.bias[None]))
    torch.testing.assert_close(found.double(), best, rtol=0.03, atol=0.03)


def test_batchnorm_s_statistics_follow_the_layer_before_them():
    torch.manual_seed(0)
    first, second = (nn.Conv2d(n, 32, 3, padding=1, bias=False) for n in (8, 32))
    model = nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.BatchNorm2d(32), nn.Flatten())
    x = inputs((64, 8, 6, 6), 1)
    for _ in range(60):
        model(x)
    model.eval()
    dense = [model[:n](x) for n in (2, 5)]
    with bench_of(model, [x, x[:8]], progress=False) as bench:  # the second batch judges
        bench.adopt(bench.best(0.15))
    for n, expected in zip((2, 5), dense, strict=True):
        found = model[:n](x)
        torch.testing.assert_close(found.mean((0, 2, 3)), expected.mean((0, 2, 3)), rtol=0, atol=0.02)
        torch.testing.assert_close(found.std((0, 2, 3)), expected.std((0, 2, 3)), rtol=0.05, atol=0)
    assert not model.training


def test_statistics_are_given_back_and_not_left_behind():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval()
    layer, new = compressed(model, "svd")
    before = model[1].running_var.clone()
    record = DenseRecord(model, [layer], Batches.draw([torch.randn(300, 16)], 1, None))
    with standing(model, {"0": layer}, {"0": new}):
        statistics = refit(model, {"0": new}, record)
    assert torch.equal(model[1].running_var, before)
    set_statistics(model, statistics)
    assert not torch.equal(model[1].running_var, before)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(self.inner(x))


def test_a_layer_that_runs_twice_keeps_its_factors():
    model = Twice()
    layer, new = compressed(model, "svd", "inner")
    factors = [p.clone() for p in new.parameters()]
    record = DenseRecord(model, [layer], Batches.draw([torch.randn(64, 16)], 1, None))
    with standing(model, {"inner": layer}, {"inner": new}):
        refit(model, {"inner": new}, record)
    assert all(torch.equal(a, b) for a, b in zip(factors, new.parameters(), strict=True))


def test_attention_s_projections_are_fitted():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    batches = [inputs((16, 10, 32), seed) for seed in range(4)]
    plain = copy.deepcopy(model)
    expected = model.eval()(batches[0]).detach()
    report = decompose(model, rank=0.5, data=batches, progress=False)
    decompose(plain, rank=0.5, progress=False)
    assert any("_proj" in row.name for row in report.factorized)
    assert (model(batches[0]) - expected).norm() < (plain.eval()(batches[0]) - expected).norm()


class Tied(nn.Module):
    """Words in, scores of words out, by one weight or by a weight that two linear layers share."""

    def __init__(self, n_words=200, width=24):
        super().__init__()
        self.words, self.middle = nn.Embedding(n_words, width), nn.Linear(width, width)
        self.head, self.other = nn.Linear(width, n_words, bias=False), nn.Linear(width, width)
        decay_(self.words, 0.9)
        self.head.weight, self.other.weight = self.words.weight, self.middle.weight

    def forward(self, x):
        return self.head(self.other(self.middle(self.words(x)).relu()))


def test_a_shared_weight_is_fitted_to_the_embedding_s_outputs_alone():
    torch.manual_seed(0)
    model = Tied()
    seen = (torch.rand(64, 32) ** 3 * 200).long()  # some words are frequent, as in texts
    layers = find_layers(model)
    record = DenseRecord(model, layers, Batches.draw([seen], 1, None))
    assert set(record.targets) == {"words"}
    (layer,) = [layer for layer in layers if layer.name == "words"]
    new = factorize(layer.module, layer.geometry, "svd", (8,))
    dense = model.words(seen)
    before, rows = (new(seen) - dense).square().mean(), new.factor_layers[0].weight.clone()
    with standing(model, {"words": layer}, {"words": new}):
        refit(model, {"words": new}, record)
        assert torch.equal(model.head.weight, new.weight)
    assert (new(seen) - dense).square().mean() < 0.97 * before
    assert torch.equal(new.factor_layers[0].weight, rows)


@pytest.mark.parametrize("shape", [(32, 6), (8, 6, 5), (8, 6, 5, 7)])
def test_statistics_are_those_of_all_samples_and_places(shape):
    x = 100 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mean, variance = _statistics(x.to(memory_format=torch.channels_last) if x.ndim == 4 else x)
    rows = x.double().movedim(1, -1).flatten(0, -2)
    assert torch.allclose(mean.double(), rows.mean(0), rtol=1e-6)
    assert torch.allclose(variance.double(), rows.var(0, unbiased=False), rtol=1e-4)
