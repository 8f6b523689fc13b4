"""The machine around the device: links to places where tensors can wait, and the costs of codecs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Link:
    """The way from the device to a place and back.

    Attributes:
        to: Name of the holder at its other end, such as ``"host"`` or ``"disk"``.
        out_bytes_per_s: Rate away from the device.
        in_bytes_per_s: Rate back.
        latency_s: Fixed time of each transfer.
        shared: Whether both directions share one rate, so that only one runs at a time.
        granule: Bytes are moved in multiples of this.
        device_bytes: Bytes of the device's memory that the link takes all along: staging buffers.
        busy_s_per_byte: Time of the step's own computing that each byte costs, either way: where a processor's thread
            moves it, that shares cores and memory with the step.

    Example:
        >>> Link("disk", out_bytes_per_s=1e9, in_bytes_per_s=2e9).seconds(10**9)
        (1.0, 0.5)
    """

    to: str
    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False
    granule: int = 1
    device_bytes: int = 0
    busy_s_per_byte: float = 0.0

    def seconds(self, n_bytes: int) -> tuple[float, float]:
        """Time of one transfer, out and back."""
        moved = -(-n_bytes // self.granule) * self.granule
        return self.latency_s + moved / self.out_bytes_per_s, self.latency_s + moved / self.in_bytes_per_s


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Cost model of a codec; ``memory.codecs`` implements it.

    Attributes:
        name: Its registered name.
        exact: Whether gradients are bit-identical under it.
        needs: The fact about a value that it relies on.
        payload_bits: Bits of an element afterwards; 0 where the dtype is kept.
        side_bits: Further bits for each element.
        drops_zeros: Whether zeros are left out of the payload.
        encode_s_per_byte: Time to encode, by the input's bytes.
        decode_s_per_byte: Time to decode, by the output's bytes.
        encode_temp_share: Bytes that encoding takes meanwhile, as a share of the input's.
        decode_temp_share: Bytes that decoding takes meanwhile, as a share of the output's.
        encode_call_s: Fixed time of one encoding, independent of the size.
        decode_call_s: The same of decoding.
        encode_temp_bytes: Fixed bytes that encoding takes meanwhile, independent of the size.
        decode_temp_bytes: The same of decoding.
        only_faster: Whether it may only make steps faster, never make a budget fit, because the user did not ask for
            it.
        encode_s_per_mixed_byte: Further time to encode, by the input's bytes times z (1 - z) for a share z of zeros: a
            processor guesses where a zero comes next, and is wrong the more often the more evenly both are mixed.
        decode_s_per_mixed_byte: The same of decoding.
    """

    name: str
    exact: bool
    needs: str
    payload_bits: float
    side_bits: float = 0.0
    drops_zeros: bool = False
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    encode_temp_share: float = 1.0
    decode_temp_share: float = 1.0
    encode_call_s: float = 0.0
    decode_call_s: float = 0.0
    encode_temp_bytes: float = 0.0
    decode_temp_bytes: float = 0.0
    only_faster: bool = False
    encode_s_per_mixed_byte: float = 0.0
    decode_s_per_mixed_byte: float = 0.0

    def encode_seconds(self, n_bytes: int, zeros: float = 0.0) -> float:
        """Time to encode so many bytes, of which a share are zeros."""
        per_byte = self.encode_s_per_byte + zeros * (1 - zeros) * self.encode_s_per_mixed_byte
        return self.encode_call_s + n_bytes * per_byte

    def decode_seconds(self, n_bytes: int, zeros: float = 0.0) -> float:
        """Time to decode so many bytes, of which a share are zeros."""
        per_byte = self.decode_s_per_byte + zeros * (1 - zeros) * self.decode_s_per_mixed_byte
        return self.decode_call_s + n_bytes * per_byte

    def encode_temporaries(self, n_bytes: float) -> int:
        """Bytes that encoding so many bytes takes meanwhile."""
        return ceil(self.encode_temp_bytes + n_bytes * self.encode_temp_share)

    def decode_temporaries(self, n_bytes: float) -> int:
        """Bytes that decoding so many bytes takes meanwhile."""
        return ceil(self.decode_temp_bytes + n_bytes * self.decode_temp_share)
