"""Costs of a machine's links and codecs, measured on it: data for planning.

A measurement is short (tenths of a second) and taken once a machine and process; the best of a few runs counts, because
other load can only slow one down. For a codec's calls the median counts, each made as by the tape, with caches full of
other data, as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from math import ceil
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from ctdr_lightning.basics.host_memory import allocations_of
from ctdr_lightning.basics.thread_clock import now_s
from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory.codecs import CODECS, Codec, decode, encode
from ctdr_lightning.memory.holders.away import AwayTensor
from ctdr_lightning.memory.holders.base import Holder, HolderOptions, Holders
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.memory.values.replay import materialize
from ctdr_lightning.memory.values.value import Value

# The least of three: the first also warms up, a second may be disturbed.
_RUNS = 3
# Six measurements of a disk with five runs gave 0.04 to 0.1 ns a byte, the first of the process 0.2. Other numbers were
# not tried.
_BUSY_RUNS = 5
# Calls of a codec. In steps of ViT, T5, BERT, GoogLeNet and GPT-2 a call of a few dozen KiB took 0.1 to 0.2 ms, ten
# times the time by the rate of 4 MiB: both sizes are measured. 1 MiB is done before another process gets the core.
_CALLS = 9
_SAMPLE_BYTES, _SMALL_BYTES = 2**20, 2**14
# Fitted on these shares of zeros, zvc's times on other shares and on 64 KiB to 4 MiB were wrong by 8 % (encoding) and
# 9 % (decoding) in the median. A line through half zeros was wrong by 36 and 37 %.
_ZEROS = (0.1, 0.3, 0.5, 0.7, 0.9)
_LEAST_S = 1e-9  # no clock sees less
_TRANSFER_BYTES, _OTHER_BYTES = 2**24, 2**22
# The time of the smallest transfer is its latency: calls, events, a turn of a thread.
_LEAST_BYTES = 4096
T = TypeVar("T")
_GRANULES = {"disk": 4096, "host": 512}


def measure_links(names: Iterable[str], options: HolderOptions | None = None) -> list[Link]:
    """Measure the rates to holders and back.

    Args:
        names: Names of registered holders.
        options: How they are made: the disk's folder, the device.

    Raises:
        ConfigError: If a name is not known, or the folder cannot be used.
        OffloadError: If 16 MiB cannot be written there.
    """
    holders = Holders(options)
    try:
        with no_dispatch_modes():  # fake tensors take no time
            return [_link(name, holders[name], holders.options) for name in names]
    finally:
        holders.close()


def _link(name: str, holder: Holder, options: HolderOptions) -> Link:
    source = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=options.device)
    few = source[:_LEAST_BYTES].clone()
    (out_s, in_s), (few_out_s, few_in_s) = (_both_ways_s(holder, moved, options.device) for moved in (source, few))
    out_call_s, out_byte_s = _line(source.nbytes, out_s, few.nbytes, few_out_s)
    in_call_s, in_byte_s = _line(source.nbytes, in_s, few.nbytes, few_in_s)
    return Link(
        name, 1 / out_byte_s, 1 / in_byte_s, latency_s=max(out_call_s, in_call_s), granule=_GRANULES.get(name, 1),
        device_bytes=holder.device_bytes,
        busy_s_per_byte=_busy_s_per_byte(holder, source, out_s + in_s) if options.device == "cpu" else 0.0,
    )  # fmt: skip


def _both_ways_s(holder: Holder, moved: Tensor, device: str) -> tuple[float, float]:
    """Seconds of sending a tensor out and of bringing it back, the best of some runs."""
    out_s = in_s = float("inf")
    for _ in range(_RUNS):
        begin_s = _now(device)
        parcel = holder.put([moved])
        parcel.gone()
        middle_s = _now(device)
        parcel.fetch()
        end_s = _now(device)
        out_s, in_s = min(out_s, middle_s - begin_s), min(in_s, end_s - middle_s)
    return out_s, in_s


def _busy_s_per_byte(holder: Holder, source: Tensor, both_ways_s: float) -> float:
    """Seconds by which computing is slower for each byte that moves meanwhile.

    On two threads of one core a step of 1.6 s that sent 128 MiB to a disk computed 7 % longer, with no wait at all.
    """
    compute = _Computing(both_ways_s)
    alone_s = beside_s = float("inf")
    for _ in range(_BUSY_RUNS):
        alone_s = min(alone_s, 2 * compute.seconds())
        parcel = holder.put([source])
        out_s = compute.seconds()
        parcel.gone()
        parcel.start()
        beside_s = min(beside_s, out_s + compute.seconds())
        parcel.fetch()
    return max(beside_s - alone_s, 0.0) / (2 * source.nbytes)


class _Computing:
    """Some computing of the kind that a step has: half of it in the core's caches, half through the memory.

    Args:
        at_least_s: How long it takes by itself; at least so long, so that a transfer is over meanwhile.
    """

    def __init__(self, at_least_s: float) -> None:
        self._matrix = torch.ones(256, 256)
        self._product = torch.empty_like(self._matrix)
        self._large = torch.zeros(_OTHER_BYTES, dtype=torch.uint8)
        self._n_rounds = 1
        self._n_rounds = ceil(at_least_s / min(self.seconds() for _ in range(_RUNS)))

    def seconds(self) -> float:
        """Compute; returns how long it took."""
        begin_s = time.perf_counter()
        for _ in range(self._n_rounds):
            torch.mm(self._matrix, self._matrix, out=self._product)
            self._large.add_(1)
        return time.perf_counter() - begin_s


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _computed(device: str) -> float:
    """Seconds of computing, by the clock that the ops of a trace are timed with."""
    return now_s() if device == "cpu" else _now(device)


def measure_codecs(names: Iterable[str] | None = None, device: str = "cpu") -> list[CodecCost]:
    """Measure the costs of codecs on a device, on samples of 1 MiB and 16 KiB.

    Args:
        names: Names of registered codecs; None takes all that are exact.
        device: Type of the device.

    Raises:
        ConfigError: If a name is not known.
    """
    chosen = [name for name in CODECS if CODECS[name].exact] if names is None else list(names)
    return [_codec_cost(name, device) for name in chosen]


@cache
def _codec_cost(name: str, device: str) -> CodecCost:
    with no_dispatch_modes():  # fake tensors take no time
        cost = _measured_cost(name, device)
        return _by_zeros(cost, device) if cost.drops_zeros else cost


def _measured_cost(name: str, device: str) -> CodecCost:
    codec = CODECS[name]
    flat = _sample(codec, device)
    small = flat[: _SMALL_BYTES // flat.itemsize].clone()  # a tensor is put away with all of its storage
    calls = zip(*(_call_seconds(name, device, [flat, small]) for _ in range(_CALLS)), strict=True)
    encode_s, small_encode_s, decode_s, small_decode_s = map(median, calls)
    encode_call_s, encode_rate = _line(flat.nbytes, encode_s, small.nbytes, small_encode_s)
    decode_call_s, decode_rate = _line(flat.nbytes, decode_s, small.nbytes, small_decode_s)
    temporaries = zip(_temporaries(name, flat), _temporaries(name, small), strict=True)
    (encode_bytes, encode_share), (decode_bytes, decode_share) = (
        _line(flat.nbytes, many, small.nbytes, few) for many, few in temporaries
    )
    return CodecCost(
        name, codec.exact, codec.needs, codec.payload_bits, codec.side_bits, codec.drops_zeros,
        encode_rate, decode_rate, encode_share, decode_share, encode_call_s, decode_call_s, encode_bytes, decode_bytes,
    )  # fmt: skip


def _by_zeros(cost: CodecCost, device: str) -> CodecCost:
    """The same cost, with times fitted on several shares of zeros."""
    points = [(n_bytes, share) for share in _ZEROS for n_bytes in (_SAMPLE_BYTES, _SMALL_BYTES)]
    flats = [_sample(CODECS[cost.name], device, share)[: n_bytes // 4].clone() for n_bytes, share in points]
    calls = zip(*(_call_seconds(cost.name, device, flats) for _ in range(_CALLS)), strict=True)
    seconds = [median(of_one) for of_one in calls]
    encode_call_s, encode_rate, encode_mixed = fitted(points, seconds[: len(points)])
    decode_call_s, decode_rate, decode_mixed = fitted(points, seconds[len(points) :])
    if min(encode_rate + encode_mixed, decode_rate + decode_mixed) * _SAMPLE_BYTES < _LEAST_S:
        return cost  # calls take so long that no byte was seen to
    return replace(
        cost, encode_call_s=encode_call_s, encode_s_per_byte=encode_rate, encode_s_per_mixed_byte=encode_mixed,
        decode_call_s=decode_call_s, decode_s_per_byte=decode_rate, decode_s_per_mixed_byte=decode_mixed,
    )  # fmt: skip


def fitted(points: Sequence[tuple[int, float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """A codec's time as a call's, a byte's and a mixed byte's, by non-negative least squares of relative errors.

    Args:
        points: Bytes of each sample and its share of zeros.
        seconds: The time that each took.
    """
    n_bytes, zeros = np.array(points).T
    columns = np.stack([np.ones_like(n_bytes), n_bytes, n_bytes * zeros * (1 - zeros)], axis=1)
    found = nnls(columns / np.array(seconds)[:, None], np.ones(len(points)))[0].tolist()
    return found[0], found[1], found[2]


def _call_seconds(name: str, device: str, samples: Sequence[Tensor]) -> list[float]:
    """Seconds of putting each sample away, then of bringing each back, as the tape does both.

    The tape's work around the codec, in each direction, took 0.1 to 0.15 ms a value in steps of ViT, T5, BERT and
    GoogLeNet: half as long again as the codec on small values. Caches are full of other data, as in a step.
    """
    other = torch.zeros(_OTHER_BYTES, dtype=torch.uint8, device=device)

    def timed(run: Callable[[], T]) -> tuple[float, T]:
        other.add_(1)
        begin_s = _computed(device)
        made = run()
        return _computed(device) - begin_s, made

    away = [timed(partial(_put_away, flat, name)) for flat in samples]
    back = [timed(partial(materialize, value)) for _, value in away]
    return [seconds for seconds, _ in (*away, *back)]


def _put_away(flat: Tensor, name: str) -> Value:
    """A value that waits here in fewer bytes."""
    value = Value()
    value.away = AwayTensor(flat, (name,), None)
    return value


def _line(many: int, of_many: float, few: int, of_few: float) -> tuple[float, float]:
    """A call's cost whatever its size, and its cost a byte, from a large and a small sample's bytes and costs."""
    per_byte = max(of_many - of_few, 0.0) / (many - few) or of_many / many
    return max(of_few - per_byte * few, 0.0), per_byte


def _temporaries(name: str, flat: Tensor) -> tuple[int, int]:
    """Bytes that encoding and decoding take in addition to their inputs and outputs."""
    stack = encode(flat, (name,))
    encoding = _peak_bytes(lambda: encode(flat, (name,)), (flat,)) - stack.n_bytes
    decoding = _peak_bytes(lambda: decode(stack), stack.tensors()) - flat.nbytes
    return max(encoding, 0), max(decoding, 0)


def _peak_bytes(run: Callable[[], object], reads: Sequence[Tensor]) -> int:
    """Most bytes live while a function runs, above its inputs; a processor's kernels take some by themselves."""
    if reads[0].device.type == "cpu":
        return max(accumulate(allocations_of(run), initial=0))
    with PeakMeter() as meter:
        meter.live.ignore(reads)
        run()
    return meter.live.peak


def _sample(codec: Codec, device: str, zeros: float = 0.5) -> Tensor:
    """Contents of the kind that a codec is for, with a share of zeros where that matters."""
    generator = torch.Generator(device).manual_seed(0)
    n = _SAMPLE_BYTES // 4
    dense = torch.randn(n, generator=generator, device=device)
    if codec.needs == "bool":
        return dense.repeat(4) > 0
    if codec.needs == "index":
        return torch.arange(n // 2, device=device) % 4096
    if codec.needs == "two_valued":
        return (dense > 0) * torch.tensor(1.25, device=device)
    quantile = torch.special.ndtri(torch.tensor(zeros, device=device))
    return (dense - quantile).relu() if codec.needs in ("zeros", "sign_only") else dense
