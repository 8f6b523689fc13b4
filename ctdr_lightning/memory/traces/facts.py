"""Facts about values that follow from op, dtype, shape and readers, on which a codec may rely.

A fact about readers holds where every save of the value was asked for by autograd nodes that are known, and by nobody
else. Contents are never relied on: a mask is two-valued because dropout made it, an index is short because its plane is
small. Of contents only the share of zeros is used, to predict the size after a codec that may also leave the value
unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ctdr_lightning.memory.traces.op_kinds import base_name
from ctdr_lightning.memory.traces.trace import CAME_BACK_OTHERWISE, WRITTEN_UNSEEN, OpRecord, Save, Trace

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "int8": 1,
    "uint8": 1,
}  # fmt: skip
_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_SHORT = 2**15
_POOLS = ("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
_RELU = ("relu", "relu_", "threshold", "threshold_", "hardtanh", "hardtanh_")
_ONLY_RELU = ("relu", "relu_")
_OF_RELU, _OF_POOLS = (tuple(f"aten.{name}." for name in names) for names in (_RELU, _POOLS))
# These read their second tensor by its sign, or by its shape alone.
_SIGN_READERS = {
    "threshold_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "avg_pool2d_backward", "_adaptive_avg_pool2d_backward",
}  # fmt: skip
# The autograd nodes that read a saved ReLU output so: each calls one of the ops above, once, and nothing else.
SIGN_NODES = frozenset({
    "ReluBackward0", "ThresholdBackward0", "MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0",
    "AvgPool2DBackward0", "AdaptiveAvgPool2DBackward0",
})  # fmt: skip
# Values in memory that is allocated but not written, in an exchanged storage, or in no plain tensor cannot be put
# away. Nor can values that are written after their op has run, because they are sent at that moment.
_UNMOVABLE = (
    "uninitialised memory", "another storage", "a layout without a storage", "tensor subclass", WRITTEN_UNSEEN,
    CAME_BACK_OTHERWISE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """Known properties of a value.

    Attributes:
        movable: Whether its bytes may wait elsewhere: autograd saved it, it fills its storage, nothing overwrites it.
        kinds: Which of ``"float"``, ``"bool"``, ``"two_valued"``, ``"index"``, ``"sign_only"`` and ``"zeros"`` it is.
        zeros: Share of zeros that was seen; 0 where recording did not look.
        n_elements: How many elements it has.
        item_bytes: Bytes of an element.
    """

    movable: bool
    kinds: frozenset[str]
    zeros: float
    n_elements: int
    item_bytes: int


def facts_of(trace: Trace) -> tuple[Facts, ...]:
    """The facts about each value of a trace, found once."""
    return trace.once("facts", lambda: _find(trace))


def may_have_zeros(op: str, *, of_zeros: bool) -> bool:
    """Whether many elements of an op's first output may be zero: a ReLU made it, or max-pooling after one.

    Args:
        op: Full name of the op.
        of_zeros: Whether many elements of its first input may be zero.
    """
    return op.startswith(_OF_RELU) or (of_zeros and op.startswith(_OF_POOLS))


def _find(trace: Trace) -> tuple[Facts, ...]:
    readers, zeros = _backward_readers(trace), _with_zeros(trace)
    return tuple(_facts(trace, value, readers[value], value in zeros) for value in range(len(trace.values)))


def _with_zeros(trace: Trace) -> set[int]:
    found: set[int] = set()
    for op in trace.ops:
        if may_have_zeros(op.name, of_zeros=not found.isdisjoint(op.inputs[:1])):
            found.add(op.outputs[0])
    return found


def _backward_readers(trace: Trace) -> list[set[str]]:
    """For each value the ops of the backward that read its contents."""
    found: list[set[str]] = [set() for _ in trace.values]
    for op in trace.ops:
        for value in op.inputs if op.backward else ():
            if value not in op.outputs:  # else it is a view, which reads nothing
                found[value].add(base_name(op))
    return found


def _is_awaited(op_name: str) -> bool:
    """Whether an op returns before its result is there: a functional collective, until `wait_tensor` has run."""
    return op_name.startswith("_c10d_functional.") and not op_name.startswith("_c10d_functional.wait_tensor.")


def _facts(trace: Trace, value: int, readers: set[str], zeros: bool) -> Facts:
    record = trace.values[value]
    item_bytes = ITEM_BYTES.get(record.dtype, 0)
    n_elements = prod(record.shape)
    fills = item_bytes > 0 and n_elements * item_bytes == trace.value_bytes(value) > 0
    until = max((s.released for s in record.saves), default=-1)
    movable = (
        fills
        and bool(record.saves)
        and record.op >= 0
        and bool(trace.ops[record.op].inputs)  # torch gives the program a copy of a new constant that somebody holds
        and not trace.ops[record.op].backward
        and record.overwritten_at >= until
        and not record.pin.startswith(_UNMOVABLE)
        and not _is_awaited(trace.ops[record.op].name)
    )
    kinds = _kinds(trace, value, readers, zeros) if movable else frozenset()
    return Facts(movable, kinds, record.zeros, n_elements, item_bytes)


def _kinds(trace: Trace, value: int, readers: set[str], zeros: bool) -> frozenset[str]:
    record = trace.values[value]
    op = trace.ops[record.op]
    name = base_name(op)
    found = {"float"} if record.dtype in _FLOATS else set()
    if record.dtype == "bool":
        found.add("bool")
    if record.dtype in _FLOATS and _is_dropout_mask(trace, op):
        found.add("two_valued")
    if record.dtype == "int64" and name in _POOLS and value == op.outputs[1] and _plane(trace, op) <= _SHORT:
        found.add("index")
    if record.dtype in _FLOATS and zeros:
        found.add("zeros")
        if name in _ONLY_RELU and readers <= _SIGN_READERS and all(map(_read_by_sign, record.saves)):
            found.add("sign_only")
    return frozenset(found)


def _read_by_sign(save: Save) -> bool:
    return bool(save.unpacked) and len(save.readers) == len(save.unpacked) and SIGN_NODES.issuperset(save.readers)


def _is_dropout_mask(trace: Trace, op: OpRecord) -> bool:
    """Zeros and ones from Bernoulli, perhaps divided by the probability, as dropout does on a processor."""
    if base_name(op) == "div_" and op.inputs:
        made_by = trace.values[op.inputs[0]].op
        return made_by >= 0 and base_name(trace.ops[made_by]).startswith("bernoulli")
    return base_name(op).startswith("bernoulli")


def _plane(trace: Trace, op: OpRecord) -> int:
    """Number of positions that the indices of a pooling op address: height times width, and depth."""
    n_dims = 3 if "3d" in op.name else 2
    return prod(trace.values[op.inputs[0]].shape[-n_dims:])
