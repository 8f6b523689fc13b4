"""A step that runs out of memory is run again as if the first try had never been."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ctdr_lightning import CTDRCallback
from ctdr_lightning.trainer.training_step import retry as rescue


class Net(LightningModule):
    """Dropout, BatchNorm and a metric: whatever a careless retry would change."""

    def __init__(self, fail_in=None, fail_at=1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )
        self.seen = MeanMetric()
        self.fail_in, self.fail_at, self.forwards = fail_in, fail_at, 0

    def training_step(self, batch, index):
        self.forwards += 1
        loss = self.net(batch[0]).square().mean()
        self.seen.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.fail_in == "forward" and index == self.fail_at:
            self.fail_in = None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return loss

    def backward(self, loss, *args, **kwargs):
        if self.fail_in == "backward" and self.trainer.global_step == self.fail_at:
            self.fail_in = None
            self.net[4].weight.grad = torch.ones_like(self.net[4].weight)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16777216 bytes.")
        super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self):
        self.log("seen", self.seen)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def fit(net, tmp_path, **options):
    seed_everything(0, verbose=False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    data = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=12)
    callback = CTDRCallback(rank=None, memory_budget="1GiB", policy="sqrt", verbose=False, **options)
    trainer = Trainer(
        default_root_dir=tmp_path, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], deterministic=True,
    )  # fmt: skip
    trainer.fit(net, data)
    return {k: v.item() for k, v in trainer.callback_metrics.items() if "loss" in k or k == "seen"}, callback


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_rescued_run_ends_like_one_that_never_failed(where, step, tmp_path):
    plain, rescued = Net(), Net(where, step)
    metrics, _ = fit(plain, tmp_path)
    again, callback = fit(rescued, tmp_path)
    assert rescued.forwards == plain.forwards + 1
    assert any("ran out of memory" in event for event in callback.memory.session.events)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, rescued.state_dict()[name]), name
    if where == "backward":
        assert again == metrics


def test_retry_can_be_turned_off(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        fit(Net("forward", 1), tmp_path, retry_on_oom=False)


def test_other_errors_are_not_swallowed():
    def fail():
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        rescue.attempt(fail)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_signs_of_a_lack_of_memory(error, found):
    assert rescue.is_out_of_memory(error) is found


@pytest.mark.parametrize(("accumulate", "scale"), [(1, 1), (3, 1), (4, 1), (1, 1024.0)])
def test_repeated_loss_is_scaled_like_the_first(accumulate, scale):
    loss = torch.tensor(0.7, requires_grad=True)
    given = loss / accumulate * scale
    assert torch.equal(rescue.scaled_like(loss * 1, loss.detach(), given.detach()), given)
