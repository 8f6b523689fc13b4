"""``ctdr recipes ls | cp | run``: training by config, from an installed package. Hydra is imported only for them."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.errors import ConfigError


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``ctdr recipes``."""
    parser.set_defaults(run=_list)  # without an action
    actions = parser.add_subparsers(metavar="action", parser_class=argparse.ArgumentParser)

    listed = actions.add_parser("ls", help="list them")
    listed.set_defaults(run=_list)

    copied = actions.add_parser("cp", help="copy one with its configs, to edit it")
    copied.add_argument("name", help="of the recipe")
    copied.add_argument("folder", nargs="?", help="where to; a folder of its name by default")
    copied.set_defaults(run=_copy)

    ran = actions.add_parser("run", help="run one: ctdr recipes run digits ctdr.rank=0.1")
    ran.add_argument("name", help="of the recipe")
    ran.add_argument("arguments", nargs=argparse.REMAINDER, help="overrides of its config, or the script's options")
    ran.set_defaults(run=_run)


def _catalogue() -> Any:
    try:
        return import_module("ctdr_recipes.catalogue")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The recipes need {error.name}, which is not installed.", "pip install 'ctdr-lightning[recipes]'"
        ) from error


def _list(options: argparse.Namespace) -> None:
    print(_catalogue().listing())


def _copy(options: argparse.Namespace) -> None:
    folder = Path(options.folder or options.name)
    written = _catalogue().copy(options.name, folder)
    start = f"python {written[0].name}" + (f" experiment={options.name}" if len(written) > 1 else "")
    print(f"{len(written)} files in {folder}. Run it there: {start}")


def _run(options: argparse.Namespace) -> None:
    _catalogue().run(options.name, options.arguments)
