"""The folder of the configs: beside an installed or a copied script, at the top of a checkout."""

from __future__ import annotations

from pathlib import Path


def configs_of(script: str | Path) -> Path:
    """The folder of Hydra configs that belongs to a script.

    Args:
        script: Its file.

    Example:
        >>> configs_of(__file__).name
        'conf'
    """
    parents = Path(script).resolve().parents
    places = [parents[0] / "conf", *(top / "conf" for top in parents[2:3])]
    return next((place for place in places if place.is_dir()), places[0])
