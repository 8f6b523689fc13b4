"""Trainer configurations beyond the table of ways: processes, tuners, compiled modules, checkpoints, refusals."""

import warnings
from functools import partial

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback, Recovery, decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.compiled.backend import CompileBackend
from ctdr_lightning.memory.guide.events import Differed
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.modules import load_from_checkpoint
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning.trainer.strategies import check_device, check_strategy
from ctdr_lightning.trainer.structure import factorized_names
from ctdr_lightning.trainer.training_step import memory_stage
from tests import forks, parts

RECOVERY = Recovery(phases=[Phase(1, "factors", lr_scale=0.5), Phase(1)], batchnorm_batches=2)


def test_ranks_agree_when_their_weights_do_not(tmp_path):
    def train(folder):
        module = parts.blobs(seed=parts.rank())
        callback = CTDRCallback(rank="energy=0.8", policy="sqrt", recovery=RECOVERY, verbose=False)
        trainer = parts.fit(module, callback, strategy="ddp", devices=2, max_epochs=2)
        torch.save([callback.run.surgeon.choices.to_dict(), module.state_dict()], folder / f"{trainer.global_rank}.pt")

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert parts.same(first, second)
    assert first[0]["layers"]


def test_two_ranks_under_a_memory_plan_are_bit_identical_to_plain_ones(tmp_path):
    def train(folder, name, *callbacks):
        module = parts.blobs()
        trainer = parts.fit(module, *callbacks, strategy="ddp", devices=2, max_epochs=2)
        torch.save(module.state_dict(), folder / f"{name}{trainer.global_rank}.pt")

    planned = CTDRCallback(rank=None, policy="sqrt", verbose=False)
    assert (
        forks.run(train, tmp_path, "plain", ranks=2)
        == forks.run(train, tmp_path, "planned", planned, ranks=2)
        == [0, 0]
    )
    states = [torch.load(tmp_path / f"{name}{rank}.pt") for name in ("plain", "planned") for rank in (0, 1)]
    assert all(parts.same(states[0], state) for state in states[1:])


class Tunable(parts.Blobs):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)

    def train_dataloader(self):
        return DataLoader(parts.images(), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(parts.images(16, seed=1), 8)


def test_lr_find_then_fit(tmp_path):
    module = Tunable()
    callback = CTDRCallback(rank=0.5, policy="sqrt", recovery=RECOVERY, verbose=False)
    trainer = parts.quiet_trainer(callback, max_epochs=2, default_root_dir=tmp_path, log_every_n_steps=1)
    found = Tuner(trainer).lr_find(module, num_training=8, min_lr=1e-5)
    layers = factorized_names(module)
    trainer.fit(module)
    assert len(found.results["lr"]) == 8
    assert layers == factorized_names(module) != set()


def test_batch_size_finder_before_fit(tmp_path):
    module = Tunable()
    callback = CTDRCallback(rank=0.5, policy="sqrt", recovery=RECOVERY, verbose=False)
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1)
    trainer = parts.quiet_trainer(callback, finder, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(module)
    assert module.batch_size > 2
    assert factorized_names(module)


class Silent(parts.Blobs):
    """Logs nothing in its step: Lightning's ``log`` cannot be compiled."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled_modules_run_decomposed(when):
    def run(wrap):
        parts.seed_everything(0, verbose=False)
        module = Silent(dropout=0.0)
        parts.fit(wrap(module), CTDRCallback(rank=0.5, recovery=RECOVERY, policy="keep", verbose=False), max_epochs=2)
        assert factorized_names(module)
        return torch.stack(module.losses)

    def inside(module):
        module.net.compile(backend="eager")
        return module

    compiled = run(inside if when == "inside" else lambda module: torch.compile(module, backend="eager"))
    assert torch.allclose(compiled, run(lambda module: module), atol=1e-5)


class Logged(Silent):
    """Lightning's ``log`` cannot be compiled, which leaves it outside of the graph."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log_dict({"again": loss})
        return loss


@pytest.mark.slow
def test_a_compiled_step_may_log(monkeypatch):
    monkeypatch.setattr(memory_stage, "CompileBackend", partial(CompileBackend, engine="aot_eager"))
    torch._dynamo.reset()
    callback = CTDRCallback(rank=None, memory_budget="1GiB", verbose=False)
    trainer = parts.fit(torch.compile(Logged(), backend="aot_eager"), callback, max_epochs=1)
    assert len(callback.run.memory.last_backend.graphs) == 1
    assert trainer.callback_metrics["again"] == trainer.callback_metrics["loss"] > 0


def test_a_compiled_part_is_said_to_run_op_by_op():
    module = Silent()
    module.net.compile(backend="eager")
    with pytest.warns(UserWarning, match="'net' is compiled, but runs op by op"):
        parts.fit(module, CTDRCallback(rank=None, memory_budget="1GiB", verbose=False), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.85])
def test_a_compiled_step_keeps_to_the_budget(monkeypatch, share):
    # inductor takes ten seconds a graph on a processor
    monkeypatch.setattr(memory_stage, "CompileBackend", partial(CompileBackend, engine="aot_eager"))

    def run(budget=None):
        torch._dynamo.reset()  # else the step may have been compiled too often to be compiled once more
        parts.seed_everything(0, verbose=False)
        module = Silent(dropout=0.0)
        compiled = torch.compile(module, backend="aot_eager")
        callback = CTDRCallback(rank=None, memory_budget=budget, verbose=False)
        parts.fit(compiled, *([callback] if budget else []), max_epochs=2)
        return module, callback.run.memory.last_backend

    plain, _ = run()
    _, whole = run("1GiB")
    (graph,) = whole.graphs.values()
    planned, backend = run(int(share * graph.peak_bytes))
    assert parts.same(planned.state_dict(), plain.state_dict())
    (graph,) = backend.graphs.values()
    assert graph.peak_bytes <= backend.budget_bytes
    assert graph.plan.keeps_all == (share == 1)
    state_bytes = 2 * sum(p.nbytes for p in planned.parameters())  # Adam's moments
    assert graph.plan.trace.resident_bytes >= 3 * state_bytes // 2
    with pytest.raises(Exception, match=r"The optimizer's step does not fit"):
        run(state_bytes)


@pytest.mark.slow
def test_two_ranks_with_a_compiled_step_under_a_budget(tmp_path):
    def train(folder, name, *callbacks):
        memory_stage.CompileBackend = partial(CompileBackend, engine="aot_eager")  # in a process of its own
        parts.seed_everything(0, verbose=False)
        module = Silent(dropout=0.0)
        compiled = torch.compile(module, backend="aot_eager")
        trainer = parts.fit(compiled, *callbacks, strategy="ddp", devices=2, max_epochs=2)
        kept = [graph.plan.keeps_all for c in callbacks for graph in c.run.memory.last_backend.graphs.values()]
        torch.save([module.state_dict(), kept], folder / f"{name}{trainer.global_rank}.pt")

    budget = CTDRCallback(rank=None, memory_budget="260KiB", verbose=False)
    assert forks.run(train, tmp_path, "plain", ranks=2) == [0, 0]
    assert forks.run(train, tmp_path, "planned", budget, ranks=2) == [0, 0]
    for rank in (0, 1):
        plain, planned = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("plain", "planned"))
        assert parts.same(plain[0], planned[0])
        assert planned[1] == [False]


def test_test_validate_and_predict_with_a_checkpoint(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="run")
    module = parts.blobs()
    trainer = parts.fit(module, CTDRCallback(rank=0.5, policy="keep", verbose=False), saver, enable_checkpointing=True)
    val = parts.loaders()[1]
    wanted = parts.quiet_trainer().test(module, val, verbose=False)
    for callbacks in (
        [CTDRCallback(rank=0.5, policy="keep", verbose=False)],
        [CTDRCallback(rank="vbmf", policy="keep", verbose=False)],
    ):
        fresh = parts.quiet_trainer(*callbacks)
        assert fresh.test(parts.blobs(seed=4), val, ckpt_path=tmp_path / "run.ckpt", verbose=False) == wanted
        outputs = fresh.predict(parts.blobs(seed=4), val, ckpt_path=tmp_path / "run.ckpt")
        assert parts.same(outputs, parts.quiet_trainer().predict(module, val))
        assert fresh.validate(parts.blobs(seed=4), val, ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert trainer.state.status == "finished"


def test_load_from_checkpoint_by_the_one_line_helper(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="run")
    module = parts.blobs(width=6)
    parts.fit(module, CTDRCallback(rank=0.5, policy="keep", verbose=False), saver, enable_checkpointing=True)
    loaded = load_from_checkpoint(parts.Blobs, tmp_path / "run.ckpt", width=6)
    assert parts.same(loaded.state_dict(), module.state_dict())


def test_vbmf_on_resume_into_an_untrained_model(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    module = parts.blobs()
    parts.fit(
        module,
        CTDRCallback(rank="energy=0.6", policy="keep", verbose=False),
        saver,
        enable_checkpointing=True,
        max_epochs=2,
    )
    again = parts.blobs(seed=7)
    options = {"enable_checkpointing": True, "max_epochs": 2, "ckpt_path": tmp_path / "epoch=0.ckpt"}
    parts.fit(
        again, CTDRCallback(rank="vbmf", policy="keep", verbose=False), ModelCheckpoint(tmp_path / "b"), **options
    )
    assert parts.same(again.state_dict(), module.state_dict())


class Strategy:
    """Stands in for a strategy of that name."""


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy", "XLAStrategy", "MyStrategy"])
def test_a_strategy_that_does_not_work_is_refused_with_the_reason(name):
    strategy = type(name, (Strategy,), {})()
    with pytest.raises(ConfigError, match=name) as caught:
        check_strategy(strategy, cuts=True, chooses=False, allow_untested=False)
    assert "allow_untested=True" in caught.value.hint
    with pytest.warns(UserWarning, match="not tested"):
        check_strategy(strategy, cuts=True, chooses=False, allow_untested=True)


@pytest.mark.parametrize(("kind", "hip"), [("mps", None), ("xpu", None), ("cuda", "6.2")])
def test_memory_is_not_planned_on_a_device_that_nobody_tried(kind, hip, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device(kind)
    with pytest.raises(ConfigError, match=f"not tested on {'ROCm' if hip else kind} devices") as caught:
        check_device(device, plans=True, allow_untested=False)
    assert "allow_untested=True" in caught.value.hint
    with pytest.warns(UserWarning, match="not tested"):
        check_device(device, plans=True, allow_untested=True)
    check_device(device, plans=False, allow_untested=False)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_memory_is_planned_on_tested_devices(kind, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    check_device(torch.device(kind), plans=True, allow_untested=False)


def test_ranks_for_a_budget_are_refused_under_shards():
    strategy = type("ModelParallelStrategy", (Strategy,), {})()
    with pytest.raises(ConfigError, match="shards") as caught:
        check_strategy(strategy, cuts=True, chooses=True, allow_untested=True)
    assert "rank=0.25" in caught.value.hint
    check_strategy(strategy, cuts=True, chooses=False, allow_untested=False)
    check_strategy(strategy, cuts=False, chooses=True, allow_untested=False)


def test_pytorch_lightning_as_well():
    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = parts.blobs().net
            self.losses = []

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    recovery = Recovery(monitor="val_loss", mode="min", reference="measure", cut_epochs=[0, 1], phases=[Phase(1)])
    callback = CTDRCallback(rank=0.5, policy="sqrt", recovery=recovery, verbose=False)
    trainer = pytorch_lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], **quiet)
    module = Module()
    trainer.fit(module, *parts.loaders())
    assert factorized_names(module)
    assert callback.run.coach.progress.reference is not None
    assert trainer.callback_metrics["ctdr/compression"] > 1


CLI_CONFIG = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: ctdr_lightning.CTDRCallback
      init_args:
        rank: {"net.3": 0.25, "net.*": energy=0.9}
        policy: sqrt
        memory_budget: 1GiB
        verbose: false
        recovery:
          phases:
            - {epochs: 1, train: factors, lr_scale: 0.5, warmup_epochs: 0.5}
          monitor: val_loss
          mode: min
          reference: measure
model:
  width: 8
"""


class Data(LightningDataModule):
    def train_dataloader(self):
        return parts.loaders()[0]

    def val_dataloader(self):
        return parts.loaders()[1]


def test_lightning_cli_with_the_callback_in_yaml(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(CLI_CONFIG)
    monkeypatch.chdir(tmp_path)
    cli = LightningCLI(parts.Blobs, Data, args=["fit", "--config", str(config)], save_config_callback=None)
    callback = next(c for c in cli.trainer.callbacks if isinstance(c, CTDRCallback))
    assert callback.options.rank == {"net.3": 0.25, "net.*": "energy=0.9"}
    assert callback.options.recovery.phases == (Phase(1, "factors", 0.5, 0.5),)
    assert factorized_names(cli.model)


def test_lightning_cli_sets_fields_of_a_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "memory_budget": "8GiB",
        "memory.sub_batches": "auto",
        "memory.over_budget": "raise",
        "ranks.method": "svd",
    }
    args = [f"--trainer.callbacks.{name}={value}" for name, value in given.items()]
    args = ["--trainer.accelerator=cpu", "--trainer.callbacks+=ctdr_lightning.CTDRCallback", *args]
    cli = LightningCLI(parts.Blobs, run=False, args=args, save_config_callback=None)
    options = next(c for c in cli.trainer.callbacks if isinstance(c, CTDRCallback)).options
    assert (options.memory_budget, options.sub_batches) == ("8GiB", "auto")
    assert (options.over_budget, options.method) == ("raise", "svd")


def test_16_mixed_runs_where_the_cpu_has_it_or_lightning_says_why_not():
    callback = CTDRCallback(rank=0.5, policy="sqrt", recovery=RECOVERY, verbose=False)
    module = parts.blobs()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = parts.fit(module, callback, precision="16-mixed")
    assert factorized_names(module)
    assert trainer.precision == "16-mixed" or any("16" in str(w.message) for w in said)


def shard(folder, name, *callbacks):
    """Two ranks, FSDP2 units made in ``configure_model``, layers decomposed there first."""

    class Sharded(parts.Blobs):
        def configure_model(self):
            if not any("tucker" in key for key in self.state_dict()):
                decompose(self, rank=0.5, select=["net.3", "net.7"], progress=False)
                for index in (3, 7):
                    fully_shard(self.net[index], mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=2e-3)

    module = Sharded()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    data = parts.loaders(batch_size=2)[0], None
    trainer = parts.fit(module, *callbacks, data=data, strategy=strategy, devices=2, max_epochs=2)
    torch.save(module.losses, folder / f"{name}{trainer.global_rank}.pt")
    if callbacks:
        session = callbacks[0].run.memory.session
        assert session.plan is not None
        planned = f"Policy {callbacks[0].options.policy}"
        assert any(words_of(event).startswith(planned) for event in session.events), session.events
        assert not [event for event in session.events if isinstance(event, Differed)], session.events


@pytest.mark.slow
def test_fsdp2_through_model_parallel_strategy(tmp_path):
    planned = CTDRCallback(rank=None, policy="sqrt", verbose=False)
    assert forks.run(shard, tmp_path, "plain", ranks=2) == [0, 0]
    assert forks.run(shard, tmp_path, "planned", planned, ranks=2) == [0, 0]
    for rank in (0, 1):
        assert parts.same(torch.load(tmp_path / f"plain{rank}.pt"), torch.load(tmp_path / f"planned{rank}.pt"))


@pytest.mark.slow
def test_a_budget_alone_leaves_sharded_layers_as_they_are(tmp_path):
    budget = CTDRCallback(memory_budget="1GiB", verbose=False)
    assert forks.run(shard, tmp_path, "plain", ranks=2) == [0, 0]
    assert forks.run(shard, tmp_path, "planned", budget, ranks=2) == [0, 0]
    for rank in (0, 1):
        assert parts.same(torch.load(tmp_path / f"plain{rank}.pt"), torch.load(tmp_path / f"planned{rank}.pt"))


@pytest.mark.slow
def test_a_compiled_step_is_told_what_cannot_be_done():
    compiled = torch.compile(Silent(), backend="eager")
    with pytest.warns(UserWarning, match="without memory_budget"):
        parts.fit(compiled, CTDRCallback(rank=0.5, policy="sqrt", verbose=False), max_epochs=1)
    recovery = Recovery(distill={"module": "net"})
    with pytest.raises(ConfigError, match="compiled"):
        parts.fit(
            torch.compile(Silent(), backend="eager"),
            CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False),
        )
