"""The settings of CUDA's allocator, in the words of the two variables that PyTorch's documentation names."""

from __future__ import annotations

import os
import sys

EXPANDABLE = "expandable_segments"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# On Windows PyTorch warns of the setting and ignores it.
_DEFAULT = "false" if sys.platform == "win32" else "true"


def allocator_settings() -> dict[str, str]:
    """The settings that the environment names, in lower case."""
    text = ",".join(os.environ.get(name, "") for name in _VARIABLES)
    pairs = (part.partition(":") for part in text.replace(" ", "").lower().split(","))
    return {name: value for name, _, value in pairs if name}


def expandable_segments() -> bool:
    """Whether segments are expandable: a budget on a GPU asks for that, unless the environment says otherwise."""
    found = allocator_settings()
    return found.get("backend", "native") == "native" and found.get(EXPANDABLE, _DEFAULT) == "true"


def add_setting(name: str, value: str) -> str:
    """Name a further setting in the environment, for this process and those that it starts.

    Args:
        name: The setting.
        value: Its value.

    Returns:
        All settings, as PyTorch reads them.
    """
    variable = _VARIABLES[0] if os.environ.get(_VARIABLES[0]) else _VARIABLES[1]  # the second is read by every release
    before = os.environ.get(variable, "")
    os.environ[variable] = f"{before},{name}:{value}" if before else f"{name}:{value}"
    return os.environ[variable]
