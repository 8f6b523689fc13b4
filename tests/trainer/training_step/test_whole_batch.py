"""The budget holds over the whole batch: forward, backward, clipping, and the optimizer's step."""

import gc
import re
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB, parse_bytes
from ctdr_lightning.memory.holders.optimizer_bytes import leaner, predict
from ctdr_lightning.memory.holders.optimizer_state_tensors import state_tensors
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_recipes.measure import MemoryProfile, storage_bytes, training_tensors
from tests import parts

WIDTH = 512


class Wide(LightningModule):
    """Four linear layers whose weights outweigh their activations: 4 MiB of weights."""

    def __init__(self, make):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
        self.net, self.make = nn.Sequential(*layers), make

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters())


class TruePeak(Callback):
    """The allocator's own account of the fourth batch, after the recording, which profiles by itself."""

    def __init__(self):
        self.use = None

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 2:
            self.profile = MemoryProfile()
            self.profile.start()
        if index == 3:
            self.profile.mark()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 3:
            remaining = [*training_tensors(module, trainer.optimizers[0]), batch[0]]
            self.use = self.profile.stop(remaining)


OPTIMIZERS = {
    "for-each Adam": partial(optim.Adam, foreach=True),
    "Adam": partial(optim.Adam, foreach=False),
    "fused Adam": partial(optim.Adam, fused=True),
    "AdamW with AMSGrad": partial(optim.AdamW, amsgrad=True, foreach=True),
    "SGD with momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "RMSprop": optim.RMSprop,
    "for-each Adadelta": partial(optim.Adadelta, foreach=True),
    "Rprop": optim.Rprop,
}


def fit(make, budget, **options):
    torch.manual_seed(0)
    callback, peak = CTDRCallback(rank=None, memory_budget=budget, verbose=False), TruePeak()
    data = DataLoader(TensorDataset(torch.randn(6 * 32, WIDTH)), 32), None
    trainer = parts.fit(Wide(make), callback, peak, data=data, max_epochs=1, **options)
    logged = trainer.callback_metrics
    return peak.use.peak_bytes, {
        name: logged[f"ctdr/{name}_gib"].item() * 2**30 for name in ("peak_memory", "predicted_peak")
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_budget_that_the_error_asks_for_holds_over_the_whole_batch(name):
    with pytest.raises(InfeasibleBudgetError) as refused:
        fit(OPTIMIZERS[name], "4MiB", gradient_clip_val=1.0)
    found = re.search(r"aise memory_budget to ([\d.]+ \w+)", refused.value.hint)
    assert found, refused.value.hint
    budget = found[1]
    true, logged = fit(OPTIMIZERS[name], budget, gradient_clip_val=1.0)
    assert true <= parse_bytes(budget)
    assert logged["peak_memory"] == pytest.approx(true, rel=0.01)
    assert logged["predicted_peak"] == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_s_bytes_are_told_before_it_steps(name):
    weights = [nn.Parameter(torch.randn(size, 100)) for size in (300, 500, 200)]
    optimizer = OPTIMIZERS[name](weights)
    told = predict([optimizer])
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    profile = MemoryProfile()
    profile.start()
    optimizer.step()
    gc.collect()  # for-each steps leave cycles behind that hold their temporaries
    profile.mark()
    optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    standing = [*weights, *(w.grad for w in weights), *state]
    gc.collect()
    use = profile.stop(standing)
    assert storage_bytes(state) == told.state
    assert use.peak_bytes - storage_bytes(standing) == pytest.approx(told.temporary, abs=1000)


class Asking(optim.SGD):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize(("max_iter", "history"), [(4, 6), (2, 3), (8, 20)])
def test_the_bytes_of_lbfgs_are_told_before_it_steps(line_search, max_iter, history):
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(16, 64)
    optimizer = optim.LBFGS(
        net.parameters(), 0.1, max_iter=max_iter, history_size=history, line_search_fn=line_search, tolerance_change=0.0
    )
    told, n_steps = predict([optimizer], 6), 6
    beside, rest = [], []
    net(x).sum().backward()
    for _ in range(n_steps):
        with PeakMeter() as meter:
            meter.live.track([*state_tensors([optimizer]), *(p.grad for p in net.parameters())])

            def closure():
                gradients = storage_bytes([p.grad for p in net.parameters()])
                rest.append(meter.live.peak - gradients)
                beside.append(meter.live.now - gradients)
                optimizer.zero_grad()
                loss = net(x).square().mean() + net(x).sin().mean()
                loss.backward()
                meter.live.peak = meter.live.now
                return loss

            optimizer.step(closure)
    weights = storage_bytes(net.parameters())
    assert storage_bytes(state_tensors([optimizer])) <= told.state
    assert told.state + told.standing - 5 * weights <= max(beside) <= told.state + told.standing
    assert max(rest) <= told.state + told.temporary


def test_an_optimizer_that_cannot_be_asked_is_measured():
    weight = nn.Parameter(torch.randn(10, 10))
    assert predict([Asking([weight])]) is None
    assert predict([]).total == 0
    true, logged = fit(partial(optim.Adafactor, lr=0.01), "40MiB")
    assert logged["peak_memory"] == pytest.approx(true, rel=0.05)
    assert logged["predicted_peak"] == pytest.approx(true, rel=0.05)


def test_the_error_names_the_setting_that_fits():
    """The case that showed the fault: the plan of the step fits, the optimizer's step does not."""
    with pytest.raises(InfeasibleBudgetError, match=r"optimizer's step does not fit the budget of 17.0 MiB") as caught:
        fit(OPTIMIZERS["for-each Adam"], "17MiB")
    assert "Use Adam(..., fused=True), with which it takes 16." in caught.value.hint
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(OPTIMIZERS["for-each Adam"], "19.5MiB")
    assert "Use Adam(..., foreach=False), with which it takes 19." in caught.value.hint
    assert caught.value.least_peak_bytes == pytest.approx(20 * MIB, rel=0.02)
    assert not list(leaner([optim.SGD([nn.Parameter(torch.zeros(3))], 0.1, foreach=True)])), "plain SGD takes nothing"
