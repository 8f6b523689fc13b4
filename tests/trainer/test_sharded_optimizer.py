"""An optimizer over shards, its state elsewhere or its step in the backward: as plain sharded training, to the bit."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory.holders import eight_bits
from ctdr_lightning.memory.holders.disk import STAGING_BYTES
from ctdr_lightning.memory.holders.optimizer_state import StateAway, state_away_of
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.training_step.optimizer.resident import kept_in, state_bytes
from ctdr_lightning.trainer.training_step.optimizer.states import OptimizerStates
from tests import forks, parts
from tests.memory.holders.test_eight_bits import StandIn
from tests.trainer.training_step import test_step_in_backward

DEPTH, BATCH, EPOCHS, STEPS = 8, 4, 2, 6


class Wide(LightningModule):
    """Weights outweigh activations. Two groups of parameters with a schedule; the last layer's rows are odd."""

    def __init__(self, make=optim.Adam, width=256):
        super().__init__()
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.GELU())]
        self.net, self.make, self.losses = nn.Sequential(*layers, nn.Linear(width, 33)), make, []

    def configure_model(self):
        for unit in (*(layer for layer in self.net if isinstance(layer, nn.Linear)), self):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        half = DEPTH
        groups = [
            {"params": list(self.net[:half].parameters()), "lr": 0.01},
            {"params": list(self.net[half:].parameters()), "weight_decay": 0.1},
        ]
        optimizer = self.make(groups, lr=0.003)
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


def ctdr(**options):
    return CTDRCallback(**grouped({"rank": None, "verbose": False, **options}))


def run(module, *callbacks, ranks=2, columns=1, one_file=False, **options):
    """Train on shards; returns the trainer."""
    images = torch.randn(
        STEPS // EPOCHS * ranks * BATCH, module.net[0].in_features, generator=torch.Generator().manual_seed(0)
    )
    strategy = ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=columns, process_group_backend="gloo",
        save_distributed_checkpoint=not one_file,
    )  # fmt: skip
    loaders = DataLoader(TensorDataset(images), BATCH), None
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return parts.fit(
        module, *callbacks, data=loaders, strategy=strategy, devices=ranks * columns, enable_checkpointing=saves,
        **{"max_epochs": EPOCHS, **options},
    )  # fmt: skip


def wide(make=optim.Adam, **options):
    parts.seed_everything(0, verbose=False)
    return Wide(make, **options)


def own(nest):
    """The same nest with this process' shards in place of sharded tensors."""
    if isinstance(nest, DTensor):
        return nest.to_local()
    if isinstance(nest, dict):
        return {key: own(value) for key, value in nest.items()}
    return [own(value) for value in nest] if isinstance(nest, list | tuple) else nest


def result(module, trainer):
    """Losses, shards, the optimizer's state and schedule."""
    return module.losses, own(list(module.parameters())), own(trainer.optimizers[0].state_dict())


DISK, INSIDE = {"optimizer_state": "disk"}, {"optimizer_step": "in_backward"}
MAKES = {
    "adam": optim.Adam,
    "for-each adamw": partial(optim.AdamW, foreach=True, amsgrad=True),
    "fused adamw": partial(optim.AdamW, fused=True),
    "momentum": partial(optim.SGD, momentum=0.9, nesterov=True),
}


def check_as_plain(names, options):
    for make in map(MAKES.get, names):
        plain, found = wide(make), wide(make)
        usual, trainer = run(plain), run(found, ctdr(**options))
        assert parts.same(result(plain, usual), result(found, trainer))
        assert state_away_of(trainer.optimizers[0]) is None


@pytest.mark.slow
@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), "64MiB"])
@pytest.mark.parametrize("options", [DISK, INSIDE], ids=str)
def test_losses_shards_and_state_are_those_of_plain_sharded_training_to_the_bit(options, budget):
    names = MAKES if budget is None else ["adam"]
    assert forks.run(check_as_plain, names, {**options, "memory_budget": budget}, ranks=2) == [0, 0]


def n_gradients(module):
    """Outside of the callback: one that reads gradients keeps the optimizer's step out of the backward."""
    return sum(p.grad is not None for p in module.parameters())


class Peaks(Callback):
    """Measured peaks of settled batches, the gradients that stay behind them, and the state that is away."""

    def __init__(self):
        self.peaks, self.left, self.away = [], set(), set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        (ours,) = (callback for callback in trainer.callbacks if isinstance(callback, CTDRCallback))
        if trainer.global_step > 2:  # the steps before are recorded, once more after the choice of units
            self.peaks.append(ours.run.steps.meters.measured.peak_bytes)
        self.left.add(n_gradients(module))
        self.away.add(ours.run.states.moved_bytes)


def check_budget(options, share):
    plain = wide(width=768)
    run(plain)
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(wide(width=768), ctdr(memory_budget="52MiB"))
    assert "optimizer_state='disk'" in caught.value.hint
    assert "optimizer_step" not in caught.value.hint
    budget, seen, found = int(share * caught.value.least_peak_bytes), Peaks(), wide(width=768)
    callback = ctdr(memory_budget=budget, **options)
    trainer = run(found, callback, seen)
    staging = 2 * STAGING_BYTES if options == DISK else 0  # of the disk's threads, which no meter of a step sees
    state = [t for kept in trainer.optimizers[0].state.values() for t in map(own, kept.values())]
    assert seen.away == ({sum(t.nbytes for t in state if t.nbytes >= 4096)} if options == DISK else {0})
    assert seen.left == ({0} if options == INSIDE else {2 * (DEPTH + 1)})
    predicted = callback.run.memory.session.plan.peak_bytes
    assert 0.94 * predicted < min(seen.peaks) + staging <= predicted <= budget
    assert max(seen.peaks) + staging <= budget
    assert parts.same(plain.losses, found.losses)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "share"), [(DISK, 0.755), pytest.param(INSIDE, 0.97, marks=pytest.mark.slow)])
def test_a_budget_that_plain_sharded_training_breaks_is_kept_as_predicted(options, share):
    assert forks.run(check_budget, options, share, ranks=2) == [0, 0]


KINDS = {"plain": {"policy": "keep"}, "disk": DISK, "inside": INSIDE}


def check_resumed(folder, one_file):
    whole = wide()
    usual = run(whole)
    for name, saving in KINDS.items():
        saver = ModelCheckpoint(folder / name, filename="first", save_top_k=-1)
        run(wide(), ctdr(**saving), saver, one_file=one_file, max_epochs=1)
    assert (folder / "disk" / "first.ckpt").is_dir() != one_file
    for name, then in (("plain", "disk"), ("disk", "plain"), ("disk", "disk"), ("plain", "inside"), ("inside", "disk")):
        again = wide()
        trainer = run(again, ctdr(**KINDS[then]), one_file=one_file, ckpt_path=folder / name / "first.ckpt")
        assert parts.same(whole.losses[STEPS // EPOCHS :], again.losses)
        assert parts.same(result(whole, usual)[1:], result(again, trainer)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("one_file", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_each_kind_of_run_resumes_each_others_checkpoints_to_the_bit(tmp_path, one_file):
    assert forks.run(check_resumed, tmp_path, one_file, ranks=2) == [0, 0]


def save(folder, one_file):
    saver = ModelCheckpoint(folder, filename="first", save_top_k=-1)
    run(wide(), ctdr(**DISK), saver, one_file=one_file, max_epochs=1)


def go_on(path, ranks):
    plain, found = wide(), wide()
    usual = run(plain, ranks=ranks, ckpt_path=path)
    trainer = run(found, ctdr(**DISK), ranks=ranks, ckpt_path=path)
    assert len(found.losses) == STEPS // EPOCHS
    assert parts.same(result(plain, usual), result(found, trainer))


@pytest.mark.slow
@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_processes_goes_on(tmp_path, one_file, ranks):
    assert forks.run(save, tmp_path, one_file, ranks=2) == [0, 0]
    assert forks.run(go_on, tmp_path / "first.ckpt", ranks, ranks=ranks) == [0] * ranks


class Manual(Wide):
    """Two steps of the optimizer a batch, one of them with a closure."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        def closure():
            optimizer.zero_grad()
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer = self.optimizers()
        closure()
        optimizer.step()
        optimizer.step(closure=closure)


def check_manual():
    parts.seed_everything(0, verbose=False)
    plain, found = Manual(), Manual()
    found.load_state_dict(plain.state_dict())
    usual, trainer = run(plain), run(found, ctdr(**DISK))
    assert len(found.losses) == 2 * STEPS
    assert parts.same(result(plain, usual), result(found, trainer))


@pytest.mark.slow
def test_closures_and_several_steps_a_batch_are_as_before():
    assert forks.run(check_manual, ranks=2) == [0, 0]


def use_stand_in():
    sys.modules["bitsandbytes"] = StandIn()
    for made_once in (eight_bits._library, eight_bits._values):
        made_once.cache_clear()


class Gradients(Callback):
    """This process' shards before the first step, and its gradients before each."""

    def __init__(self):
        self.shards, self.gradients = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.shards = self.shards or [p.detach().clone() for p in own(list(module.parameters()))]
        self.gradients.append([p.grad.to_local().clone() for p in module.parameters()])


def check_eight_bits():
    use_stand_in()
    module, seen, callback = wide(), Gradients(), ctdr(optimizer_state="8bit", memory_budget="64MiB")
    trainer = run(module, callback, seen)
    twin = wide()
    for param, shard in zip(twin.parameters(), seen.shards, strict=True):
        param.data = shard
    (optimizer,), (schedule,) = twin.configure_optimizers()
    away = StateAway(optimizer, eight_bits.EightBits())
    for gradients in seen.gradients:
        for param, gradient in zip(twin.parameters(), gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        schedule["scheduler"].step()
    assert parts.same(own(list(module.parameters())), [p.detach() for p in twin.parameters()])
    assert parts.same(own(trainer.optimizers[0].state_dict()["state"]), optimizer.state_dict()["state"])
    assert callback.run.memory.beside.optimizer.state == state_bytes([optimizer])
    assert away.moved_bytes > 3 * sum(t.nbytes for t in away.tensors) > 0


@pytest.mark.slow
def test_in_8_bits_each_process_trains_as_on_its_own_shards_alone():
    assert forks.run(check_eight_bits, ranks=2) == [0, 0]


class Columns(Wide):
    """Rows of each layer on the processes of a tensor-parallel group; sharded once more where there are more groups."""

    def configure_model(self):
        layers = {name: layer for name, layer in self.net.named_children() if isinstance(layer, nn.Linear)}
        styles = {name: ColwiseParallel(output_layouts=Replicate()) for name in layers}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], styles)
        for unit in layers.values() if self.device_mesh["data_parallel"].size() > 1 else ():
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])


def check_columns(options, groups):
    def columns():
        parts.seed_everything(0, verbose=False)
        return Columns()

    plain, found = columns(), columns()
    usual, trainer = run(plain, ranks=groups, columns=2), run(found, ctdr(**options), ranks=groups, columns=2)
    assert {len(p.placements) for p in found.parameters()} == {1 if groups == 1 else 2}
    assert parts.same(result(plain, usual), result(found, trainer))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("options", [DISK, INSIDE], ids=str)
def test_tensor_parallel_training_is_as_before_to_the_bit(options, groups):
    assert forks.run(check_columns, options, groups, ranks=2 * groups) == [0] * (2 * groups)


class ReadsOn(Columns):
    """A weight is read once more, without a gradient, by a part of the graph whose backward runs after its update."""

    def training_step(self, batch, batch_idx):
        images = DTensor.from_local(batch[0].requires_grad_(), self.device_mesh["tensor_parallel"], [Replicate()])
        early = (images @ self.net[2].weight.detach()).full_tensor()
        return self.net(early.tanh()).square().mean()


def check_read_on():
    for make in MAKES.values():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(ReadsOn(make), ctdr(**INSIDE), ranks=1, columns=2)


@pytest.mark.slow
def test_a_shard_that_the_backward_reads_after_its_update_is_noticed():
    assert forks.run(check_read_on, ranks=2) == [0, 0]


class Twice(Wide):
    """One unit runs twice: the backward of its first run would gather weights that are updated."""

    def training_step(self, batch, batch_idx):
        x = self.net[0](batch[0].requires_grad_())
        return self.net(x).square().mean()


class TwiceAgain(Wide):
    """One unit in two checkpoints that run it again one after the other in the backward."""

    training_step = test_step_in_backward.Twice.training_step


class Checkpointed(Wide):
    """Units that a checkpoint runs once more, before their update."""

    def training_step(self, batch, batch_idx):
        x = checkpoint(self.net[:6], batch[0].requires_grad_(), use_reentrant=False)
        self.losses.append(x.detach().sum())
        return self.net[6:](x).square().mean()


class NotAll(Wide):
    """A layer that is the same on every process."""

    def configure_model(self):
        for layer in (layer for layer in self.net[1:] if isinstance(layer, nn.Linear)):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


REFUSED = {Twice: "runs twice in one step", TwiceAgain: "runs twice in one step", NotAll: "net.0.weight is not sharded"}


def check_refused():
    for kind, words in REFUSED.items():
        with pytest.raises(ConfigError, match=words):
            run(kind(), ctdr(**INSIDE))
        run(kind(), ctdr(**DISK))


@pytest.mark.slow
def test_updates_that_the_backward_or_an_exchange_would_miss_are_refused():
    assert forks.run(check_refused, ranks=2) == [0, 0]


def check_checkpointed():
    for options in (INSIDE, {**INSIDE, "memory_budget": "64MiB"}):
        parts.seed_everything(0, verbose=False)
        plain, found = Checkpointed(), Checkpointed()
        found.load_state_dict(plain.state_dict())
        usual, trainer = run(plain), run(found, ctdr(**options))
        assert parts.same(result(plain, usual), result(found, trainer))


@pytest.mark.slow
def test_checkpoints_around_units_are_no_second_run():
    assert forks.run(check_checkpointed, ranks=2) == [0, 0]


def check_offloaded():
    trainer = run(wide(), max_epochs=1)
    assert not kept_in(trainer.optimizers[0], other_than="cpu")
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    elsewhere = SimpleNamespace(strategy=strategy, optimizers=trainer.optimizers)
    for place in ("host", "disk"):
        with pytest.raises(ConfigError, match="CPUOffloadPolicy keeps the optimizer's state on 'cpu'; the steps"):
            OptimizerStates(place, None).attach(elsewhere)


def test_shards_that_fsdp_itself_offloads_keep_their_state():
    assert forks.run(check_offloaded, ranks=2) == [0, 0]
