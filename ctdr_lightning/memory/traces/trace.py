"""One recorded step as plain data: ops, values, storages, saves.

Written by ``record``, read by policies and ``simulate``. Time is counted in *ticks*: every op and every unpack of a
saved value is one tick, in the order in which they ran. A storage that is born at tick ``a`` and ends at tick ``b`` is
live during every tick from ``a`` to ``b`` inclusive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.documents import damaged, parse_document, read_record
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.made_once import MadeOnce
from ctdr_lightning.memory.traces.machine import CodecCost, Link

TRACE_VERSION = 5
# 256 TiB: a larger number in a file is damage.
MAX_BYTES = 2**48
ASSUMED = "assumed"  # the key of a trace's notes on operators that read values which were assumed
LEAN = "lean"  # the key of a trace's notes on outputs that are not made and modules that run in tiles
RECOUNTED = "zeros counted again"  # the key of a trace's note on how often it was given other shares of zeros
WEIGHT = "a weight"  # the pin of a parameter that requires grad
WRITTEN_UNSEEN = "written by a kernel that torch does not see"
CAME_BACK_OTHERWISE = "came back with other contents when it was made again"
MAX_REGIONS = 2**20  # forwards of modules in one step; lists of this length are made for each plan


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One aten op.

    Attributes:
        name: Full name, such as ``"aten.relu.default"``.
        tick: When it ran.
        inputs: Ids of the values it read.
        outputs: Id of the value behind each output; -1 for an output that is not a tensor. A view's output is its
            base's value.
        seconds: How long it took.
        temp_bytes: Workspace that it allocated and freed again.
        module: Path of the module in whose forward it ran; empty outside of one.
        backward: Whether autograd's backward ran it.
        pin: Why it may not be run again, or the empty string.
        region: How many forwards of modules had begun before it; -1 where that is not known.
        replay_share: Time of a replay over the time of the first run; below 1 if the op has a shortcut.
    """

    name: str
    tick: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    temp_bytes: int
    module: str
    backward: bool
    pin: str
    region: int = -1
    replay_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Save:
    """One handle that autograd held on a value.

    Attributes:
        packed: Tick after which autograd saved the value.
        unpacked: Ticks at which the backward asked for it.
        released: Last tick at which autograd held it.
        readers: For each of ``unpacked`` the node of torch's own that asked, such as ``"ReluBackward0"``; empty for
            anybody else. No entry where that was not recorded.
    """

    packed: int
    unpacked: tuple[int, ...]
    released: int
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """The contents of one storage between two writes to it.

    Attributes:
        storage: Index of the storage.
        op: Index of the op that wrote it; -1 for a tensor from before the step.
        shape: Shape of the tensor that was written.
        dtype: Its dtype, such as ``"float32"``.
        overwritten_at: Tick at which the storage was overwritten; the trace's length where it never was.
        saves: Autograd's saves of it.
        pin: Why it may not be recomputed, or the empty string; ``WEIGHT`` for a parameter that requires grad.
        zeros: Share of zeros that was seen in it; 0 where recording did not look.
    """

    storage: int
    op: int
    shape: tuple[int, ...]
    dtype: str
    overwritten_at: int
    saves: tuple[Save, ...]
    pin: str
    zeros: float = 0.0


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One allocation.

    Attributes:
        n_bytes: Its size.
        born: Tick of the op that made it; -1 for one from before the step.
        end: Last tick at which anything but autograd's handles held it.
    """

    n_bytes: int
    born: int
    end: int


@dataclass(frozen=True)
class Trace(MadeOnce):
    """A recorded step.

    Attributes:
        ops: Every aten op of forward and backward, in order.
        values: Every tensor contents that the ops read or wrote.
        storages: Every allocation that the step touched.
        n_ticks: Length of the time axis.
        device: Device type on which the step ran.
        resident_bytes: Bytes in memory during the whole step, which the peak includes: storages from before the step
            that it touched (weights, inputs), and whatever ``with_static`` added.
        meta: Anything worth keeping with the trace.
        n_training: How many forwards of modules in training mode begin before the last op of the forward; -1 where
            that is not known.
        python_s_per_replay: Seconds that Python takes for each op that is dropped and run again (to see it, capture it,
            hand its handles in and out, call it); 0 where kernels run on their own time, on a GPU.
        links: Ways to the places where tensors can wait, by the machine that the step is planned for.
        codecs: Costs of the allowed codecs on it.
    """

    ops: tuple[OpRecord, ...]
    values: tuple[ValueRecord, ...]
    storages: tuple[StorageRecord, ...]
    n_ticks: int
    device: str = "cpu"
    resident_bytes: int = 0
    meta: dict[str, str] = field(default_factory=dict)
    n_training: int = -1
    python_s_per_replay: float = 0.0
    links: tuple[Link, ...] = ()
    codecs: tuple[CodecCost, ...] = ()

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Ids of the values that autograd saved and that the step itself made."""
        return tuple(i for i, v in enumerate(self.values) if v.saves and v.op >= 0)

    @cached_property
    def droppable(self) -> frozenset[int]:
        """Ids of the values made in the forward that may be recomputed."""
        return frozenset(
            i for i, v in enumerate(self.values) if v.op >= 0 and not v.pin and not self.ops[v.op].backward
        )

    @cached_property
    def unholdable(self) -> frozenset[int]:
        """Ids of the values that are written over and that autograd did not save: they cannot be held."""
        return frozenset(i for i, v in enumerate(self.values) if v.overwritten_at < self.n_ticks and not v.saves)

    @property
    def asked_codecs(self) -> tuple[CodecCost, ...]:
        """The codecs that may decide whether a budget fits: those that somebody asked for."""
        return tuple(cost for cost in self.codecs if not cost.only_faster)

    @cached_property
    def forward_ops(self) -> tuple[int, ...]:
        """Indices of the forward's ops, in the order in which a guided tape sees them."""
        return tuple(i for i, op in enumerate(self.ops) if not op.backward)

    @cached_property
    def forward_ticks(self) -> int:
        """Number of ticks up to the forward's last op: what runs after the last op of a backward is no part of it.

        A gradient that the loss itself holds, such as that of a penalty, is part of the forward.
        """
        ends = max((op.tick for op in self.ops if op.backward), default=self.n_ticks)
        return max((op.tick for op in self.ops if not op.backward and op.tick < ends), default=-1) + 1

    @cached_property
    def seconds(self) -> float:
        """Time of the plain step: the sum over its ops."""
        return sum(op.seconds for op in self.ops)

    def replay_seconds(self, op: int) -> float:
        """Time to run an op once more: its own time, or its shortcut's, plus Python's."""
        record = self.ops[op]
        return record.seconds * record.replay_share + self.python_s_per_replay

    def value_bytes(self, value: int) -> int:
        """Size of the allocation behind a value."""
        return self.storages[self.values[value].storage].n_bytes

    def module_of(self, value: int) -> str:
        """Path of the module that made a value; ``"input"`` for one from before the step."""
        op = self.values[value].op
        return "input" if op < 0 else self.ops[op].module or "step"

    def with_static(self, n_bytes: int) -> Trace:
        """A copy of the step with more bytes resident throughout.

        Args:
            n_bytes: Bytes that the step does not touch: optimizer state, other gradients.
        """
        return replace(self, resident_bytes=self.resident_bytes + n_bytes) if n_bytes else self

    def with_live_bytes(self, n_bytes: int, first: int, last: int) -> Trace:
        """A copy of a step in which so many more bytes are live from one tick to another."""
        if not n_bytes or not self.n_ticks:
            return self
        return replace(self, storages=(*self.storages, StorageRecord(n_bytes, first, last)))

    def with_costs(
        self,
        seconds: Sequence[float],
        temp_bytes: Mapping[int, int],
        python_s_per_replay: float = 0.0,
        replay_shares: Mapping[int, float] | None = None,
    ) -> Trace:
        """A copy with new op times (one per op) and, for the op indices given, new workspaces and replay shares."""
        shares = replay_shares or {}
        ops = []
        for i, (op, op_seconds) in enumerate(zip(self.ops, seconds, strict=True)):
            share, temp = shares.get(i, op.replay_share), temp_bytes.get(i, op.temp_bytes)
            ops.append(replace(op, seconds=op_seconds, temp_bytes=temp, replay_share=share))
        return replace(self, ops=tuple(ops), python_s_per_replay=python_s_per_replay)

    def with_pins(self, reasons: Mapping[int, str]) -> Trace:
        """A copy in which values may not be made again.

        Args:
            reasons: From value id to why not; a value that is pinned already keeps its reason.
        """
        pins = [v.pin or reasons.get(i, "") for i, v in enumerate(self.values)]
        return replace(self, values=tuple(replace(v, pin=pin) for v, pin in zip(self.values, pins, strict=True)))

    def with_zeros(self, shares: Mapping[int, float]) -> Trace:
        """A copy with the shares of zeros that were seen, by value id; the others keep theirs."""
        values = (replace(v, zeros=shares[i]) if i in shares else v for i, v in enumerate(self.values))
        return replace(self, values=tuple(values))

    def with_reader(self, value: int) -> Trace:
        """A copy in which a saved value is also read by somebody unknown, so that no codec may rely on its readers."""
        saves = tuple(replace(s, readers=("",) * len(s.unpacked)) for s in self.values[value].saves)
        return replace(
            self, values=tuple(replace(v, saves=saves) if i == value else v for i, v in enumerate(self.values))
        )

    def with_note(self, key: str, text: str) -> Trace:
        """A copy with one more note.

        Args:
            key: Of the note.
            text: The note; an empty one is left out.
        """
        return replace(self, meta={**self.meta, key: text}) if text else self

    def with_machine(self, links: Iterable[Link] = (), codecs: Iterable[CodecCost] = ()) -> Trace:
        """The same trace on a machine with further links and codecs.

        Args:
            links: Ways to holders; one to a holder that has one replaces it.
            codecs: Costs of codecs; one of a codec that has one replaces it.
        """
        return replace(
            self,
            links=tuple({link.to: link for link in (*self.links, *links)}.values()),
            codecs=tuple({cost.name: cost for cost in (*self.codecs, *codecs)}.values()),
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """Write the trace as versioned JSON; returns the text.

        Args:
            path: File to write; it is complete or absent, never half-written.
        """
        data: dict[str, Any] = {"version": TRACE_VERSION, "kind": "trace"}
        for f in fields(self):
            item = getattr(self, f.name)
            data[f.name] = [list(_row(x)) for x in item] if isinstance(item, tuple) else item
        text = json.dumps(data)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Trace:
        """Read a trace from JSON text or a file.

        Raises:
            CheckpointError: If the text is not a trace of this version.
        """
        return cls.from_document(parse_document(source, "trace", TRACE_VERSION))

    @classmethod
    def from_document(cls, data: Any) -> Trace:
        """Read a trace from the mapping that its JSON holds, as in a plan's document.

        Raises:
            CheckpointError: If it is not a trace of this version.
        """
        try:
            _require(data["kind"] == "trace" and data["version"] == TRACE_VERSION, "the kind or the version")
            trace = cls(
                ops=tuple(read_record(OpRecord, row) for row in data["ops"]),
                values=tuple(read_record(ValueRecord, row) for row in data["values"]),
                storages=tuple(read_record(StorageRecord, row) for row in data["storages"]),
                n_ticks=_whole(data["n_ticks"]),
                device=str(data["device"]),
                resident_bytes=_whole(data["resident_bytes"]),
                meta={str(k): str(v) for k, v in data["meta"].items()},
                n_training=_whole(data.get("n_training", -1)),
                python_s_per_replay=float(data.get("python_s_per_replay", 0.0)),
                links=tuple(read_record(Link, row) for row in data.get("links", ())),
                codecs=tuple(read_record(CodecCost, row) for row in data.get("codecs", ())),
            )
            trace._check()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged("trace", error, "Record it again.") from error
        return trace

    def _check(self) -> None:
        """Raise ValueError where something points nowhere, or into the future."""
        n_ops, n_values, n = len(self.ops), len(self.values), self.n_ticks
        saves = [s for v in self.values for s in v.saves]
        _require(0 <= n <= 2 * (n_ops + sum(len(s.unpacked) for s in saves)) + 1, "the number of ticks")
        _require(all(a.tick < b.tick for a, b in pairwise(self.ops)), "the order of the ops")
        for index, op in enumerate(self.ops):
            _require(all(0 <= v < n_values and self.values[v].op < index for v in op.inputs), "the inputs of an op")
            _require(all(-1 <= v < n_values for v in op.outputs), "the outputs of an op")
            _require(0 <= op.tick < n and op.seconds >= 0 and 0 <= op.temp_bytes < MAX_BYTES, "an op's cost")
            _require(0 <= op.replay_share <= 1, "the replay share of an op")
            _require(-1 <= op.region < MAX_REGIONS, "an op's region")
        for value in self.values:
            _require(-1 <= value.op < n_ops and 0 <= value.storage < len(self.storages), "the op of a value")
            _require(0 <= value.overwritten_at <= n, "the tick at which a value is overwritten")
            _require(0 <= value.zeros <= 1, "a share of zeros")
            _require(min(value.shape, default=0) >= 0, "a shape")
        for save in saves:
            _require(save.packed >= -1 and save.released <= n and all(0 <= t < n for t in save.unpacked), "a save")
        for storage in self.storages:
            _require(-1 <= storage.born < max(n, 1) and -1 <= storage.end <= n, "the ticks of a storage")
            _require(0 <= storage.n_bytes < MAX_BYTES, "a storage's bytes")
        _require(0 <= self.resident_bytes < MAX_BYTES, "the resident bytes")
        _require(0 <= self.python_s_per_replay < inf, "Python's time")
        _require(-1 <= self.n_training < MAX_REGIONS, "the number of training modules")
        for link in self.links:
            _require(min(link.out_bytes_per_s, link.in_bytes_per_s) > 0 and link.latency_s >= 0, "a link's rate")
            _require(0 <= link.busy_s_per_byte < inf, "the compute time of a link's bytes")
            _require(link.granule > 0 and 0 <= link.device_bytes < MAX_BYTES, "a link's bytes")
        for codec in self.codecs:
            _require(codec.payload_bits >= 0 and codec.side_bits >= 0, "a codec's bits")
            _require(min(codec.encode_temp_bytes, codec.decode_temp_bytes) >= 0, "a codec's temporaries")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it is wrong in {what}")


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise ValueError(f"{number!r} is not a whole number")
    return number


def _row(record: Any) -> Sequence[Any]:
    row = asdict(record)
    if "saves" in row:
        row["saves"] = [list(s.values()) for s in row["saves"]]
    return list(row.values())
