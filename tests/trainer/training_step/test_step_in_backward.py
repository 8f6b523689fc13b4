"""The optimizer's step inside the backward: the plain run's weights to the bit, and gradients that do not pile up."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.trainer.groups import grouped
from tests import forks, parts
from tests.trainer.training_step.test_whole_batch import TruePeak

WIDTH, DEPTH = 256, 12  # a layer of 256 KiB


class Wide(LightningModule):
    """Weights outweigh activations; BatchNorm and dropout besides, in two groups of parameters, with a schedule."""

    def __init__(self, make=optim.Adam):
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.net, self.make = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)), make

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        half = DEPTH
        groups = [
            {"params": list(self.net[:half].parameters()), "lr": 0.01},
            {"params": list(self.net[half:].parameters()), "weight_decay": 0.1},
        ]
        optimizer = self.make(groups, lr=0.003)
        return [optimizer], [{"scheduler": optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def data():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=4), None


def inside(**options):
    return CTDRCallback(**grouped({"rank": None, "verbose": False, "optimizer_step": "in_backward", **options}))


def fit(module, *callbacks, **options):
    torch.manual_seed(2)
    trainer = parts.fit(module, *callbacks, data=data(), **options)
    return module, trainer


OPTIMIZERS = {
    "SGD with momentum": partial(optim.SGD, momentum=0.9, nesterov=True),
    "Adam": optim.Adam,
    "for-each Adam": partial(optim.Adam, foreach=True),
    "AdamW with AMSGrad": partial(optim.AdamW, amsgrad=True),
    "fused AdamW": partial(optim.AdamW, fused=True),
    "RMSprop": optim.RMSprop,
}


def n_gradients(module):
    """Outside of the callback: one that reads gradients keeps the optimizer's step out of the backward."""
    return sum(p.grad is not None for p in module.parameters())


class GradientsLeft(Callback):
    """What gradients stand behind each batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, *_):
        self.found.append(n_gradients(module))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_weights_and_state_are_those_of_the_plain_step_to_the_bit(name, budget):
    plain, usual = fit(Wide(OPTIMIZERS[name]))
    left = GradientsLeft()
    found, trainer = fit(Wide(OPTIMIZERS[name]), inside(memory_budget=budget), left)
    assert parts.same(plain.state_dict(), found.state_dict())
    assert parts.same(usual.optimizers[0].state_dict(), trainer.optimizers[0].state_dict())
    assert left.found == [0] * 12
    found.training_step(next(iter(data()[0])), 0).backward()
    assert all(p.grad is not None for p in found.parameters()), "its hooks are gone"
    assert usual.global_step == trainer.global_step == 12


@pytest.mark.slow
def test_under_a_plan_that_recomputes_they_are_the_same_to_the_bit():
    data = DataLoader(TensorDataset(torch.randn(2400, WIDTH)), 400), None
    plain, found = Wide(), Wide()
    for module, callbacks in ((plain, ()), (found, (inside(memory_budget="16MiB"),))):
        torch.manual_seed(2)
        parts.fit(module, *callbacks, data=data)
    assert parts.same(plain.state_dict(), found.state_dict())
    assert callbacks[0].run.memory.last_plan.recompute_seconds > 0


def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    whole, _ = fit(Wide(), inside())
    saves = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    fit(Wide(), inside(), saves, max_epochs=1, enable_checkpointing=True)
    resumed, _ = fit(Wide(), inside(), ckpt_path=tmp_path / "last.ckpt")
    assert parts.same(whole.state_dict(), resumed.state_dict())
    plain, _ = fit(Wide(), inside(optimizer_step=None), ckpt_path=tmp_path / "last.ckpt")
    assert parts.same(whole.state_dict(), plain.state_dict())


def peaks(**options):
    peak = TruePeak()
    _, trainer = fit(Wide(), CTDRCallback(rank=None, verbose=False, memory_budget="64MiB", **grouped(options)), peak)
    return peak.use.peak_bytes, trainer.callback_metrics["ctdr/predicted_peak_gib"].item() * 2**30


@pytest.mark.slow
def test_the_peak_is_predicted_and_lacks_the_gradients():
    (plain, _), (true, predicted) = peaks(), peaks(optimizer_step="in_backward")
    weights = 4 * DEPTH * WIDTH * WIDTH
    assert plain - true > 0.8 * weights
    assert true <= predicted <= 1.02 * true


def test_a_net_trains_under_a_budget_that_its_gradients_would_break():
    plain, _ = fit(Wide())
    found, _ = fit(Wide(), inside(memory_budget="12MiB"))
    assert 4 * sum(4 * p.numel() for p in found.parameters()) > 12 * MIB
    assert parts.same(plain.state_dict(), found.state_dict())


class Manual(Wide):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Two(Wide):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [optim.SGD(self.net[0].parameters(), 0.1), optim.SGD(self.net[2].parameters(), 0.1)]


class Clips(Wide):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class Norms(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        pass


class Reads(Wide):
    def training_step(self, batch, index):
        self.log("norm", 0.0 if self.net[0].weight.grad is None else self.net[0].weight.grad.norm())
        return super().training_step(batch, index)


class ReadsLate(Callback):
    """Between a batch and the next, when the plain step's gradients are there still."""

    def on_train_batch_end(self, trainer, module, *_):
        self.norm = next(module.parameters()).grad.norm()


class Own(optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "callbacks", "options", "words"),
    [
        (Wide, [], {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 needs all gradients"),
        (Wide, [], {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 adds gradients up"),
        (Wide, [GradientAccumulationScheduler({1: 2})], {}, "GradientAccumulationScheduler adds"),
        (Manual, [], {}, "manual optimization"),
        (Two, [], {}, "manual optimization"),
        (partial(Wide, lambda groups, lr: optim.LBFGS(groups[0]["params"])), [], {}, "LBFGS is not known to update"),
        (partial(Wide, Own), [], {}, "Own is not known to update"),
        (Clips, [], {}, "Clips.configure_gradient_clipping comes between"),
        (Wide, [Norms()], {}, "Norms.on_before_optimizer_step comes between"),
        (Reads, [], {}, "Reads.training_step reads gradients"),
        (Wide, [ReadsLate()], {}, "ReadsLate.on_train_batch_end reads gradients"),
    ],
)
def test_what_forbids_it_is_said(make, callbacks, options, words):
    refused(make, callbacks, options, words)


def refused(make, callbacks, options, words):
    with pytest.raises(ConfigError, match=words):
        fit(make(), inside(), *callbacks, **options)


def test_exchanged_gradients_forbid_it():
    # a group of processes that this one made would be found by the processes that later tests fork
    words = "under DDPStrategy gradients are exchanged"
    assert forks.run(refused, Wide, [], {"strategy": "ddp"}, words) == [0]


def test_loss_scaling_and_several_optimizers_forbid_it():
    module = Wide()
    trainer = parts.quiet_trainer(inside())
    trainer.strategy.connect(module)
    trainer.strategy.precision_plugin.scaler = object()
    callback = trainer.callbacks[0]
    with pytest.raises(ConfigError, match="scales the loss"):
        callback.run.in_backward.attach(trainer, module, keeps_gradients=False)
    trainer.strategy.precision_plugin.scaler = None
    trainer.strategy.optimizers = [optim.SGD(module.parameters(), 0.1)] * 2
    with pytest.raises(ConfigError, match="has 2 optimizers"):
        callback.run.in_backward.attach(trainer, module, keeps_gradients=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_step": "early"}, "optimizer_step='early' is not known"),
        ({"optimizer_step": "in_backward", "optimizer_state": "disk"}, "Leave one of the two out"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        CTDRCallback(rank=None, **grouped(options))


def test_kept_gradients_forbid_it():
    with pytest.raises(ConfigError, match="keep_gradients=True asks"):
        fit(Wide(), inside(keep_gradients=True))


class Twice(Wide):
    """One weight in two segments that reentrant checkpoints run backward separately."""

    def training_step(self, batch, index):
        x = batch[0].requires_grad_()
        for _ in range(2):
            x = checkpoint(self.net[0], x, use_reentrant=True)
        return x.square().mean()


def test_a_gradient_in_two_parts_is_noticed():
    with pytest.raises(ConfigError, match="got its gradient in two parts"):
        fit(Twice(), inside())


class RunsOut(Wide):
    """Memory seems to run out in the middle of a backward, or in a forward, of the fourth step."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        RunsOut.runs = 0  # of the class: the module's own are put back

    def training_step(self, batch, index):
        RunsOut.runs += 1
        x = self.net[:6](batch[0])
        if self.runs == 4 and self.where == "forward":
            raise torch.OutOfMemoryError("out of memory")
        if self.runs == 4:
            x.register_hook(self.fail)
        return self.net[6:](x).square().mean()

    def fail(self, gradient):
        raise torch.OutOfMemoryError("out of memory")


def test_a_step_whose_optimizer_has_begun_is_not_repeated(tmp_path):
    with pytest.raises(torch.OutOfMemoryError, match="Adam has begun to step in it"):
        fit(RunsOut("backward"), inside(memory_budget="64MiB"), default_root_dir=tmp_path)


@pytest.mark.slow
def test_a_step_that_fails_before_is_repeated_to_the_bit():
    plain, _ = fit(Wide())
    found, _ = fit(RunsOut("forward"), inside(memory_budget="64MiB"))
    assert RunsOut.runs == 13
    assert parts.same(plain.state_dict(), found.state_dict())


class ReadsOn(Wide):
    """The first layer's weight is read once more, without a gradient, by a part of the graph that runs later."""

    def training_step(self, batch, index):
        early = nn.functional.linear(batch[0].requires_grad_(), self.net[0].weight.detach())
        return self.net(early.tanh() @ self.net[2].weight.detach()).square().mean()


def test_a_weight_that_the_backward_reads_after_its_update_is_noticed():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(ReadsOn(), inside())


@pytest.mark.slow
def test_a_cut_in_mid_run_gives_the_same_weights_to_the_bit():
    found = []
    for step in (None, "in_backward"):
        module = parts.blobs()
        options = {"rank": 0.5, "recovery": {"cut_epochs": [1]}, "memory_budget": "8MiB"}
        parts.fit(module, inside(optimizer_step=step, **options), max_epochs=4)
        found.append(module.state_dict())
    assert parts.same(*found)
