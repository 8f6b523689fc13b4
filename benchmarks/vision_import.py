"""torchvision beside a torch that its compiled half was not built for."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch


def import_torchvision() -> Any:
    """Import torchvision, also where its compiled ops are missing: their schemas are then declared first."""
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("These benchmarks need torchvision: pip install torchvision")
    try:
        import torchvision
    except RuntimeError:
        source = (Path(found.submodule_search_locations[0]) / "_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "DEF")
        for name in sorted(set(re.findall(r"register_meta\(\"(\w+)\"\)|torchvision::(\w+)", source))):
            library.define(f"{''.join(name)}() -> ()")
        globals()["_library"] = library  # the declarations live as long as the library object
        import torchvision
    return torchvision
