"""The recipes there are: listed, copied and run by name. ``ctdr recipes`` is a thin word for these three functions."""

from __future__ import annotations

import ast
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.registry import Registry
from ctdr_recipes.building import missing
from ctdr_recipes.folders import configs_of

HERE = Path(__file__).parent
CONFIGS = configs_of(__file__)
SCRIPTS = ("demo", "evaluate", "pareto")


@dataclass(frozen=True)
class Recipe:
    """Something to run.

    Attributes:
        name: What it is called by.
        what: A sentence.
        path: An experiment's config, or a script.
    """

    name: str
    what: str
    path: Path

    @property
    def trains(self) -> bool:
        """Whether it is a config that ``train.py`` runs; a script elsewhere."""
        return self.path.suffix == ".yaml"


def recipes() -> Registry[Recipe]:
    """Every recipe by name.

    Example:
        >>> "digits" in recipes()
        True
    """
    found: Registry[Recipe] = Registry("recipe")
    for path in sorted((CONFIGS / "experiment").glob("*.yaml")):
        found.register(path.stem)(Recipe(path.stem, _comment(path), path))
    for name in SCRIPTS:
        path = HERE / f"{name}.py"
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        found.register(name)(Recipe(name, said, path))
    return found


def listing() -> str:
    """One line a recipe."""
    known = recipes()
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {known[name].what}" for name in known)


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a recipe to edit it: the script, and for an experiment all configs, which it is composed of.

    Args:
        name: Of the recipe.
        folder: Where to; made where it is not there.

    Returns:
        The files written.

    Raises:
        ConfigError: When the name is not known, or a file is there already; nothing is written then.
    """
    recipe = recipes()[name]
    script = HERE / "train.py" if recipe.trains else recipe.path
    sources = [script, *(sorted(CONFIGS.rglob("*.yaml")) if recipe.trains else [])]
    targets = [folder / source.relative_to(CONFIGS.parent if source != script else HERE) for source in sources]
    there = [target for target in targets if target.exists()]
    if there:
        raise ConfigError(f"{there[0]} is there already.", "Give another folder: nothing is overwritten.")
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return targets


def run(name: str, arguments: Sequence[str]) -> None:
    """Run a recipe in this process.

    Args:
        name: Of the recipe.
        arguments: Hydra's overrides and options for an experiment, such as ``["ctdr.rank=0.25", "--multirun"]``; the
            script's own elsewhere.

    Raises:
        ConfigError: When the name is not known, an override is misspelt, or a package is missing.
    """
    recipe = recipes()[name]
    try:
        if recipe.trains:
            # Hydra's parser takes overrides in one row only: no option may come between two of them.
            overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
            options = [word for word in arguments if word not in overrides]
            from ctdr_recipes import train

            with _command_line([*options, f"experiment={name}", *overrides]), _as_main(train):
                train.command()
        else:
            with _command_line(arguments):
                runpy.run_module(f"ctdr_recipes.{name}", run_name="__main__")
    except ModuleNotFoundError as error:
        raise missing(error) from error


def _comment(path: Path) -> str:
    """The last line of the comment at the head of a config: a sentence on it."""
    lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return next(line for line in reversed(lines) if line and not line.startswith(("@", "python", "ctdr")))


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["ctdr recipes run", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _as_main(module: ModuleType) -> Iterator[None]:
    """Have Lightning start the other processes of a run as ``python -m MODULE``: of `__main__` it takes that name."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before
