import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.decomposition.choose.uncovered import uncovered_weights


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
    assert [w.name for w in uncovered_weights(model)] == ["experts"]


def test_where_layers_hold_everything_nothing_is_named():
    report = decompose(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 8)), rank=0.5)
    assert report.uncovered == ()
