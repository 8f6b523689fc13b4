"""FSDP2 on two ranks: layers are cut before they are sharded, equally everywhere."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ctdr_lightning import CTDRCallback, decompose, load_from_checkpoint, merge, restore
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.trainer.structure import factorized_names
from tests import forks, parts

BY_WEIGHTS = {"data": None}
GOAL = {"monitor": "val_acc", "reference": 0.5}


class Sharded(parts.Blobs):
    """Units that hold cut layers, in a unit that holds the rest."""

    def __init__(self, rank=None):
        super().__init__(width=16, dropout=0.0)
        self.rank, self.sharded = rank, False

    def configure_model(self):
        if self.sharded or self.device_mesh is None:  # as where a checkpoint is loaded outside of a Trainer
            return
        if self.rank is not None:
            decompose(self, rank=self.rank, progress=False)
        for unit in (self.net[3], self.net[7], self.net):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])
        self.sharded = True

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Built(Sharded):
    """Makes its layers in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        self.net = parts.Blobs(width=16).net
        super().configure_model()


def strategy(ranks=2, distributed=True):
    return ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo",
        save_distributed_checkpoint=distributed,
    )  # fmt: skip


def run(module, *callbacks, ranks=2, distributed=True, **options):
    parts.seed_everything(0, verbose=False)
    with_files = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return parts.fit(
        module, *callbacks, strategy=strategy(ranks, distributed), devices=ranks, enable_checkpointing=with_files,
        data=options.pop("data", parts.loaders(batch_size=4)), **{"max_epochs": 2, **options},
    )  # fmt: skip


def sharded(seed=0, **options):
    parts.seed_everything(seed, verbose=False)
    return Sharded(**options)


def ours(**options):
    return CTDRCallback(**{"policy": "keep", "verbose": False, **options})


def whole(module):
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in module.state_dict().items()}  # fmt: skip


def on_all_ranks(tensors):
    """Whether a process' tensors are every process'."""
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(others, tensor.contiguous())
        if not parts.same(others[0], others[1]):
            return False
    return True


class Seen(Callback):
    """The cut model's tensors, before they are sharded."""

    def setup(self, trainer, module, stage):
        self.cut = {name: tensor.clone() for name, tensor in module.state_dict().items()}


def by_weights():
    by_hand, called = sharded(rank=0.5), sharded()
    run(by_hand)
    run(called, ours(rank=0.5, ranks=BY_WEIGHTS))
    assert factorized_names(called) == factorized_names(by_hand) != set()
    assert parts.same(by_hand.losses, called.losses)
    assert parts.same(whole(by_hand), whole(called))


def by_data():
    module, callback, seen = sharded(), ours(rank=0.5), Seen()
    run(module, callback, seen)
    assert callback.run.surgeon.choices.factorized
    assert on_all_ranks(list(seen.cut.values()))
    twin = sharded()
    restore(twin, seen.cut)
    run(twin)
    assert parts.same(twin.losses, module.losses)


def under_a_plan():
    kept, planned, budgeted = sharded(), sharded(), sharded()
    run(kept, ours(rank=0.5, ranks=BY_WEIGHTS))
    run(planned, ours(rank=0.5, ranks=BY_WEIGHTS, policy="sqrt"))
    run(budgeted, ours(rank=0.5, ranks=BY_WEIGHTS, policy="auto", memory_budget="1GiB"))
    assert parts.same(kept.losses, planned.losses)
    assert parts.same(kept.losses, budgeted.losses)


CHECKS = {check.__name__: check for check in (by_weights, by_data, under_a_plan)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_cut_layers_are_sharded_and_train_as_if_cut_by_hand(name):
    assert forks.run(CHECKS[name], ranks=2) == [0, 0]


def check_resumed(folder, distributed):
    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    through, again = sharded(), sharded()
    run(through, ours(rank=0.5), saver, distributed=distributed, max_epochs=3)
    path = folder / "epoch=0.ckpt"
    assert path.is_dir() == distributed
    n_steps = len(through.losses) // 3
    run(again, ours(rank=0.5), distributed=distributed, ckpt_path=path, max_epochs=3)
    assert parts.same(through.losses[n_steps:], again.losses)

    followed = sharded(seed=7)  # whose own choice would be another one
    callback = CTDRCallback.from_checkpoint(path)
    run(followed, callback, distributed=distributed, ckpt_path=path, max_epochs=3)
    assert parts.same(through.losses[n_steps:], followed.losses)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_sharded_run_is_resumed_to_the_bit(tmp_path, distributed):
    assert forks.run(check_resumed, tmp_path, distributed, ranks=2) == [0, 0]


def save(folder, distributed):
    module = sharded()
    trainer = run(module, ours(rank=0.5), distributed=distributed, max_epochs=1)
    trainer.save_checkpoint(folder / "last.ckpt")
    weights = whole(module)
    if parts.rank() == 0:
        torch.save(weights, folder / "weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_sharded_runs_checkpoint_is_restored_and_merged_in_one_process(tmp_path, distributed):
    assert forks.run(save, tmp_path, distributed, ranks=2) == [0, 0]
    module = restore(Sharded(), tmp_path / "last.ckpt")
    weights = torch.load(tmp_path / "weights.pt")
    assert weights.keys() == module.state_dict().keys()
    for name, parameter in module.named_parameters():  # BatchNorm's statistics are each process' own
        assert parts.same(parameter.data, weights[name])
    scored = parts.quiet_trainer(ours(rank=0.5))
    (score,) = scored.validate(Sharded(), parts.loaders()[1], ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert score.keys() >= {"val_acc"}
    assert parts.same(load_from_checkpoint(Sharded, tmp_path / "last.ckpt").state_dict(), module.state_dict())
    x = torch.randn(3, 1, 8, 8)
    answer = module.eval()(x)
    assert not factorized_names(merge(module))
    torch.testing.assert_close(module(x), answer)


def test_a_damaged_folder_is_an_error_of_the_checkpoint(tmp_path):
    (tmp_path / "meta.pt").write_bytes(b"PK cut off")
    for read in (CTDRCallback.from_checkpoint, lambda path: restore(Sharded(), path)):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read(tmp_path)


def follow_alone(folder):
    module = sharded(seed=3)
    callback = CTDRCallback.from_checkpoint(folder / "last.ckpt")
    trainer = run(module, callback, ranks=1, ckpt_path=folder / "last.ckpt", max_epochs=2)
    assert trainer.global_step > 4
    assert factorized_names(module) == set(callback.run.surgeon.choices.factorized)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_another_number_of_processes_goes_on(tmp_path, distributed):
    assert forks.run(save, tmp_path, distributed, ranks=2) == [0, 0]
    assert forks.run(follow_alone, tmp_path) == [0]


def other_layers(folder):
    save(folder, True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(BaseException, match="state_dict"):
            run(sharded(), ours(rank=0.25, ranks=BY_WEIGHTS), ckpt_path=folder / "last.ckpt", max_epochs=2)
    assert any("from_checkpoint" in str(warning.message) for warning in said) == (parts.rank() == 0)


@pytest.mark.slow
def test_a_checkpoint_of_other_layers_is_refused_with_the_way_out(tmp_path):
    assert forks.run(other_layers, tmp_path, ranks=2) == [0, 0]


def from_meta():
    given = decompose(sharded(), rank=0.5, progress=False).choices
    with torch.device("meta"):
        module = sharded()
    run(module, ours(ranks={"choices": given}), max_epochs=1)
    assert factorized_names(module) == set(given.factorized)
    with torch.device("meta"):
        unchosen = sharded()
    with pytest.raises(ConfigError, match="meta"):
        run(unchosen, ours(rank=0.5))


@pytest.mark.slow
def test_weights_that_are_not_there_are_cut_by_given_choices():
    assert forks.run(from_meta, ranks=2) == [0, 0]


def refused():
    for options, said in (
        ({"rank": "auto", "memory_budget": "1GiB", "policy": "auto"}, "rank=0.25"),
        ({"rank": 0.5, "recovery": {**GOAL, "layers_per_stage": 1}}, "layers_per_stage"),
        ({"rank": 0.5, "recovery": {**GOAL, "reference": "measure"}}, "number"),
        ({"rank": 0.5, "recovery": {**GOAL, "max_drop": 0.1}}, "max_drop"),
    ):
        with pytest.raises(ConfigError) as caught:
            run(sharded(), ours(**options))
        assert said in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        run(Built(), ours(rank=0.5))
    assert "decompose(self, rank=0.5)" in caught.value.hint
    given = decompose(sharded(), rank=0.5, progress=False).choices
    with pytest.raises(ConfigError) as caught:
        run(Built(), ours(ranks={"choices": given}))
    assert "decompose(self, choices=" in caught.value.hint


def test_what_shards_do_not_allow_is_refused():
    assert forks.run(refused, ranks=2) == [0, 0]
