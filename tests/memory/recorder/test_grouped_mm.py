"""Mixtures of experts on fake tensors: grouped products in single precision, as the real kernels make them."""

import pytest
import torch
import transformers

from ctdr_lightning.memory import record, record_fake
from ctdr_lightning.memory.recorder.grouped_mm import grouped_mm
from ctdr_lightning.memory.simulator.simulator import Simulator

DTYPES = [torch.float32, torch.bfloat16]
OFFSETS = torch.tensor([0, 8, 16], dtype=torch.int32)


def inputs(kind, columns, dtype):
    """Matrices whose rows, or columns, begin at multiples of 16 bytes, as the kernels want them."""
    one, other = {
        "rows": ((16, 8), (3, columns, 8)),
        "inner": ((columns, 16), (24, 16)),
        "columns": ((3, 16, 8), (16, 8)),
        "stacks": ((3, 5, 8), (3, columns, 8)),
    }[kind]
    return torch.randn(one).to(dtype), torch.randn(other).to(dtype).mT, None if kind == "stacks" else OFFSETS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rows", "inner", "columns", "stacks"])
@pytest.mark.parametrize("columns", [8, 10, 20])
def test_the_result_looks_as_the_real_one(kind, columns, dtype):
    a, b, offs = inputs(kind, columns, dtype)
    real = torch._grouped_mm(a, b, offs=offs)
    for found in (grouped_mm((a, b), {"offs": offs}), grouped_mm((a, b, offs), {})):
        assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


def mixture():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), torch.randint(200, (4, 32))


def step(net, ids):
    return net(input_ids=ids, labels=ids).loss


def test_a_mixture_of_experts_is_recorded_without_its_memory():
    net, ids = mixture()
    fake, real = record_fake(net, ids, step), record(lambda: step(net, ids))
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert any("_grouped_mm" in op.name for op in fake.ops)
    assert Simulator(fake).peak_bytes == pytest.approx(Simulator(real).peak_bytes, rel=1e-4)


@pytest.mark.parametrize("gpu", ["t4", "a100"])
def test_a_mixture_of_experts_is_recorded_for_a_card_by_its_compute_capability(gpu):
    names = {op.name for op in record_fake(*mixture(), step, device=gpu).ops}
    assert any("_grouped_mm" in name for name in names) is (gpu == "a100")
