"""Storages of gathered weights: FSDP fills them before a unit runs, and empties them after it, which no op does."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.values.op_traits import overwritten, traits
from ctdr_lightning.memory.values.tensors import storage_of, tensors_in

_COPY_OUT = "fsdp.split_with_sizes_copy.default"
_CAT_OUT = torch.ops.aten.cat.out


class GatheredStorages:
    """The storages that a gather has filled and that are not empty yet.

    FSDP2 keeps one storage per weight. Between two uses of its unit the storage is resized to 0 bytes.
    """

    def __init__(self) -> None:
        self._full: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def filled(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, torch.UntypedStorage]:
        """The storages that a call has filled, by identity: none, where it is no gather."""
        if not self._gathers(func, args):
            return {}
        storages = (storage_of(tensor) for tensor in overwritten(func, args, kwargs))
        found = {storage._cdata: storage for storage in storages if storage is not None}
        self._full |= {key: weakref.ref(storage) for key, storage in found.items()}
        return found

    def _gathers(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        if func is not _CAT_OUT or not self._full:
            return traits(func).name == _COPY_OUT
        # Shards of another dimension than the first are gathered into one temporary for each weight, and put together
        # from its parts by a plain `cat`.
        sources = [storage_of(tensor) for tensor in tensors_in(args)]
        whole = sources[0] if sources else None
        known = self._full.get(whole._cdata) if whole is not None else None
        return known is not None and known() is whole and all(source is whole for source in sources)

    def emptied(self) -> list[int]:
        """Identities of the storages that were emptied since the last call."""
        if not self._full:
            return []
        seen = [(key, ref()) for key, ref in self._full.items()]
        found = [key for key, storage in seen if storage is not None and not storage.nbytes()]
        for key in (*found, *(key for key, storage in seen if storage is None)):
            del self._full[key]
        return found
