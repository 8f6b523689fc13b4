"""What a machine's links and codecs cost, measured on it: data for planning.

A measurement is short (tenths of a second) and taken once a machine and process; the best of a few runs counts, as
whatever else runs can only slow one down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import allocations_of, no_dispatch_modes
from ctdr_lightning.memory.codecs import CODECS, Codec, decode, encode
from ctdr_lightning.memory.holders.base import Holder, HolderOptions, Holders
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.values.live_bytes import PeakMeter

# The least of three: the first also warms up, a second may be disturbed.
_RUNS = 3
_SAMPLE_BYTES = 2**22
_TRANSFER_BYTES = 2**24
_GRANULES = {"disk": 4096, "host": 512}


def measure_links(names: Iterable[str], options: HolderOptions | None = None) -> list[Link]:
    """Measure the rates to holders and back.

    Args:
        names: Names of registered holders.
        options: How they are made: the disk's folder, the device.

    Raises:
        ConfigError: When a name is not known, or the folder cannot be used.
        OffloadError: When 16 MiB cannot be written there.
    """
    holders = Holders(options)
    try:
        with no_dispatch_modes():  # fake tensors take no time
            return [_link(name, holders[name], holders.options) for name in names]
    finally:
        holders.close()


def _link(name: str, holder: Holder, options: HolderOptions) -> Link:
    source = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=options.device)
    out_s = in_s = float("inf")
    for _ in range(_RUNS):
        begin_s = _now(options.device)
        parcel = holder.put([source])
        parcel.gone()
        middle_s = _now(options.device)
        parcel.fetch()
        end_s = _now(options.device)
        out_s, in_s = min(out_s, middle_s - begin_s), min(in_s, end_s - middle_s)
    return Link(
        name, _TRANSFER_BYTES / out_s, _TRANSFER_BYTES / in_s, granule=_GRANULES.get(name, 1),
        device_bytes=holder.device_bytes,
    )  # fmt: skip


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_codecs(names: Iterable[str] | None = None, device: str = "cpu") -> list[CodecCost]:
    """Measure what codecs cost on a device, on a sample of 4 MiB.

    Args:
        names: Names of registered codecs; None takes all that are exact.
        device: Type of the device.

    Raises:
        ConfigError: When a name is not known.
    """
    chosen = [name for name in CODECS if CODECS[name].exact] if names is None else list(names)
    return [_codec_cost(name, device) for name in chosen]


@cache
def _codec_cost(name: str, device: str) -> CodecCost:
    with no_dispatch_modes():  # fake tensors take no time
        return _measured_cost(name, device)


def _measured_cost(name: str, device: str) -> CodecCost:
    codec = CODECS[name]
    flat = _sample(codec, device)
    encode_s = decode_s = float("inf")
    for _ in range(_RUNS):
        begin_s = _now(device)
        stack = encode(flat, (name,))
        middle_s = _now(device)
        decode(stack)
        end_s = _now(device)
        encode_s, decode_s = min(encode_s, middle_s - begin_s), min(decode_s, end_s - middle_s)
    return CodecCost(
        name, codec.exact, codec.needs, codec.payload_bits, codec.side_bits, codec.drops_zeros,
        encode_s / flat.nbytes, decode_s / flat.nbytes, *_temp_shares(name, flat),
    )  # fmt: skip


def _temp_shares(name: str, flat: Tensor) -> Sequence[float]:
    """Bytes that encoding and decoding take besides what they read and make, as shares of the dense bytes."""
    stack = encode(flat, (name,))
    encoding = _peak_bytes(lambda: encode(flat, (name,)), (flat,)) - stack.n_bytes
    decoding = _peak_bytes(lambda: decode(stack), stack.tensors()) - flat.nbytes
    return max(encoding, 0) / flat.nbytes, max(decoding, 0) / flat.nbytes


def _peak_bytes(run: Callable[[], object], reads: Sequence[Tensor]) -> int:
    """Most bytes live while something runs, above what it reads; a processor's kernels take some by themselves."""
    if reads[0].device.type == "cpu":
        return max(accumulate(allocations_of(run), initial=0))
    with PeakMeter() as meter:
        meter.live.ignore(reads)
        run()
    return meter.live.peak


def _sample(codec: Codec, device: str) -> Tensor:
    """Contents of the kind that a codec is for; half of them zeros where that matters."""
    generator = torch.Generator(device).manual_seed(0)
    n = _SAMPLE_BYTES // 4
    dense = torch.randn(n, generator=generator, device=device)
    if codec.needs == "bool":
        return dense.repeat(4) > 0
    if codec.needs == "index":
        return torch.arange(n // 2, device=device) % 4096
    if codec.needs == "two_valued":
        return (dense > 0) * torch.tensor(1.25, device=device)
    return dense.relu() if codec.needs in ("zeros", "sign_only") else dense
