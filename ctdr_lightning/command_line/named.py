"""Names on the command line: ``module:callable``, imported from the current folder too, and called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ctdr_lightning.basics.errors import ConfigError, CTDRError, first_line


def build(name: str, what: str, example: str) -> Any:
    """Import and call a named callable.

    Args:
        name: Such as ``"torchvision.models:resnet18"``.
        what: Its role, for errors: ``"model"``.
        example: A valid name, for errors.

    Raises:
        ConfigError: If it cannot be imported or its call fails; with Python's error.
    """
    module, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(import_module(module), attribute)()
    except CTDRError:
        raise
    except Exception as error:  # somebody else's code: it may raise anything
        hint = f"module:callable, such as {example}."
        raise ConfigError(
            f"{what} {name!r} cannot be built: {first_line(error)}.",
            f"Install {package}, or write {hint}" if (package := _missing(error)) else f"Write {hint}",
        ) from error


def _missing(error: Exception) -> str:
    """The package that is not installed; empty where it is another error, or only a part of a package is not there."""
    name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    return "" if "." in name else name


def build_model(name: str) -> nn.Module:
    """The model that a name says.

    Raises:
        ConfigError: If it cannot be built or is no module.
    """
    model = build(name, "model", "torchvision.models:resnet18")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {name!r} is a {type(model).__name__}, no nn.Module.", "Name a callable that builds the module."
        )
    return model
