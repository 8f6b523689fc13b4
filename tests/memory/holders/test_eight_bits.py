"""Optimizer state in 8 bits: what it takes, what it rounds, that runs resume; with the library, and with a stand-in."""

import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn, optim

from ctdr_lightning import CTDRCallback, Memory, Ranks
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.holders import HolderOptions, Holders, eight_bits
from ctdr_lightning.memory.holders.eight_bits import EightBits, eight_bit_bytes
from ctdr_lightning.memory.holders.optimizer_bytes import predict, predict_for, waiting
from ctdr_lightning.memory.holders.optimizer_state import StateAway
from ctdr_lightning.memory.values.live_bytes import PeakMeter, tell_trackers
from ctdr_lightning.trainer.training_step.optimizer.resident import state_bytes
from tests import parts
from tests.trainer.training_step.test_optimizer_states import Wide, data, fit


class StandIn(ModuleType):
    """The three functions of bitsandbytes that are used, with evenly spaced values."""

    def __init__(self):
        super().__init__("bitsandbytes")
        self.functional = self

    def create_dynamic_map(self, signed):
        return torch.linspace(-1.0 if signed else 0.0, 1.0, 256)

    def quantize_blockwise(self, tensor, code, blocksize):
        blocks = nn.functional.pad(tensor.float(), (0, -tensor.numel() % blocksize)).view(-1, blocksize)
        scales = blocks.abs().amax(1).clamp_min(1e-30)
        step = code[1] - code[0]
        codes = ((blocks / scales[:, None] - code[0]) / step).round().to(torch.uint8).flatten()[: tensor.numel()]
        return codes.clone(), SimpleNamespace(absmax=scales, code=code, blocksize=blocksize)

    def dequantize_blockwise(self, codes, state):
        scales = state.absmax.repeat_interleave(state.blocksize)[: codes.numel()]
        return state.code[codes.long()] * scales


def test_nothing_is_asked_of_the_device(monkeypatch):
    """A number that Python wants drains the queue of a GPU: two for each parameter and step."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", StandIn())
    for made_once in (eight_bits._library, eight_bits._values):
        made_once.cache_clear()
    for name in ("__bool__", "__int__", "__float__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a number was asked for"))
    holder, both = EightBits(), torch.linspace(-1, 1, 5120)
    signed, positive = (holder.put([t]).fetch()[0] for t in (both, both.abs()))
    monkeypatch.undo()
    assert (signed - both).abs().max() < 5e-3
    assert (positive - both.abs()).abs().max() < 2.5e-3  # of the finer set
    for made_once in (eight_bits._library, eight_bits._values):
        made_once.cache_clear()


class Tables(optim.SGD):
    """As bitsandbytes' optimizers do it: a table of the optimizer's own goes where the parameter is that it steps."""

    def __init__(self, params):
        super().__init__(params, 0.1, momentum=0.9)
        self.tables = {"signed": torch.linspace(-1, 1, 256)}

    def step(self, closure=None):
        self.tables["signed"] = self.tables["signed"].to(self.param_groups[0]["params"][0].device)
        return super().step(closure)


def test_a_prediction_leaves_the_optimizers_own_tables_where_they_are():
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = Tables([weight])
    assert predict([optimizer]).state == weight.nbytes
    assert optimizer.tables["signed"].device == weight.device
    weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize("to", ["disk", "8bit"])
def test_a_candidates_state_is_counted_where_it_will_wait(to, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", StandIn())
    weights = [nn.Parameter(torch.zeros(128, 128)) for _ in range(4)]
    holders = Holders(HolderOptions())
    holder = EightBits() if to == "8bit" else holders["disk"]
    waits = partial(waiting, in_8_bits=to == "8bit", device_bytes=holder.device_bytes)
    optimizer, usual = torch.optim.Adam(weights), torch.optim.Adam(weights)
    away = StateAway(optimizer, holder)
    assert predict_for(usual, [w.to("meta") for w in weights], waits=waits) == predict([optimizer])
    away.release()
    holders.close()
    assert predict_for(usual, weights) == predict([optimizer]), "neither is changed"


def test_state_that_cannot_wait_is_counted_where_it_is():
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(8, 8))])
    usual = predict([optimizer])
    with waiting(optimizer, in_8_bits=False, device_bytes=2**20):
        assert predict([optimizer]) == usual


LIBRARIES = ["stand-in", *(["bitsandbytes"] if find_spec("bitsandbytes") else [])]


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "bitsandbytes", StandIn())
    for made_once in (eight_bits._library, eight_bits._values):
        made_once.cache_clear()
    yield request.param
    for made_once in (eight_bits._library, eight_bits._values):
        made_once.cache_clear()


def stepped(make, away):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 50))
    optimizer, x = make(net.parameters()), torch.randn(64, 300)
    holder = StateAway(optimizer, EightBits()) if away else None
    for _ in range(10):
        optimizer.zero_grad()
        (net(x) - x[:, :50]).square().mean().backward()
        optimizer.step()
    return net, optimizer, holder


@pytest.mark.parametrize("make", [lambda p: optim.Adam(p, 1e-3), lambda p: optim.SGD(p, 0.1, momentum=0.9)])
def test_weights_are_near_those_of_a_plain_run_and_the_state_takes_a_quarter(library, make):
    plain, usual, _ = stepped(make, away=False)
    found, _, away = stepped(make, away=True)
    holder = away._holder
    large = [t for s in usual.state.values() for t in s.values() if t.nbytes >= 4096]
    assert holder.held_bytes == sum(map(eight_bit_bytes, large)) < 0.27 * sum(t.nbytes for t in large)
    assert away.waiting_bytes(large) == holder.held_bytes
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 50))
    for a, b, c in zip(plain.parameters(), found.parameters(), start.parameters(), strict=True):
        if library == "bitsandbytes":  # evenly spaced values round Adam's small second moments to nothing
            assert (a - b).norm() < 0.15 * (a - c).norm()
        assert torch.isfinite(b).all()
    away.release()
    assert holder.held_bytes == 0


def test_what_is_small_or_no_float_stays_as_it_is(library):
    tensors = [torch.randn(1000), torch.arange(5000), torch.randn(10_000), torch.rand(10_000, dtype=torch.bfloat16)]
    found = EightBits().put(tensors).fetch()
    assert torch.equal(found[0], tensors[0])
    assert torch.equal(found[1], tensors[1])
    for a, b in zip(found[2:], tensors[2:], strict=True):
        assert a.dtype == b.dtype
        assert not torch.equal(a, b)
        assert (a - b).abs().max() <= 0.04 * b.abs().max()


@pytest.mark.slow
def test_a_resumed_run_is_near_the_undisturbed_one(library, tmp_path):
    """A block whose largest element is negative is rounded once more when a checkpoint is read."""

    def run(folder, **options):
        callback = CTDRCallback(rank=None, verbose=False, memory=Memory(retry_on_oom=False, optimizer_state="8bit"))
        return fit(callback, tmp_path / folder, **options)[0]

    whole = run("whole")
    run("half", max_epochs=1)
    resumed = Wide()
    torch.manual_seed(2)
    callback = CTDRCallback(rank=None, verbose=False, memory=Memory(retry_on_oom=False, optimizer_state="8bit"))
    parts.quiet_trainer(callback, max_epochs=2).fit(resumed, data(), ckpt_path=tmp_path / "half" / "last.ckpt")
    start = Wide()
    for a, b, c in zip(whole.parameters(), resumed.parameters(), start.parameters(), strict=True):
        assert (a - b).norm() < 0.1 * (a - c).norm()


def test_what_a_step_takes_is_predicted(library):
    module = Wide()
    optimizer = module.configure_optimizers()
    dense = predict([optimizer])
    away = StateAway(optimizer, EightBits())
    told = predict([optimizer])
    assert told.state < 0.26 * dense.state
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert state_bytes([optimizer]) == told.state
    if library == "bitsandbytes":
        with PeakMeter() as meter:
            tell_trackers(away.tensors)
            optimizer.step()
        assert 0.5 * told.temporary <= meter.live.peak - away._holder.held_bytes <= told.temporary


@pytest.mark.slow
def test_a_net_trains_under_a_budget_that_its_state_would_break(library, tmp_path):
    budget = "72MiB"  # 24 MiB of weights, of gradients, and twice that of state
    callback = CTDRCallback(
        rank=None,
        verbose=False,
        memory=Memory(retry_on_oom=False, optimizer_state="8bit"),
        memory_budget=budget,
        ranks=Ranks(data=None),
    )
    fit(callback, tmp_path)
    assert callback.run.memory.rest_peak_bytes <= 72 * 2**20


def test_without_the_library_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    eight_bits._library.cache_clear()
    with pytest.raises(ConfigError, match="needs bitsandbytes") as caught:
        fit(CTDRCallback(rank=None, verbose=False, memory=Memory(optimizer_state="8bit")), tmp_path)
    assert "pip install bitsandbytes" in caught.value.hint
