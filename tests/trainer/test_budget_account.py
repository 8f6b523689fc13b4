"""What ``rank="auto"`` chooses for a budget the run accepts: both ask one account of a batch."""

from functools import partial
from itertools import product

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Trace
from ctdr_lightning.memory.account.batch import with_room
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.optimizer.candidate_account import candidate_account
from ctdr_lightning.trainer.training_step.retry.snapshot import Snapshot
from tests.in_turn import in_turn
from tests.parts import fit

OPTIMIZERS = {
    "adam, for each": partial(torch.optim.Adam, lr=1e-4, foreach=True),
    "adam, fused": partial(torch.optim.Adam, lr=1e-4, fused=True),
    "adam, one by one": partial(torch.optim.Adam, lr=1e-4, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
}
WAYS = {
    "as it is": ({}, {}),
    "in the backward": ({"optimizer_step": "in_backward"}, {}),
    "gradients kept": ({"keep_gradients": True}, {}),
    "no copies": ({"retry_on_oom": False}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
}
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)


class Net(LightningModule):
    """A perceptron whose weights, gradients and state are most of what a batch takes."""

    def __init__(self, optimizer):
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10))
        self.made = optimizer

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.made(self.parameters())


def data():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 256), torch.arange(16) % 10), batch_size=4)


def dense_bytes(optimizer, callback, trainer):
    """The peak of a batch of the dense net, as the run plans it."""
    made = CTDRCallback(rank=None, memory_budget="1GiB", verbose=False, **grouped(callback))
    torch.manual_seed(0)
    fit(Net(OPTIMIZERS[optimizer]), made, data=(data(), None), max_epochs=1, limit_val_batches=0, **trainer)
    return max(made.run.memory.session.plan.peak_bytes, made.run.memory.rest_peak_bytes)


def check(optimizer, way, shares):
    callback, trainer = WAYS[way]
    whole = dense_bytes(optimizer, callback, trainer)
    chosen = []
    for share in shares:
        budget = int(share * whole)
        made = CTDRCallback(
            rank="auto",
            memory_budget=budget,
            max_slowdown=100.0,
            verbose=False,
            **grouped({"over_budget": "raise", **callback}),
        )
        torch.manual_seed(0)
        try:
            fit(Net(OPTIMIZERS[optimizer]), made, data=(data(), None), max_epochs=1, limit_val_batches=0, **trainer)
        except InfeasibleBudgetError:
            assert made.fit is None, f"{share}: chosen for {made.fit.peak_bytes} bytes of {budget}, and refused"
            continue
        peak_bytes = max(made.run.memory.session.plan.peak_bytes, made.run.memory.rest_peak_bytes)
        assert peak_bytes <= budget
        chosen.append(made.fit)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "way"),
    [("adam, for each", "as it is"), ("sgd", "gradients kept"), ("adam, one by one", "accumulated")],
)
def test_what_is_chosen_is_accepted(optimizer, way):
    assert check(optimizer, way, (0.8,))


@pytest.mark.parametrize("n_tensors", [0, 4, 64])
def test_tensors_that_the_module_holds_are_copied_as_the_choice_counts(n_tensors):
    """Four are below a MiB, 64 are above."""
    module, batch, trainer = Net(torch.optim.Adam), next(iter(data())), Trainer(accelerator="cpu", logger=False)
    module.seen = [torch.zeros(2**14) for _ in range(n_tensors)]
    account = candidate_account(trainer, CallbackOptions(rank="auto"), None, batch, Trace((), (), (), 0), module)
    assert account.copied_bytes == with_room(Snapshot({"module": module, "batch": batch}, set()).copied_bytes)


def test_a_dense_net_is_chosen_where_it_fits():
    (found,) = check("adam, for each", "as it is", (1.05,))
    assert found.is_dense


# In the backward torch refuses a fused step, parameter by parameter.
PAIRS = [pair for pair in product(OPTIMIZERS, WAYS) if pair != ("adam, fused", "in the backward")]


@pytest.mark.parametrize("pair", in_turn(PAIRS, pytest.mark.slow, *[pytest.mark.exhaustive] * 4), ids=", ".join)
def test_what_is_chosen_is_accepted_at_every_budget(pair):
    assert check(*pair, SHARES)
