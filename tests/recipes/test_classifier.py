from functools import partial

import pytest
import torch
from lightning import Trainer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.classifier import Classifier, cnn


def _separable(n_images=64):
    labels = torch.arange(n_images) % 2
    images = torch.randn(n_images, 1, 8, 8) * 0.1 + labels.view(-1, 1, 1, 1) * 2.0
    return DataLoader(TensorDataset(images, labels), 16)


def test_cnn_has_one_convolution_for_each_width_and_strides_halve_the_image():
    net = cnn([8, 16, 32], [1, 2, 2], in_channels=3, n_classes=5)
    features = net[:-2](torch.zeros(2, 3, 16, 16))
    assert [name for name, _ in net.named_children()] == ["stem", "stage1", "stage2", "pool", "head"]
    assert features.shape == (2, 32, 4, 4)
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 5)


def test_cnn_refuses_widths_without_strides():
    with pytest.raises(ConfigError, match="2 widths and 1 strides"):
        cnn([8, 16], [1])


@pytest.mark.parametrize("scheduler", [None, partial(OneCycleLR, max_lr=0.05)])
def test_learns_what_can_be_told_apart_and_logs_it(tmp_path, scheduler):
    model = Classifier(cnn([4], [2], n_classes=2), 2, partial(torch.optim.AdamW, lr=0.05), scheduler)
    trainer = Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, _separable(), _separable())
    assert trainer.callback_metrics["val/acc"] == 1
    assert trainer.callback_metrics["train/loss"] < 0.5
    assert trainer.test(model, _separable(), verbose=False)[0]["test/acc"] == 1


def test_schedule_ends_with_the_last_step():
    model = Classifier(
        cnn([4], [2], n_classes=2), 2, partial(torch.optim.AdamW, lr=0.05), partial(OneCycleLR, max_lr=1)
    )
    trainer = Trainer(max_epochs=3, accelerator="cpu", barebones=True)
    trainer.fit(model, _separable())
    assert model.lr_schedulers().last_epoch == 3 * 4
