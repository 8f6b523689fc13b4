"""Recovery of sharded layers on two ranks: what it does to whole ones under DDP, it does to shards."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from ctdr_lightning import decompose
from ctdr_lightning.recovery.batchnorm import tracked
from ctdr_lightning.trainer.structure import factorized_names
from tests import forks, parts
from tests.trainer.test_sharded_ranks import BY_WEIGHTS, Sharded, on_all_ranks, ours, run, sharded, whole

PHASES = [{"epochs": 1, "train": "factors", "lr_scale": 0.5, "warmup_epochs": 1}, {"epochs": 1}]


def cut(**recovery):
    return ours(rank=0.5, ranks=BY_WEIGHTS, recovery={"batchnorm_batches": 4, **recovery})


class Whole(Sharded):
    """The same network for DDP."""

    def configure_model(self):
        pass


def under_ddp(*callbacks, **options):
    parts.seed_everything(0, verbose=False)
    module = Whole()
    data = parts.loaders(batch_size=4)
    parts.fit(module, *callbacks, strategy="ddp", devices=2, data=data, **{"max_epochs": 2, **options})
    return module


def as_under_ddp():
    """BatchNorm statistics, frozen phases, scaled and warmed rates."""
    module = sharded()
    run(module, cut(phases=PHASES))
    same = under_ddp(cut(phases=PHASES))
    torch.testing.assert_close(module.losses, same.losses)
    torch.testing.assert_close(whole(module), dict(same.state_dict()))
    statistics = [buffer for layer in tracked(module).values() for buffer in layer.buffers()]
    assert statistics
    assert on_all_ranks(statistics)


def frozen():
    module, before = sharded(), sharded()
    decompose(before, rank=0.5, progress=False)
    run(module, cut(phases=[{"epochs": 1, "train": "factors"}], batchnorm_batches=0), max_epochs=1)
    after = whole(module)
    changed = {name for name, weight in before.named_parameters() if not parts.same(weight.data, after[name])}
    in_factors = {f"{layer}.{name}" for layer in factorized_names(before)
                  for name, _ in before.get_submodule(layer).named_parameters()}  # fmt: skip
    assert changed == in_factors != {name for name, _ in before.named_parameters()}
    assert all(parameter.requires_grad for parameter in module.parameters())


def stops_when_recovered():
    module = sharded()
    trainer = run(module, cut(monitor="val_loss", mode="min", reference=1e3), max_epochs=5)
    assert trainer.current_epoch == 1


def learns_from_a_sharded_teacher():
    host, device = sharded(), sharded()
    run(host, cut(distill={"module": "net", "keep": "host"}))
    callback = cut(distill={"module": "net", "keep": "device"})
    run(device, callback)
    assert parts.same(host.losses, device.losses)
    assert parts.same(whole(host), whole(device))
    teacher = callback.run.coach.teacher
    assert all(isinstance(parameter, DTensor) for parameter in teacher.net.parameters())  # between two steps
    assert teacher.n_bytes < 0.6 * sum(tensor.nbytes for tensor in teacher.state_dict().values())


def steps_after_a_validation_are_the_planned_ones():
    plain, planned = sharded(), sharded()
    callback = ours(rank=None, policy="sqrt")
    run(plain, max_epochs=3)
    run(planned, callback, max_epochs=3)
    assert parts.same(plain.losses, planned.losses)
    assert not parts.other_ops(callback.run.memory.session.events)


def under_a_plan():
    kept, planned = sharded(), sharded()
    run(kept, cut(distill={"module": "net", "keep": "device"}))
    recovery = {"batchnorm_batches": 4, "distill": {"module": "net", "keep": "device"}}
    callback = ours(rank=0.5, ranks=BY_WEIGHTS, recovery=recovery, policy="sqrt")
    run(planned, callback)
    assert parts.same(kept.losses, planned.losses)
    assert not parts.other_ops(callback.run.memory.session.events)


CHECKS = {
    check.__name__: check
    for check in (
        as_under_ddp, frozen, stops_when_recovered, learns_from_a_sharded_teacher, under_a_plan,
        steps_after_a_validation_are_the_planned_ones,
    )
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_shards_recover(name):
    assert forks.run(CHECKS[name], ranks=2) == [0, 0]


def check_resumed(folder, distributed):
    def recovery():
        warm = {"epochs": 2, "lr_scale": 0.5, "warmup_epochs": 2}
        return cut(phases=[warm], distill={"module": "net", "keep": "device"})

    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    through, again = sharded(), sharded()
    run(through, recovery(), saver, distributed=distributed, max_epochs=3)
    run(again, recovery(), distributed=distributed, ckpt_path=folder / "epoch=0.ckpt", max_epochs=3)
    assert parts.same(through.losses[len(through.losses) // 3 :], again.losses)


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_recovery_goes_on_where_it_was(tmp_path, distributed):
    assert forks.run(check_resumed, tmp_path, distributed, ranks=2) == [0, 0]
