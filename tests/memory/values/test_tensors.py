import pytest
import torch

from ctdr_lightning.basics.torch_private import BelowAutograd, FakeTensor, FakeTensorMode
from ctdr_lightning.memory.values.tensors import alias_of, storage_of, tensors_in, version_of


def test_versions():
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) == before + 1
    with torch.inference_mode():
        assert version_of(torch.zeros(2)) == -1


@pytest.mark.parametrize("make", [lambda: torch.zeros(3), lambda: torch.nn.Parameter(torch.zeros(3))])
@pytest.mark.parametrize("below_autograd", [False, True])
def test_an_alias_shares_storage_and_version(make, below_autograd):
    x = make()
    guard = BelowAutograd() if below_autograd else torch.enable_grad()
    with guard:
        alias = alias_of(x)
    assert alias is not x
    assert alias.untyped_storage() is x.untyped_storage()
    assert not alias.requires_grad
    with torch.no_grad():
        x.add_(1)
    assert version_of(alias) == version_of(x)


def test_an_alias_of_a_fake_tensor():

    with FakeTensorMode():
        alias = alias_of(torch.zeros(3))
    assert isinstance(alias, FakeTensor)
    assert alias.shape == (3,)


def test_storages():
    x = torch.zeros(4)
    assert storage_of(x) is storage_of(x[1:])
    assert storage_of(torch.eye(3).to_sparse()) is None


def test_tensors_among_arguments():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in tensors_in((a, 1, [b, None], "x", (c,), {"d": a}))] == [1, 2, 3]
