"""Places off the device where a tensor waits: host memory, a disk. One file and one registration each."""

from ctdr_lightning.memory.holders import disk, host
from ctdr_lightning.memory.holders.base import HOLDERS, Holder, HolderOptions, Holders, Parcel

__all__ = ["HOLDERS", "Holder", "HolderOptions", "Holders", "Parcel", "disk", "host"]
