"""Who asks for a saved tensor."""

import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ctdr_lightning.memory.values.readers import reader


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors  # noqa: B018  asking is what counts
        return g * 2


def heard(forward, backward=torch.Tensor.backward):
    """The names that the unpack hook hears, in order."""
    found = []

    def unpack(tensor):
        found.append(reader())
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = forward(torch.randn(4, 4, requires_grad=True))
    backward(loss)
    return found


@pytest.fixture(autouse=True)
def _as_the_packages_own(monkeypatch):
    """Frames of this file count as the package's, as those of the tape do."""
    monkeypatch.setitem(globals(), "__name__", "ctdr_lightning.tests")


def test_a_node_of_torchs_own_is_named():
    assert heard(lambda x: F.relu(x).exp().sum()) == ["ExpBackward0", "ReluBackward0"]
    assert "ReluBackward0" in heard(lambda x: F.relu(x).sum(), lambda loss: torch.autograd.backward([loss]))


def test_a_node_is_named_in_another_thread():
    def backward(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert heard(lambda x: F.relu(x).sum(), backward) == ["ReluBackward0"]


class Elsewhere:
    """Code of a user's: its frames are none of the package's."""

    code = compile(
        "def saved(node):\n    return node._saved_result\n"
        "def hook(node):\n    return lambda g: g * node._saved_result.detach().sign()\n"
        "def backward(ctx, g):\n    ctx.saved_tensors\n    return g * 2\n",
        "users.py",
        "exec",
    )

    def __init__(self):
        self.names = {"__name__": "users"}
        exec(self.code, self.names)


def test_a_hook_and_a_look_at_the_graph_are_nobody():
    user = Elsewhere().names

    def hooked(x):
        y = F.relu(x)
        y.register_hook(user["hook"](y.grad_fn))
        return y.sum()

    def looked_at(x):
        y = F.relu(x)
        user["saved"](y.grad_fn)
        return y.sum()

    assert heard(hooked) == ["", "ReluBackward0"]
    assert heard(looked_at) == ["", "ReluBackward0"]


def test_a_custom_function_is_nobody():
    user = Elsewhere().names
    function = type("Users", (Custom,), {"backward": staticmethod(user["backward"])})
    assert heard(lambda x: function.apply(x).sum()) == [""]
