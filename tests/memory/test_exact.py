"""Whatever a plan drops, a step leaves the same loss, gradients, buffers and RNG state behind, to the bit."""

import pytest

from tests.in_turn import in_turn
from tests.memory.harness import Bench, check
from tests.memory.zoo import ZOO, build

QUICK = (
    "resnet18", "squeezenet1_0", "shufflenet_v2_x0_5", "lraspp_mobilenet_v3_large", "vision_transformer", "gpt2",
    "bert", "t5", "llama", "mixtral", "vit", "lstm",
)  # fmt: skip
LONG = {"shufflenet_v2_x0_5", "lraspp_mobilenet_v3_large"}  # ten seconds each


def test_the_zoo_is_as_large_as_promised():
    assert len(ZOO) >= 40


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in QUICK])
def test_a_dozen_nets(name):
    check(Bench(*build(name)), seeds=2)


# Among the slow tests test_tape_away has every second network, with all actions, and this file has the others.
REST = [net for net in in_turn(ZOO, pytest.mark.exhaustive, pytest.mark.slow) if net.values[0] not in QUICK]


@pytest.mark.parametrize("name", REST)
def test_every_other_net(name):
    check(Bench(*build(name)), seeds=2)
