"""Names on the command line: ``module:callable(arguments)``, or a library and its own name of a model."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ctdr_lightning.basics.errors import ConfigError, CTDRError, first_line, meant

_EXAMPLE = "torchvision:resnet18"


def build(name: str, what: str, example: str) -> Any:
    """Import and call a named callable.

    Args:
        name: Such as ``"torchvision.models:resnet18"``, or ``"my_project:net(depth=6)"``; arguments are literals.
        what: Its role, for errors: ``"model"``.
        example: A valid name, for errors.

    Raises:
        ConfigError: If it cannot be imported or its call fails; with Python's error.
    """
    module, _, call = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        attribute, args, kwargs = _called(call)
        maker = _LIBRARIES.get(module)
        if maker is not None:
            return maker(attribute, *args, **kwargs)
        return _found(import_module(module), attribute)(*args, **kwargs)
    except CTDRError:
        raise
    except Exception as error:  # somebody else's code: it may raise anything
        problem = f"{what} {name!r} cannot be built: {first_line(error)}."
        raise ConfigError(problem, _hint(error, f"module:callable, such as {example}.")) from error


def _hint(error: Exception, form: str) -> str:
    if "operator torchvision::" in str(error):
        return "This torchvision was built for another torch. Install that of the same release, from the same index."
    package = _missing(error)
    return f"Install {package}, or write {form}" if package else f"Write {form}"


def _called(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name of a callable and its arguments; ``"net"`` has none, ``"net(3, depth=6)"`` has two."""
    name, bracket, rest = call.partition("(")
    if not bracket:
        return name, [], {}
    try:
        node = ast.parse(f"call({rest}", mode="eval").body
        assert isinstance(node, ast.Call)
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return name, [ast.literal_eval(argument) for argument in node.args], keywords
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(
            f"The arguments in {call!r} cannot be read.", "Write numbers, strings, lists: net(depth=6, name='x')."
        ) from None


def _found(module: Any, attribute: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(module, attribute)
    except AttributeError as error:
        raise _unknown(f"{error}", attribute, dir(module)) from None
    return found


def _unknown(problem: str, name: str, names: Sequence[str]) -> ConfigError:
    """The error of a name that a module or library does not have; it names the nearest."""
    return ConfigError(f"{problem}.", meant(name, names).strip() or f"It has {len(names)} other names.")


def _torchvision(name: str, **options: Any) -> nn.Module:
    models = import_module("torchvision.models")
    if name not in models.list_models():
        raise _unknown(f"torchvision has no model {name!r}", name, models.list_models())
    return models.get_model(name, **{"weights": None, **options})


def _timm(name: str, **options: Any) -> nn.Module:
    timm = import_module("timm")
    if not timm.is_model(name):
        raise _unknown(f"timm has no model {name!r}", name, timm.list_models())
    return timm.create_model(name, **{"pretrained": False, **options})


def _transformers(config: str, **options: Any) -> nn.Module:
    """The architecture that a ``config.json`` names, with weights drawn anew."""
    transformers = import_module("transformers")
    values = {**json.loads(Path(config).read_text()), **options}
    architectures = values.get("architectures") or []
    if not architectures or "model_type" not in values:
        raise ValueError(f"{config} needs the keys 'model_type' and 'architectures'")
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return _found(transformers, architectures[0])(made)


_LIBRARIES: dict[str, Callable[..., nn.Module]] = {
    "torchvision": _torchvision, "timm": _timm, "transformers": _transformers
}  # fmt: skip


def _missing(error: Exception) -> str:
    """The package that is not installed; empty where it is another error, or only a part of a package is not there."""
    name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    return "" if "." in name else name


def build_model(name: str) -> nn.Module:
    """The model that a name says.

    Args:
        name: ``module:callable``, ``torchvision:NAME``, ``timm:NAME`` or ``transformers:CONFIG.json``, each with
            arguments in brackets where it takes some.

    Raises:
        ConfigError: If it cannot be built or is no module.
    """
    model = build(name, "model", _EXAMPLE)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {name!r} is a {type(model).__name__}, no nn.Module.", "Name a callable that builds the module."
        )
    return model
