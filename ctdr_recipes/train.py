"""Train, decompose and evaluate a classifier from a config.

    python -m ctdr_recipes.train experiment=digits
    python -m ctdr_recipes.train data=image_folder data.root=images task.n_classes=10 model=torchvision ctdr=budget
    python -m ctdr_recipes.train --multirun ctdr.rank=0.5,0.25,0.125

Configs are in ``conf/`` and are code: read them before you run them.
"""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Any

import hydra
from hydra.utils import instantiate
from lightning import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from ctdr_lightning.decomposition.layers.from_checkpoint import restore
from ctdr_recipes.resume import Resume

_LONGEST_NAME = 120
_log = logging.getLogger(__name__)


def folder_of(overrides: str) -> str:
    """Name of a sweep point's folder: its overrides, without the characters that Hydra or a file system minds.

    Long names are cut, and a hash of the whole keeps them apart.

    Example:
        >>> folder_of("ctdr.rank=0.5,model.net.widths=[8,16]")
        'ctdr.rank-0.5-model.net.widths-8-16'
    """
    plain = re.sub(r"[^\w.+-]+", "-", overrides).strip("-")
    if len(plain) <= _LONGEST_NAME:
        return plain or "default"
    return f"{plain[: _LONGEST_NAME - 9]}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


OmegaConf.register_new_resolver("sweep_folder", folder_of, replace=True)


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
        logger.log_hyperparams(_primitives(config))
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    scores = _numbers(trainer)
    if config.ckpt_path is not None and not scores:  # the run was over when it was resumed
        trainer.validate(model, datamodule=data, verbose=False)
        scores = _numbers(trainer)
    if config.test:
        trainer.test(model, datamodule=data)
        scores |= _numbers(trainer)
    return scores


def _callbacks(config: DictConfig) -> list[Callback]:
    """Build CTDR first: callbacks that copy the model, such as weight averaging, must see the decomposed one."""
    chosen = [config.get("ctdr"), *(config.get("callbacks") or {}).values()]
    built = [instantiate(callback, _convert_="all") for callback in chosen if callback and callback.get("_target_")]
    return [*built, Resume(_primitives(config))]


def _numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _primitives(config: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Train, print the metrics and return validation accuracy, which is what a sweep maximises."""
    scores = train(config)
    for name in sorted(scores):
        _log.info("%s = %.4f", name, scores[name])
    return scores.get("val/acc")


if __name__ == "__main__":
    main()
