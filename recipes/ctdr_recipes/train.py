"""Train, decompose and evaluate a classifier from a config.

    ctdr recipes run digits ctdr.rank=0.1
    python -m ctdr_recipes.train experiment=digits
    python -m ctdr_recipes.train data=image_folder data.root=images task.n_classes=10 model=torchvision ctdr=budget
    python -m ctdr_recipes.train --multirun ctdr.rank=0.5,0.25,0.125

Configs are in ``conf/`` and are code: read them before you run them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from lightning import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from ctdr_lightning.basics.errors import ConfigError, CTDRError
from ctdr_lightning.decomposition.layers.from_checkpoint import restore
from ctdr_recipes.building import build, check_complete
from ctdr_recipes.folders import configs_of
from ctdr_recipes.resume import Resume
from ctdr_recipes.slurm import check_slurm
from ctdr_recipes.spelling import check_overrides

CONFIGS = configs_of(__file__)
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
    check_complete(config)
    seed_everything(config.seed, workers=True)
    data = build(config.data)
    model: LightningModule = build(config.model)
    start = config.evaluate if config.evaluate is not None else config.init_from
    if start is not None:
        restore(model, start)
    trainer: Trainer = build(config.trainer, callbacks=_callbacks(config), logger=build(config.get("logger")) or False)
    for logger in trainer.loggers:
        logger.log_hyperparams(_primitives(config))
    if config.evaluate is not None:
        return _evaluated(trainer, model, data)
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    scores = _numbers(trainer)
    if config.ckpt_path is not None and not scores:  # the run was over when it was resumed
        trainer.validate(model, datamodule=data, verbose=False)
        scores = _numbers(trainer)
    if config.test:
        trainer.test(model, datamodule=data, ckpt_path=_to_test(config.test, trainer))
        scores |= _numbers(trainer)
    return scores


def _evaluated(trainer: Trainer, model: LightningModule, data: Any) -> dict[str, float]:
    """Scores of the weights that the model has."""
    trainer.validate(model, datamodule=data, verbose=False)
    scores = _numbers(trainer)
    trainer.test(model, datamodule=data, verbose=False)
    return scores | _numbers(trainer)


def _to_test(wanted: bool | str, trainer: Trainer) -> str | None:
    """The checkpoint to test; None tests the weights as they are."""
    if wanted is True:
        return None
    kept = trainer.checkpoint_callback
    best = getattr(kept, "best_model_path", "") if getattr(kept, "monitor", None) else ""
    if wanted != "best" or not best:
        raise ConfigError(
            f"test={wanted!r} cannot be tested: {'no best checkpoint was written' if wanted == 'best' else 'unknown'}.",
            "Give test=true, test=false, or test=best with a checkpoint callback that has a monitor.",
        )
    return str(best)


def _callbacks(config: DictConfig) -> list[Callback]:
    """Build CTDR first: callbacks that copy the model, such as weight averaging, must see the decomposed one."""
    chosen = [config.get("ctdr"), *(config.get("callbacks") or {}).values()]
    built = [build(callback, _convert_="all") for callback in chosen if callback and callback.get("_target_")]
    return [*built, Resume(_primitives(config))]


def _numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _primitives(config: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def main(config: DictConfig) -> float | None:
    """Train, print the metrics and return validation accuracy, which is what a sweep maximises.

    Raises:
        CompactHydraException: In the place of an error of ours: Hydra prints it without a traceback.
    """
    try:
        scores = train(config)
    except CTDRError as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            _log.error("%s", error)  # of a sweep's failed points Hydra says the first alone
        raise CompactHydraException(f"ctdr: {error}") from error
    for name in sorted(scores):
        _log.info("%s = %.4f", name, scores[name])
    return scores.get("val/acc")


def command() -> None:
    """Check the command line's overrides, then run them."""
    if not any(word.startswith(("--config-path", "-cp", "--config-name", "-cn")) for word in sys.argv):
        check_overrides(sys.argv[1:], CONFIGS)
        check_slurm(sys.argv[1:], CONFIGS)
    main()


if __name__ == "__main__":
    try:
        command()
    except CTDRError as error:
        sys.exit(f"ctdr: {error}")
