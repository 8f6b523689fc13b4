"""Staged cuts, rollback, distillation and phases in a running Trainer."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from ctdr_lightning import CTDRCallback, Ranks, Recovery
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import FactorizedLayer
from ctdr_lightning.recovery import Distillation, Phase
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts

STAGED = Recovery(cut_epochs=[0, 1, 2], phases=[Phase(1, lr_scale=0.5)])


class Watch(Callback):
    """Notes what each epoch trains with."""

    def __init__(self):
        self.layers, self.rates, self.trainable, self.moments = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            optimizer = trainer.optimizers[0]
            self.layers.append(factorized_names(pl_module))
            self.rates.append(optimizer.param_groups[0]["lr"])
            self.trainable.append({name for name, p in pl_module.named_parameters() if p.requires_grad})
            self.moments.append({n for n, p in pl_module.named_parameters() if p in optimizer.state})
            owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
            assert owned == [id(p) for p in pl_module.parameters()]


def test_stages_are_cut_in_order_of_tolerance_and_the_optimizer_follows():
    callback, watch = (
        CTDRCallback(rank=0.5, ranks=Ranks(allocate=None), recovery=STAGED, policy="keep", verbose=False),
        Watch(),
    )
    module = parts.blobs()
    parts.fit(module, callback, watch, max_epochs=4)
    stages = callback.run.surgeon.stages
    assert len(stages) == 3
    assert watch.layers == [{n for stage in stages[: i + 1] for n in stage} for i in (0, 1, 2, 2)]
    errors = {row.name: row.relative_error for row in callback.run.surgeon.report.factorized}
    order = [name for stage in callback.run.surgeon.stages for name in stage]
    assert order == sorted(errors, key=errors.get)
    assert watch.rates == [2e-3, 2e-3, 1e-3, 1e-3]
    kept = {name for name, _ in module.named_parameters() if name.startswith(("net.1.", "net.4."))}
    assert all(kept <= moments for moments in watch.moments[1:])
    cut_now = {
        n for layer in watch.layers[1] - watch.layers[0] for n in watch.trainable[1] if n.startswith(f"{layer}.")
    }
    assert cut_now
    assert not any(n in watch.moments[1] for n in cut_now if not n.endswith("bias"))


def test_phases_freeze_and_scale(monkeypatch):
    watch = Watch()
    schedule = Recovery(phases=[Phase(1, "batchnorm"), Phase(1, "factors"), Phase(1)], batchnorm_batches=0)
    module = parts.blobs()
    parts.fit(module, CTDRCallback(rank=0.5, recovery=schedule, policy="keep", verbose=False), watch, max_epochs=4)
    everything = {name for name, _ in module.named_parameters()}
    assert watch.trainable[0] == {n for n in everything if n.startswith(("net.1.", "net.4."))}
    assert all(any(n.startswith(f"{layer}.") for layer in watch.layers[1]) for n in watch.trainable[1])
    assert watch.trainable[2] == watch.trainable[3] == everything
    assert all(p.requires_grad for p in module.parameters())


def test_a_stage_that_fails_is_rolled_back_to_the_bit():
    recovery = Recovery(
        cut_epochs=[1, 3], phases=[Phase(1)], monitor="val_acc", reference=2.0, max_drop=0.01, batchnorm_batches=0
    )
    seen = {}

    class Before(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                seen["model"] = {k: v.clone() for k, v in pl_module.state_dict().items()}
                seen["moments"] = trainer.optimizers[0].state_dict()["state"]

    class After(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 3:
                assert parts.same(seen["model"], pl_module.state_dict())
                seen["steps"] = [float(s["step"]) for s in trainer.optimizers[0].state.values()]
                seen["layers"] = factorized_names(pl_module)

    callback = CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False)
    parts.fit(parts.blobs(), Before(), callback, After(), max_epochs=4)
    assert seen["layers"] == set()
    assert seen["steps"] == [4.0] * len(seen["moments"])
    assert callback.run.coach.progress.rolled_back


def test_a_last_stage_that_fails_at_the_end_of_training_is_rolled_back():
    recovery = Recovery(phases=[Phase(1)], monitor="val_acc", reference=2.0, max_drop=0.01)
    dense, module = parts.blobs(), parts.blobs()
    parts.fit(module, CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False), max_epochs=1)
    assert factorized_names(module) == set()
    assert parts.same(dense.state_dict(), module.state_dict())


def test_no_rollback_within_max_drop():
    recovery = Recovery(phases=[Phase(1)], monitor="val_acc", reference=0.2, max_drop=0.9, stop_when_recovered=False)
    module = parts.blobs()
    parts.fit(module, CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False), max_epochs=2)
    assert factorized_names(module)


def test_training_stops_when_recovered():
    recovery = Recovery(phases=[Phase(5)], monitor="val_acc", reference=0.0)
    trainer = parts.fit(
        parts.blobs(), CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False), max_epochs=5
    )
    assert trainer.current_epoch == 1


def test_the_dense_model_is_measured_and_re_estimation_helps(tmp_path):
    module = parts.blobs(dropout=0.0)
    parts.fit(module, max_epochs=8)
    dense = parts.quiet_trainer().validate(module, parts.loaders()[1], verbose=False)[0]["val_acc"]
    recovery = Recovery(monitor="val_acc", reference="measure", phases=[Phase(1)], tolerance=0.0)
    callback = CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False)
    trainer = parts.fit(module, callback, max_epochs=1, logger=CSVLogger(tmp_path))
    progress = callback.run.coach.progress
    assert progress.reference == pytest.approx(dense)
    assert progress.raw is not None
    assert progress.batchnorm >= progress.raw
    for name, value in [("dense", progress.reference), ("raw", progress.raw), ("batchnorm", progress.batchnorm)]:
        assert trainer.callback_metrics[f"ctdr/metric_{name}"] == pytest.approx(value)


class Noisy(parts.Blobs):
    """Augments in its training step."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)


def recovered(module, *callbacks, batches=20, data=None, **options):
    """Train under the default schedule, with so many batches for BatchNorm."""
    callback = CTDRCallback(rank=0.5, recovery=Recovery(batchnorm_batches=batches), policy="keep", verbose=False)
    return parts.fit(module, callback, *callbacks, data=data, **options)


@pytest.mark.parametrize("validates", [True, False])
def test_statistics_at_the_end_of_an_epoch_are_of_its_weights_as_they_are_evaluated(validates):
    module = Noisy(dropout=0.5)
    recovered(module, **({} if validates else {"limit_val_batches": 0}))
    hidden = [module.net[0](images) for images, _ in torch.utils.data.DataLoader(parts.images(32), 8)]
    torch.testing.assert_close(module.net[1].running_mean, torch.stack([h.mean((0, 2, 3)) for h in hidden]).mean(0))
    assert module.net[4].num_batches_tracked == 4


def test_the_model_that_is_saved_is_the_one_that_was_validated(tmp_path):
    module, saver = parts.blobs(), ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1)
    trainer = recovered(module, saver, max_epochs=3, enable_checkpointing=True)
    saved = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert saved["net.1.num_batches_tracked"] == 4
    found = trainer.validate(parts.blobs(), parts.loaders()[1], ckpt_path=saver.best_model_path, verbose=False)
    assert found[0]["val_loss"] == pytest.approx(float(saver.best_model_score), abs=1e-6)


def test_re_estimation_does_not_change_what_is_trained():
    plain = parts.blobs(dropout=0.5)
    recovered(plain, batches=0)
    estimated = parts.blobs(dropout=0.5)
    recovered(estimated)
    assert parts.same(plain.losses, estimated.losses)
    assert not torch.equal(plain.net[1].running_mean, estimated.net[1].running_mean)


def test_an_epoch_draws_all_its_batches_from_workers_that_persist():
    module, (_, val) = parts.blobs(), parts.loaders()
    train = torch.utils.data.DataLoader(parts.images(), 8, num_workers=1, persistent_workers=True)
    recovered(module, batches=3, data=(train, val))
    assert len(module.losses) == 2 * len(train)


def test_training_batches_that_validation_cannot_take():
    class Pairs(Noisy):
        def validation_step(self, batch, batch_idx):
            assert not self.trainer.training
            super().validation_step((batch["image"], batch["label"]), batch_idx)

    images = [{"image": image, "label": label} for image, label in parts.images(16)]
    data = parts.loaders()[0], torch.utils.data.DataLoader(images, 8)
    module = Pairs()
    with pytest.warns(UserWarning, match="training_step re-estimates"):
        recovered(module, data=data)
    assert module.net[1].num_batches_tracked == 4


def test_a_layer_that_validation_does_not_reach_is_re_estimated_in_training():
    class Auxiliary(parts.Blobs):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.BatchNorm2d(1)

        def training_step(self, batch, batch_idx):
            return super().training_step((self.extra(batch[0]), batch[1]), batch_idx)

    module = Auxiliary()
    recovered(module)
    assert module.extra.num_batches_tracked == module.net[1].num_batches_tracked == 4


def test_measuring_leaves_random_state_logs_and_modes_alone():
    def losses(recovery):
        module = parts.blobs(dropout=0.5)
        parts.fit(module, CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False), max_epochs=1)
        return module.losses

    quiet = Recovery(batchnorm_batches=0, monitor="val_acc", reference=1.0)
    measured = Recovery(batchnorm_batches=0, monitor="val_acc", reference="measure")
    assert parts.same(losses(quiet), losses(measured))


class Counted(parts.Blobs):
    """Logs a metric object of torchmetrics; another one counts every validation step and is never reset."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.steps = MulticlassAccuracy(4), SumMetric()

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self(batch[0]), batch[1])
        self.steps.update(1)
        self.log("val_acc", self.accuracy)


@pytest.mark.parametrize("cut_epoch", [0, 1])
def test_a_metric_object_is_measured_on_a_copy(cut_epoch):
    values = []

    class Validated(Callback):
        def on_validation_end(self, trainer, pl_module):
            values.append(float(trainer.callback_metrics["val_acc"]))

    recovery = Recovery(cut_epochs=[cut_epoch], monitor="val_acc", reference="measure", stop_when_recovered=False)
    callback, module = CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False), Counted()
    parts.fit(module, callback, Validated(), max_epochs=2)
    assert callback.run.coach.progress.reference == pytest.approx(values[cut_epoch])  # the first is the sanity check's
    assert callback.run.coach.progress.raw is not None
    assert len(values) == 3
    assert module.steps.compute() == 2 * len(values)


@pytest.mark.parametrize("policy", ["keep", "sqrt"])
def test_distillation_acts_on_the_loss_and_is_logged(policy):
    def run(distill):
        module = parts.blobs()
        callback = CTDRCallback(rank=0.25, recovery=Recovery(distill=distill), policy=policy, verbose=False)
        return module, parts.fit(module, callback, max_epochs=1)

    plain, _ = run(None)
    taught, trainer = run(Distillation(module="net"))
    assert torch.equal(plain.losses[0], taught.losses[0])
    assert not torch.equal(plain.losses[1], taught.losses[1])
    assert trainer.callback_metrics["ctdr/teacher_gib"] > 0
    assert trainer.callback_metrics["ctdr/teacher_s"] > 0
    assert trainer.callback_metrics["ctdr/distill_loss"] > 0


@pytest.mark.parametrize("other", [EMAWeightAveraging, StochasticWeightAveraging])
def test_averaging_callbacks_work_after_ours_and_are_refused_before(other):
    options = {"swa_lrs": 1e-3} if other is StochasticWeightAveraging else {}
    module = parts.blobs()
    parts.fit(
        module, CTDRCallback(rank=0.5, recovery=True, policy="keep", verbose=False), other(**options), max_epochs=3
    )
    assert factorized_names(module)
    with pytest.raises(ConfigError, match="comes before") as caught:
        parts.fit(parts.blobs(), other(**options), CTDRCallback(rank=0.5, policy="keep", verbose=False))
    assert f"CTDRCallback(...), {other.__name__}(...)" in caught.value.hint
    with pytest.raises(ConfigError, match="staged"):
        parts.fit(
            parts.blobs(), CTDRCallback(rank=0.5, recovery=STAGED, policy="keep", verbose=False), other(**options)
        )


def test_with_early_stopping_checkpoints_and_a_rate_monitor(tmp_path):
    callbacks = [
        EarlyStopping("val_loss", patience=5),
        LearningRateMonitor("epoch"),
        CTDRCallback(rank=0.5, recovery=STAGED, policy="keep", verbose=False),
        ModelCheckpoint(tmp_path, monitor="val_acc", mode="max", save_last=True),
    ]
    trainer = parts.fit(parts.blobs(), *callbacks, max_epochs=4, enable_checkpointing=True, logger=CSVLogger(tmp_path))
    assert trainer.callback_metrics["lr-Adam"] == pytest.approx(1e-3)
    best = parts.blobs(seed=9)
    trainer.validate(best, parts.loaders()[1], ckpt_path=callbacks[-1].best_model_path, verbose=False)
    assert trainer.callback_metrics["val_acc"] == callbacks[-1].best_model_score


def test_a_warm_up_over_data_without_length_is_refused():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(parts.images())

    data = torch.utils.data.DataLoader(Endless(), 8), parts.loaders()[1]
    schedule = Recovery(phases=[Phase(1, warmup_epochs=0.5)])
    with pytest.raises(ConfigError, match="warmup_epochs"):
        parts.fit(parts.blobs(), CTDRCallback(rank=0.5, recovery=schedule, policy="keep", verbose=False), data=data)


def test_the_monitor_must_be_logged():
    recovery = Recovery(monitor="accuracy", reference=0.9)
    with pytest.raises(ConfigError, match="accuracy"):
        parts.fit(parts.blobs(), CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False))
    assert not any(isinstance(m, FactorizedLayer) for m in parts.blobs().modules())
