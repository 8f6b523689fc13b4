import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.decomposition.choose.uncovered import staying_weights


class Mixture(nn.Module):
    """Four experts held as one bare parameter, as fused mixtures hold them, beside ordinary layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.ones(1, 2))

    def forward(self, words):
        x = self.embed(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x @ self.experts.mean(0)))


def test_a_weight_without_a_kind_is_named_with_its_size_and_its_share():
    model = Mixture()
    whole = sum(p.numel() for p in model.parameters())
    report = decompose(model, rank=0.25)
    assert [(w.name, w.shape) for w in report.uncovered] == [("experts", (4, 16, 16))]
    line = next(line for line in str(report).splitlines() if line.startswith("experts"))
    assert "4 x 16 x 16" in line
    assert f"{1024 / whole:.1%} of the model" in line
    assert [w.name for w in staying_weights(model, {row.name: "" for row in report})] == ["experts", "scale"]


def test_where_layers_hold_everything_nothing_is_named():
    report = decompose(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 8)), rank=0.5)
    assert report.uncovered == ()


class Tied(nn.Module):
    """Two layers with one weight, which a third place holds as well; one more layer, and a depthwise one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.second.weight = self.copy = self.first.weight
        self.depthwise = nn.Conv2d(64, 64, 3, groups=64)


@pytest.mark.parametrize("allocate", ["parameters", None])
def test_where_the_model_misses_the_share_every_large_weight_that_stays_is_named_once_with_its_size(allocate):
    report = decompose(Tied(), rank=0.25, allocate=allocate)
    head, *lines = report.notes()
    assert head.startswith("rank=0.25 was requested, but 66.0% of the model remain")
    assert len(lines) == 2
    assert "64 x 64, 45.4% of the model" in lines[0]
    assert "tied" in lines[0]
    assert lines[1].startswith("depthwise.weight (64 x 1 x 3 x 3, 6.4% of the model) stays: depthwise")
    assert str(report).count("stays:") == 2


def test_a_layer_that_was_not_selected_is_named_and_many_small_weights_are_summed():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), *(nn.Linear(8, 8) for _ in range(20)))
    lines = decompose(model, rank=0.25, select="0").notes()
    assert lines[1] == "1.weight (64 x 64, 42.0% of the model) stays: not selected"
    assert lines[2] == "smaller ones (13.1% of the model together) stay"


def test_nothing_is_blamed_where_the_share_is_kept_or_none_of_the_parameters_was_asked_for():
    assert decompose(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), rank=0.25).notes() == []
    for options in ({"rank": 8}, {"rank": {"third": 0.25}}, {"rank": "error=0.5"}):
        assert decompose(Tied(), **options).notes() == []


def test_a_second_call_blames_nothing():
    model = Tied()
    decompose(model, rank=0.25)
    assert decompose(model, rank=0.25).notes() == []


class Recurrent(nn.Module):
    """No layer kind covers an LSTM; the classifier behind it holds 0.6 % of the parameters."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(28, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def test_a_share_of_next_to_nothing_cuts_nothing():
    """A quarter of the classifier was a rank of 2, for ten classes."""
    report = decompose(Recurrent(), rank=0.25)
    assert not report.factorized
    assert "all that can be cut is 0.6% of the model's parameters (select= insists)" in report.layers[0].reason


@pytest.mark.parametrize("options", [{"rank": 0.25, "select": "head"}, {"rank": 4}, {"rank": {"head": 0.25}}], ids=str)
def test_what_is_asked_for_by_name_or_rank_is_cut(options):
    assert [row.name for row in decompose(Recurrent(), **options).factorized] == ["head"]
