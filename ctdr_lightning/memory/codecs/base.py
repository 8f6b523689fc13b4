"""The protocol of a codec, where codecs register, and how several are stacked.

A codec sees a flat tensor, the elements of a storage in their order, so that shape, strides and memory format are none
of its business. Stacked codecs are a tuple: the second writes the first one's payload smaller, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ctdr_lightning.basics.registry import Registry


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in fewer bytes.

    Attributes:
        payload: Input of the next codec of a stack; shape ``(n,)``.
        side: Further tensors that decoding needs.
        numbers: Plain numbers that decoding needs.
        plain: Whether the codec found its assumption broken and left the payload unchanged.
    """

    payload: Tensor
    side: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()
    plain: bool = False


class Codec(Protocol):
    """Writes a flat tensor in fewer bytes and back.

    Attributes:
        exact: Whether the backward is bit-identical: contents come back to the bit, or the lost part is never read.
        needs: The fact about a value that the codec relies on: ``"float"``, ``"bool"``, ``"two_valued"``, ``"index"``,
            ``"sign_only"`` or ``"zeros"``.
        payload_bits: Bits an element of the payload takes; 0 where its dtype is kept.
        side_bits: Further bits, for each element of the input.
        drops_zeros: Whether zeros are left out of the payload.
    """

    exact: bool
    needs: str
    payload_bits: float
    side_bits: float
    drops_zeros: bool

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Write a tensor in fewer bytes.

        Args:
            flat: Shape ``(n,)``, contiguous.
            row: How many neighbouring elements belong together: a channel's plane, or a token's features.

        Returns:
            The encoded tensor, with ``plain`` set if the contents are not as the codec expects.
        """
        ...

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Write it out again.

        Args:
            encoded: Result of ``encode``.
            like: An empty tensor of the decoded dtype, on the device.

        Returns:
            Shape ``(n,)``, of the dtype and length that was encoded.
        """
        ...


CODECS: Registry[Codec] = Registry("codec", group="ctdr_lightning.codecs")


@dataclass(frozen=True, slots=True)
class _Stage:
    """One codec's share of a stack; ``like`` tells the dtype that it decodes to."""

    name: str
    encoded: Encoded
    like: Tensor


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor after a tuple of codecs: the side tensors of each, and the last one's payload."""

    stages: tuple[_Stage, ...]

    def tensors(self) -> list[Tensor]:
        """Every tensor that must be held to decode, in a fixed order."""
        return [t for stage in self.stages for t in stage.encoded.side] + [self.stages[-1].encoded.payload]

    def without_tensors(self) -> Stack:
        """A copy without the tensors, which wait elsewhere."""
        return Stack(tuple(_Stage(s.name, _emptied(s.encoded), s.like) for s in self.stages))

    @property
    def n_bytes(self) -> int:
        """Bytes of those tensors."""
        return sum(t.nbytes for t in self.tensors())


def answers_at_once(tensor: Tensor) -> bool:
    """Whether a question about contents costs no more than the answer; a GPU has to run its whole queue before."""
    return tensor.device.type == "cpu"


def _emptied(encoded: Encoded) -> Encoded:
    side = tuple(t.new_empty(0) for t in encoded.side)
    return Encoded(encoded.payload.new_empty(0), side, encoded.numbers, encoded.plain)


def encode(flat: Tensor, codecs: Sequence[str], row: int = 256) -> Stack:
    """Apply codecs in their order.

    Args:
        flat: Shape ``(n,)``, contiguous.
        codecs: Names of registered codecs; at least one.
        row: How many neighbouring elements belong together.

    Raises:
        ConfigError: If a name is not known.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.0, 2.0, 0.0, 2.0]).repeat(64)
        >>> stack = encode(x, ["mask"])
        >>> stack.n_bytes, torch.equal(decode(stack), x)
        (32, True)
    """
    stages: list[_Stage] = []
    for name in codecs:
        encoded = CODECS[name].encode(flat, row)
        stages.append(_Stage(name, encoded, flat.new_empty(0)))
        flat = encoded.payload
    # Only the last payload is held: each other payload was the next codec's input.
    *inner, last = stages
    freed = [_Stage(s.name, Encoded(s.like, s.encoded.side, s.encoded.numbers, s.encoded.plain), s.like) for s in inner]
    return Stack((*freed, last))


def decode(stack: Stack, tensors: Sequence[Tensor] | None = None) -> Tensor:
    """Undo ``encode``.

    Args:
        stack: Result of ``encode``.
        tensors: The stack's tensors, if they were elsewhere meanwhile and came back.

    Returns:
        Shape ``(n,)``, of the dtype that was encoded.
    """
    came = list(stack.tensors() if tensors is None else tensors)
    payload = came.pop()
    for stage in reversed(stack.stages):
        n_side = len(stage.encoded.side)
        side = tuple(came[len(came) - n_side :])
        del came[len(came) - n_side :]
        if not stage.encoded.plain:
            payload = CODECS[stage.name].decode(Encoded(payload, side, stage.encoded.numbers), stage.like)
    return payload
