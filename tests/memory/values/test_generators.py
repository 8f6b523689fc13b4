"""Random calls that a plan runs again: the same numbers, and a generator that goes on as in the plain step."""

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import KEEP, RECOMPUTE, plan, record, record_fake
from ctdr_lightning.memory.values.generators import Draw, generator_of
from ctdr_lightning.memory.values.op_traits import pin_reason_of_call, pin_reason_of_replay
from tests.memory.programs import X, exact

aten = torch.ops.aten
DRAWING = {
    "dropout": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "normal noise": lambda h: h + 0.1 * torch.randn_like(h),
    "uniform noise": lambda h: h * torch.rand_like(h),
}


class Noisy(nn.Module):
    """Layers, each with a random call after it."""

    def __init__(self, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.draw = draw

    def forward(self, x):
        """Shape in ``(N, 16)``."""
        for layer in self.layers:
            x = self.draw(layer(x).tanh())
        return x


@pytest.mark.parametrize("draw", DRAWING.values(), ids=DRAWING)
def test_steps_under_plans_draw_the_same_numbers(draw):
    exact(Noisy(draw), lambda net: net(X).square().sum())


def test_a_plan_drops_dropout_and_its_masks():
    net, x = Noisy(DRAWING["dropout"]), torch.randn(512, 16)
    trace = record(lambda: net(x).square().sum(), standing=net.parameters())
    drops = [op for op in trace.ops if op.name == "aten.native_dropout.default"]
    made = plan(trace, policy="sqrt")
    assert {trace.values[v].pin for op in drops for v in op.outputs} == {""}
    assert any(made.actions.get(v, KEEP) is RECOMPUTE for op in drops for v in op.outputs)
    assert made.peak_bytes < plan(trace, policy="keep").peak_bytes


def test_a_replay_in_the_backward_leaves_its_random_calls_their_numbers():
    class Late(torch.autograd.Function):
        """Its backward draws."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.rand_like(grad)

    exact(Noisy(DRAWING["dropout"]), lambda net: Late.apply(net(Late.apply(net(X)))).square().sum())


def test_the_generator_goes_on_from_where_it_is():
    torch.manual_seed(3)
    draw = Draw(X.device)
    first, second = torch.rand(4), torch.rand(4)
    torch.manual_seed(3)
    torch.rand(4)
    for _ in range(2):
        assert torch.equal(draw.again(torch.rand, [4], {}), first)
    assert torch.equal(torch.rand(4), second)


def test_the_generator_gets_its_state_back_from_a_failed_call():
    draw = Draw(X.device)
    state = generator_of(X.device).get_state()

    def fails():
        torch.rand(4)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        draw.again(fails, [], {})
    assert torch.equal(generator_of(X.device).get_state(), state)


@pytest.mark.parametrize(
    ("func", "args", "reason"),
    [
        (aten.native_dropout.default, (X, 0.5, True), ""),
        (aten.native_dropout.default, (X.to("meta"), 0.5, True), "random"),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.1), ""),
        (aten.bernoulli.default, (X,), "random"),
        (aten._cudnn_rnn.default, (X,), "random"),
        (aten.normal_.default, (X,), "random"),
    ],
)
def test_calls_that_may_be_replayed(func, args, reason):
    assert pin_reason_of_replay(func, args, {}) == reason
    assert pin_reason_of_call(func, args, {}) == "random"


def test_a_gpus_attention_with_dropout_is_replayed():
    net = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    trace = record_fake(net, torch.empty(8, 16, 64), lambda net, x: net(x).sum(), device="a100", precision="bf16-mixed")
    names = {op.name for op in trace.ops if not op.backward}
    assert {"aten._scaled_dot_product_flash_attention.default", "aten.native_dropout.default"} <= names
    assert "random" not in {value.pin for value in trace.values}
