"""Ways to write a tensor in fewer bytes: one file and one registration each."""

from ctdr_lightning.memory.codecs import bf16, bits, fp8, int4, int8, mask, short, sign, zvc
from ctdr_lightning.memory.codecs.base import CODECS, Codec, Encoded, Stack, decode, encode

__all__ = [
    "CODECS", "Codec", "Encoded", "Stack", "bf16", "bits", "decode", "encode", "fp8", "int4", "int8", "mask", "short",
    "sign", "zvc",
]  # fmt: skip
