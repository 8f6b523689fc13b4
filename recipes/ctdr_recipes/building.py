"""From a config to objects. A missing package is named with its pip line, an unknown argument with the nearest one."""

from __future__ import annotations

import inspect
import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ctdr_lightning.basics.errors import ConfigError, CTDRError, meant
from ctdr_recipes.resume import flat

EXTRAS = {
    "sklearn": "recipes", "matplotlib": "recipes", "mlxtend": "recipes", "rich": "recipes", "tensorboard": "recipes",
    "torchvision": "models", "timm": "models", "transformers": "models",
    "hydra_plugins": "slurm", "submitit": "slurm",
}  # fmt: skip


def build(config: Any, **given: Any) -> Any:
    """Import what a config's ``_target_`` names and call it.

    Args:
        config: A node with ``_target_``, or None.
        given: As for ``hydra.utils.instantiate``.

    Raises:
        ConfigError: When a package is missing, with the line that installs it; when the target takes no such argument,
            with the nearest one.
    """
    try:
        return instantiate(config, **given)
    except InstantiationException as error:
        raise _readable(error, config) from error
    except ModuleNotFoundError as error:
        raise missing(error) from error


def missing(error: ModuleNotFoundError) -> ConfigError:
    """The error of a missing package in words, with the line that installs it.

    Example:
        >>> print(missing(ModuleNotFoundError("No module named 'timm'", name="timm")).hint)
        pip install 'ctdr-lightning[models]'
    """
    # Lightning's loggers raise without a name and quote the requirement: Module not found: 'wandb'. HINT: ...
    quoted = re.search(r"'([\w.-]+)", str(error))
    package = (error.name or (quoted[1] if quoted else "")).partition(".")[0]
    if not package:
        return ConfigError(f"A package is not installed: {error}.", "Install what it names.")
    wanted = f"'ctdr-lightning[{EXTRAS[package]}]'" if package in EXTRAS else package
    return ConfigError(f"The package {package} is not installed.", f"pip install {wanted}")


def check_complete(config: DictConfig) -> None:
    """Refuse a config with values that only the user knows, all at once.

    Raises:
        ConfigError: With each value that is missing.
    """
    missed = [name for name, value in flat(OmegaConf.to_container(config)) if value == "???"]
    if missed:
        raise ConfigError(
            f"The config lacks {', '.join(missed)}.", f"Write {' '.join(f'{name}=VALUE' for name in missed)}."
        )


def _readable(error: InstantiationException, config: Any) -> Exception:
    """The cause in our words where it is one that a user can mend, and the error itself elsewhere."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CTDRError):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return missing(cause)
        cause = cause.__cause__ or cause.__context__
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    target = re.search(r"Error in call to target '([\w.]+)'", str(error))
    if unknown is None or target is None:
        return error
    accepted = list(inspect.signature(get_object(target[1])).parameters)
    near = meant(unknown[1], accepted)
    return ConfigError(f"{target[1]} takes no {unknown[1]!r}.", f"{near}It takes: {', '.join(accepted)}.")
