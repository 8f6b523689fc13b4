"""FSDP2 on two ranks near the least peak: one verdict on a budget, whether the run is fresh or resumed."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.guide.events import PlanMade
from ctdr_lightning.memory.holders.optimizer_bytes import predict
from ctdr_lightning.trainer.training_step.optimizer.resident import state_bytes
from tests import forks, parts


class Sharded(parts.Blobs):
    """Adam's state is an eighth of the least peak."""

    def __init__(self, optimizer=torch.optim.Adam):
        super().__init__(width=16, dropout=0.0)
        self.optimizer = optimizer

    def configure_model(self):
        for unit in (self.net[3], self.net[7], self.net):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-3)


def run(budget, *callbacks, module=None, ckpt_path=None):
    parts.seed_everything(0, verbose=False)
    module = module or Sharded()
    ours = [] if budget is None else [CTDRCallback(rank=None, memory_budget=budget, verbose=False)]
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=False
    )
    trainer = parts.fit(
        module, *ours, *callbacks, data=(parts.loaders(batch_size=4)[0], None), strategy=strategy, devices=2,
        max_steps=7, ckpt_path=ckpt_path, enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    return module, trainer, ours[0].run.memory.session.events if ours else []


def refused(budget):
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(budget)
    return caught.value.least_peak_bytes


@pytest.mark.slow
def test_a_budget_that_a_fresh_run_keeps_is_enough_when_it_is_resumed(tmp_path):
    def train(folder):
        least = refused("100KiB")
        budget = int(1.05 * least)
        plain = run(None)[0]
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        whole, _, events = run(budget, saver)
        path = folder / "step=4.ckpt"
        again, _, later = run(budget, ckpt_path=path)
        assert parts.same(plain.losses, whole.losses)
        assert parts.same(whole.losses[4:], again.losses)
        assert [len([e for e in said if isinstance(e, PlanMade)]) for said in (events, later)] == [1, 1]
        assert refused(int(0.95 * least)) == least

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_the_state_of_shards_is_predicted(tmp_path, optimizer):
    def train(folder):
        _, trainer, _ = run(None, module=Sharded(optimizer))
        assert predict(trainer.optimizers).state == state_bytes(trainer.optimizers)

    assert forks.run(train, tmp_path, ranks=2) == [0, 0]
