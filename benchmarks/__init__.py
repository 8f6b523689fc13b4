"""Programs that print how we compare with peers measured in the same run."""

from contextlib import suppress

from benchmarks.vision_import import import_torchvision

# First of all: Lightning's metrics import it where it is installed, and fail where its ops are not declared.
with suppress(ModuleNotFoundError):
    import_torchvision()
