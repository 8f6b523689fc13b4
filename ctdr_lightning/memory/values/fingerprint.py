"""Fingerprints of contents: equal contents give equal numbers, other contents give another number.

A fingerprint is a sum of 64-bit words with weights that repeat every ``COLUMNS`` words. A change of one word always
shows. An exchange of words shows unless they lie a multiple of ``COLUMNS`` apart: a prime, so that neither samples nor
channels do. Cost: one read of the contents, 20 to 30 GB/s on one thread of a processor; two passes of small kernels on
a GPU, where the number stays on the device until :func:`differing` compares many at once.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import no_dispatch_modes

COLUMNS = 1021
Fingerprint = int | Tensor
_PLAIN = (Tensor, torch.nn.Parameter)
# Below this size zlib's checksum takes less than numpy's five calls; measured: 4 us against 9 at 4 KiB.
_SMALL_BYTES = 2**14
_SIGNS_AT_ONCE = 2**16  # elements; their comparison allocates 64 KiB meanwhile


def has_contents(tensor: Tensor) -> bool:
    """Whether the tensor is one of torch's own with memory behind it: no subclass, fake, meta or sparse tensor."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    return plain and not tensor._is_zerotensor()


def of_storage(storage: torch.UntypedStorage) -> Fingerprint:
    """The fingerprint of all bytes of a storage, which is a processor's or a GPU's."""
    return _of_bytes(storage, 0, storage.nbytes())


def of_tensor(tensor: Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor's elements in the order of its memory; None for one without contents.

    Elements that are not dense in memory are copied first.
    """
    if not has_contents(tensor):
        return None
    if not tensor.is_contiguous():
        tensor = _dense(tensor)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return _of_bytes(tensor.untyped_storage(), start, tensor.nbytes)


def of_signs(tensor: Tensor) -> Fingerprint | None:
    """The fingerprint of which elements are positive, in the order of memory; None for a tensor without contents."""
    if not has_contents(tensor):
        return None
    with no_dispatch_modes(), torch.no_grad():
        flat = _dense(tensor.detach())
        flat = flat.as_strided((flat.numel(),), (1,))
        found = [of_tensor(part > 0) for part in flat.split(_SIGNS_AT_ONCE)]
        return sum(number * (2 * place + 1) for place, number in enumerate(found) if number is not None)


def differing(pairs: Sequence[tuple[Fingerprint, Fingerprint]]) -> list[int]:
    """Places of the pairs whose fingerprints are not the same; one synchronisation for all that are on a GPU."""
    found = [i for i, (a, b) in enumerate(pairs) if isinstance(a, int) and a != b]
    there = [i for i, (a, _) in enumerate(pairs) if isinstance(a, Tensor)]
    if there:
        with no_dispatch_modes(), torch.no_grad():
            same = torch.stack([torch.eq(torch.as_tensor(pairs[i][0]), pairs[i][1]) for i in there]).tolist()
        found += [i for i, equal in zip(there, same, strict=True) if not equal]
    return sorted(found)


def _dense(tensor: Tensor) -> Tensor:
    """The same elements without repetitions and gaps: a copy where there are gaps."""
    with no_dispatch_modes(), torch.no_grad():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -tensor.shape[dim]))
        return tensor.permute(order).contiguous()


def _of_bytes(storage: torch.UntypedStorage, start: int, n_bytes: int) -> Fingerprint:
    if storage.device.type == "cpu":
        return _on_processor(storage.data_ptr() + start, n_bytes)
    with no_dispatch_modes(), torch.no_grad():
        return _on_gpu(storage, start, n_bytes)


def _on_processor(address: int, n_bytes: int) -> int:
    if not n_bytes:
        return 0
    memory = (ctypes.c_ubyte * n_bytes).from_address(address)
    if n_bytes < _SMALL_BYTES:
        return zlib.crc32(memory)
    words: np.ndarray = np.frombuffer(memoryview(memory), np.int64, n_bytes // 8)
    whole = words.size // COLUMNS * COLUMNS
    weights, rest = _weights(), words[whole:]
    columns = words[:whole].reshape(-1, COLUMNS).sum(0)
    tail = zlib.crc32(bytes(memory[n_bytes - n_bytes % 8 :]))
    return int((columns * weights).sum()) + int((rest * weights[: rest.size]).sum()) + tail


def _on_gpu(storage: torch.UntypedStorage, start: int, n_bytes: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (n_bytes,), (1,))
    if start % 8:  # words would lie across the elements' bounds otherwise than in a tensor that begins its storage
        flat = flat.clone()
    words, tail = flat[: n_bytes - n_bytes % 8].view(torch.int64), flat[n_bytes - n_bytes % 8 :]
    whole = words.numel() // COLUMNS * COLUMNS
    weights, rest = _weights_on(storage.device), words[whole:]
    found = (rest * weights[: rest.numel()]).sum() + (tail.long() * weights[: tail.numel()]).sum()
    return found + (words[:whole].view(-1, COLUMNS).sum(0) * weights).sum() if whole else found


@cache
def _weights() -> np.ndarray:
    return np.random.default_rng(2024).integers(-(2**62), 2**62, COLUMNS) | 1  # odd: no word's change is lost


@cache
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_weights()).to(device)
