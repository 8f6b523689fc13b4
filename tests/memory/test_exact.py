"""Whatever a plan drops, a step leaves the same loss, gradients, buffers and RNG state behind, to the bit."""

import pytest

from tests.memory.harness import Bench, check
from tests.memory.zoo import ZOO, build

QUICK = (
    "resnet18", "squeezenet1_0", "shufflenet_v2_x0_5", "lraspp_mobilenet_v3_large", "vision_transformer", "gpt2",
    "bert", "t5", "llama", "mixtral", "vit", "lstm",
)  # fmt: skip


def test_the_zoo_is_as_large_as_promised():
    assert len(ZOO) >= 40


@pytest.mark.parametrize("name", QUICK)
def test_a_dozen_nets(name):
    check(Bench(*build(name)), seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_net(name):
    check(Bench(*build(name)), seeds=2)
