"""Fingerprints: the same for the same contents in whatever memory, another one for any other contents."""

import pytest
import torch
from torch import nn

from ctdr_lightning.memory.values import fingerprint
from ctdr_lightning.memory.values.fingerprint import COLUMNS, differing, has_contents, of_signs, of_storage, of_tensor

SIZES = [1, 7, 8, 9, 4095, 16 * 1024 - 1, 16 * 1024, 8 * COLUMNS, 8 * COLUMNS * 3 + 5, 2**20]


def on_gpu(tensor):
    """The number that the kernels of a GPU would make."""
    return int(fingerprint._on_gpu(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, tensor.nbytes))


@pytest.mark.parametrize("number", [of_tensor, on_gpu])
@pytest.mark.parametrize("n_bytes", SIZES)
def test_one_bit_anywhere_changes_it(n_bytes, number):
    contents = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    before = number(contents)
    assert number(contents.clone()) == before
    for place in {0, n_bytes // 3, n_bytes // 2, n_bytes - 1}:
        contents[place] ^= 1
        assert number(contents) != before
        contents[place] ^= 1
    assert number(contents) == before


@pytest.mark.parametrize("number", [of_tensor, on_gpu])
@pytest.mark.parametrize("shape", [(3, 40), (64, 3, 32, 32), (8, 12, 64, 64)])
def test_samples_channels_and_neighbours_exchanged_change_it(shape, number):
    contents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = number(contents)
    for dim in range(len(shape)):
        assert number(contents.flip(dim).contiguous()) != before
        assert number(contents.roll(1, dim).contiguous()) != before
    index = torch.arange(contents.numel()).roll(1)
    assert number(contents.flatten()[index]) != before


def test_contents_count_and_not_the_memory_that_they_lie_in():
    x = torch.randn(6, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    padded = torch.full((8, 5, 8, 8), 3.0)
    padded[1:7] = x
    odd = torch.zeros(x.numel() + 1)
    odd[1:] = x.flatten()
    for same in (x.clone(), padded[1:7], odd[1:].view(x.shape)):
        assert of_tensor(same) == of_tensor(x)
        assert on_gpu(same) == on_gpu(x)
    last = x.to(memory_format=torch.channels_last)
    assert of_tensor(last) == of_tensor(last.clone())
    for gaps in (x[:, ::2], x.transpose(1, 3)[:, 1:], x[0, 0, 0, 0], x[:1].expand(4, 5, 8, 8), x[:0]):
        again = (
            gaps.clone(memory_format=torch.preserve_format).as_strided(gaps.shape, gaps.stride())
            if 0 in gaps.stride()
            else gaps
        )
        assert of_tensor(gaps) == of_tensor(again)
    assert of_tensor(x[:, ::2]) != of_tensor(x[:, 1::2])


def test_what_lies_in_the_gaps_does_not_count():
    x = torch.randn(6, 8)
    before = of_tensor(x[:, ::2])
    x[:, 1] = 7.0
    assert of_tensor(x[:, ::2]) == before
    x[:, 2] = 7.0
    assert of_tensor(x[:, ::2]) != before


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_has_one(dtype):
    x = torch.zeros(2000, dtype=dtype)
    before = of_tensor(x), of_storage(x.untyped_storage())
    x[1234] = 1
    assert before[0] != of_tensor(x)
    assert before[1] != of_storage(x.untyped_storage())


def test_nan_and_minus_zero_are_contents_like_any_other():
    assert of_tensor(torch.tensor([float("nan")])) == of_tensor(torch.tensor([float("nan")]))
    assert of_tensor(torch.tensor([0.0])) != of_tensor(torch.tensor([-0.0]))


def test_signs_alone():
    x = torch.randn(3, 70000, generator=torch.Generator().manual_seed(0)).relu()
    before = of_signs(x)
    assert of_signs((x > 0).float()) == before
    assert of_signs(x * 3) == before
    x[2, 69999] = 1.0 - x[2, 69999].sign()
    assert of_signs(x) != before


def test_no_memory_of_torchs_is_taken_on_a_processor():
    from ctdr_lightning.basics.host_memory import allocations_of

    dense, last = torch.randn(4, 8, 64, 64), torch.randn(4, 8, 64, 64).to(memory_format=torch.channels_last)
    assert allocations_of(lambda: (of_tensor(dense), of_tensor(last), of_storage(dense.untyped_storage()))) == []


def test_tensors_without_contents_have_none():
    for other in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), type("Own", (torch.Tensor,), {})()):
        assert not has_contents(other)
        assert of_tensor(other) is None
    assert has_contents(nn.Parameter(torch.ones(3)))


def test_numbers_on_a_device_are_compared_with_one_synchronisation(monkeypatch):
    asked = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or original(self))
    pairs = [(torch.tensor(k), torch.tensor(k + (k in (3, 5)))) for k in range(8)]
    assert differing([(1, 1), (1, 2), *pairs]) == [1, 5, 7]
    assert len(asked) == 1
