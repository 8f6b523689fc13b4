"""Train, decompose and evaluate a classifier from a config.

    python -m recipes.train experiment=digits
    python -m recipes.train data=image_folder data.root=images task.n_classes=10 model=torchvision ctdr=budget
    python -m recipes.train --multirun ctdr.rank=0.5,0.25,0.125

Configs are in ``conf/`` and are code: read them before you run them.
"""

from __future__ import annotations

import logging
from typing import Any

import hydra
from hydra.utils import instantiate
from lightning import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from ctdr_lightning.decomposition.layers.from_checkpoint import restore

_log = logging.getLogger(__name__)


def train(config: DictConfig) -> dict[str, float]:
    """Run one config.

    Args:
        config: What ``conf/train.yaml`` composes to.

    Returns:
        The metrics of the last validation, and of the test where the config asks for one.
    """
    seed_everything(config.seed, workers=True)
    data = instantiate(config.data)
    model: LightningModule = instantiate(config.model)
    if config.init_from is not None:
        restore(model, config.init_from)
    trainer: Trainer = instantiate(
        config.trainer, callbacks=_callbacks(config), logger=instantiate(config.get("logger")) or False
    )
    for logger in trainer.loggers:
        logger.log_hyperparams(_flat_primitives(config))
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    scores = _numbers(trainer)
    if config.test:
        trainer.test(model, datamodule=data)
        scores |= _numbers(trainer)
    return scores


def _callbacks(config: DictConfig) -> list[Callback]:
    """Build CTDR first: callbacks that copy the model, such as weight averaging, must see the decomposed one."""
    chosen = [config.get("ctdr"), *(config.get("callbacks") or {}).values()]
    return [instantiate(callback, _convert_="all") for callback in chosen if callback]


def _numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _flat_primitives(config: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Train, print the metrics and return validation accuracy, which is what a sweep maximises."""
    scores = train(config)
    for name in sorted(scores):
        _log.info("%s = %.4f", name, scores[name])
    return scores.get("val/acc")


if __name__ == "__main__":
    main()
