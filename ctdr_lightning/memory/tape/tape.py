"""The tape: carries out a plan in eager PyTorch, one tensor at a time.

During the forward a dispatch mode sees every aten op below autograd and autocast. Where the plan says so it captures
the call, and autograd saves a handle that can run it again instead of the tensor. Where the step differs from the plan
(another op, another shape) the tape goes on without it: everything later is held, and ``diverged`` says where. Results
never depend on the plan, only memory and time do.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.basics.gpu_memory import use_expandable_segments
from ctdr_lightning.basics.host_memory import has_process_group
from ctdr_lightning.basics.torch_private import (
    OpMode,
    OpOverload,
    graph_task_id,
    pop_dispatch_mode,
    push_dispatch_mode,
)
from ctdr_lightning.memory.holders.away import can_wait
from ctdr_lightning.memory.holders.base import Holder, HolderOptions, Holders
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.tape.backward_watch import BackwardWatch
from ctdr_lightning.memory.tape.clock import CpuClock
from ctdr_lightning.memory.tape.collector_pause import CollectorPause
from ctdr_lightning.memory.tape.courier import Belled, Courier
from ctdr_lightning.memory.tape.hookless_regions import HooklessRegions
from ctdr_lightning.memory.tape.line import Line, lines_of
from ctdr_lightning.memory.tape.listener import Listener
from ctdr_lightning.memory.tape.module_paths import ModulePaths
from ctdr_lightning.memory.tape.online import Evictor, Online
from ctdr_lightning.memory.tape.plan_verifier import Give, PlanVerifier, Take, verifier_of
from ctdr_lightning.memory.tape.sleeper import Sleeper
from ctdr_lightning.memory.tape.verifier import (
    NOT_REPEATABLE,
    Verifier,
    check_verify,
)
from ctdr_lightning.memory.tape.zero_watch import ZeroWatch
from ctdr_lightning.memory.values.batchnorm_again import has_shortcut, take_shortcut
from ctdr_lightning.memory.values.higher_order import HigherOrderUnseen
from ctdr_lightning.memory.values.op_traits import pin_reason_of_types, traits
from ctdr_lightning.memory.values.op_trial import OpTrial
from ctdr_lightning.memory.values.replay import hold_for_views, unpack
from ctdr_lightning.memory.values.sharded import by_shards, on_shards
from ctdr_lightning.memory.values.tensors import tensors_in
from ctdr_lightning.memory.values.value import SIGNS, Handle, Held, SignHandle, Value, root_of
from ctdr_lightning.memory.values.value_table import ValueTable

# A buffer that a replay reads is copied up to this size, so that the tape may sleep although a step that differs from
# the recorded one could write over it meanwhile; for larger ones the tape stays awake. Means, deviations and scales of
# channels fit in, a copy takes less than seeing one op, and the simulated peak need not know of so few bytes.
SHIELDED_BYTES = 2**12
_DETACH = torch.ops.aten.detach.default
_DETACH_NAME = str(_DETACH)


def _own_holders(tape: Tape) -> Holders:
    """Holders for one step, closed when nobody holds the tape any more: its graph is gone."""
    holders = Holders(HolderOptions(device=tape.plan.trace.device))
    weakref.finalize(tape, holders.close)
    return holders


class Tape(OpMode):
    """Carry out a plan around the forward of a step; the backward may run inside or after the ``with`` block.

    A plan that keeps everything installs nothing.

    Args:
        plan: The plan for this step, made by ``plan(record(step), ...)``.
        evictor: Keeps a step that differs from the plan under a budget; without one, unplanned values are held.
        holders: Places for the plan's offloaded values; without them the tape makes its own for one step.
        verify: Steps in which values that come back are compared with the saved ones: the ``"first"`` under each
            setting of precision and algorithms and one in 500 after it, ``"always"``, or ``"never"``.
        settings: Further settings; a step under new ones is verified again.
        at_once: Whether each value is verified as it comes back, rather than when the backward is over.

    Raises:
        ConfigError: If ``verify`` is unknown.
        ReplayError: In the backward of a verified step, when a value came back with other contents.

    Attributes:
        diverged: Where the step differed from the plan, in words; empty where it did not.
        zeros: Counts the zeros of what is put away.

    Example:
        >>> from ctdr_lightning.memory import Tape, plan, record
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
        >>> p = plan(record(lambda: net(x).sum()), policy="sqrt")
        >>> with Tape(p):
        ...     loss = net(x).sum()
        >>> loss.backward()
    """

    # torch refuses a higher-order operator (`torch.cond`, flex_attention) under a mode that does not say it takes them.
    supports_higher_order_operators = True

    def __init__(
        self,
        plan: Plan,
        evictor: Evictor | None = None,
        holders: Mapping[str, Holder] | None = None,
        *,
        verify: str = "first",
        settings: Hashable = None,
        at_once: bool = False,
    ) -> None:
        super().__init__()
        self.plan = plan
        self._verify, self._settings, self._at_once = check_verify(verify), settings, at_once
        self._verifier: PlanVerifier | None = None
        self.evictor = evictor
        self.diverged = ""
        self._lines = plan.once("lines", lambda: lines_of(plan))
        self._length = len(self._lines)
        self._table = ValueTable()
        self._online = Online(evictor, self._table) if evictor is not None else None
        self._paths = ModulePaths() if has_process_group() else None  # without one there are no FSDP units
        self._pause = CollectorPause()
        self.zeros = plan.once("zeros", lambda: ZeroWatch(plan))
        self._courier: Courier | None = None
        if plan.away:
            self._courier = Courier(plan.away, _own_holders(self) if holders is None else holders, self.zeros)
        self._unseen = HigherOrderUnseen()
        self._hookless: HooklessRegions | None = None
        self._clock = CpuClock()
        self._index = 0
        self._counting: Evictor | None = None
        self._listener: Listener | None = None
        self._sleeper: Sleeper | None = None

    def __enter__(self) -> Tape:
        self._index, self.diverged = 0, ""
        self.zeros.begin()
        if self.plan.budget_bytes is not None:
            use_expandable_segments(torch.device(self.plan.trace.device))  # on which plans for a GPU count
        if not self.plan.keeps_all:
            take, give = self._hooks()
            self._verifier = verifier_of(self.plan, self._verify, self._settings, at_once=self._at_once)
            if self._verifier is not None:
                take, give = self._verifier.around(take, give, lambda: bool(self.diverged))
            if self._paths is not None:
                take, give = by_shards(take, give)
            self._listener = Listener(saved_tensors_hooks(take, give))
            if self.evictor is not None:
                self.evictor.verifier = self._online_verifier()
                self.evictor.on(torch.device(self.plan.trace.device))
                self.evictor.__enter__()
                if self._paths is not None:
                    self._paths.__enter__()
                self._counting = self.evictor if self.evictor.counts else None
            if self.plan.regions.worthwhile and self._counting is None:
                self._sleeper = Sleeper(self.plan.regions, self._switch, self._wake, self._listen)
            super().__enter__()
            if self._sleeper is not None:
                self._sleeper.attach(self)
            self._unseen.__enter__()
            self._hookless = HooklessRegions(self._listener.bar)
            self._hookless.__enter__()
            self._pause.__enter__()
        return self

    def _hooks(self) -> tuple[Take, Give]:
        """Autograd's hooks to save a tensor and to get it back."""
        if self._courier is not None:
            return self._pack_with_bells, self._unpack_with_bells
        return self._pack, unpack if self.evictor is None else self._unpack_online

    def _online_verifier(self) -> Verifier | None:
        # The values of a step that differs were never recorded, so evicted ones are always verified.
        return Verifier(lambda wrong, right: _another_graph()) if self._verify != "never" else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._listener is None:
            return
        self._pause.__exit__(kind, error, tb)
        if self._hookless is not None:
            self._hookless.__exit__(kind, error, tb)
        self._hookless = None  # it knows the listener, and so the tape
        self._unseen.__exit__(kind, error, tb)
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            sleeper.detach()
        if sleeper is not None and not sleeper.awake:
            self._switch(True)
        super().__exit__(kind, error, tb)
        if self.evictor is not None:
            if self._paths is not None:
                self._paths.__exit__(kind, error, tb)
            self.evictor.__exit__(kind, error, tb)
        if self._listener.on:
            self._listener.turn(False)
        self._listener = None
        if self._courier is not None:
            self._courier.forward_done()
        self._table.clear()
        if kind is None and not self.diverged:
            self.diverged = sleeper.difference() if sleeper is not None else ""
            if not self.diverged and any(line.replay or line.sends for line in self._lines[self._index :]):
                self.diverged = f"the step ended after op {self._index}, the plan expects {len(self._lines)}"

    def backward_watch(self) -> BackwardWatch | None:
        """For the backward of a step that differed, once its forward is over; None where the tape needs none."""
        return BackwardWatch(self._counting) if self.diverged and self._counting is not None else None

    @property
    def listens(self) -> bool:
        """Whether its saved-tensor hooks are on top of all others."""
        return self._listener is not None and self._listener.on

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and on_shards(types):
            return NotImplemented
        if kwargs is None:
            kwargs = {}
        if graph_task_id() != -1:
            counting = self._counting if self.diverged else None
            return func(*args, **kwargs) if counting is None else counting.run(func, args, kwargs)
        index = self._index
        line = self._lines[index] if index < self._length else None
        if line is None or line.func is not func or self.diverged:
            # of `prim` are questions, such as a fake tensor's device, which the recorder leaves out too
            if func.namespace == "prim" or (func is _DETACH and _saves_by_itself(line)):
                return func(*args, **kwargs)
            if self.diverged or not self._expected(func, line, index):
                self._index = index + 1
                return self._differing(func, index, types, args, kwargs)
            assert line is not None
        self._index = index + 1
        listener, saves = self._listener, line.saves
        if saves is not None and listener is not None and listener.on is not saves:
            listener.turn(saves)
        out = func(*args, **kwargs) if line.plain else self._planned(line, index, args, kwargs)
        if self._counting is not None:
            self._counting.live.note_gather(func, args, kwargs)
            if not line.shares:
                self._counting.track(out)
        return out

    def _switch(self, on: bool) -> None:
        """Leave the stack or come back, for less than leaving the block and entering it again takes."""
        if on:
            push_dispatch_mode(self)
        else:
            pop_dispatch_mode()

    def _wake(self, index: int) -> None:
        self._index = index

    def _listen(self, on: bool) -> bool:
        """Whether the hooks are as they are asked to be."""
        if self._listener is not None and self._listener.on is not on:
            self._listener.turn(on)
        return self._listener is None or self._listener.on is on

    def _differing(
        self, func: OpOverload, index: int, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An op that the plan knows nothing of: evictable where there is a budget, else held."""
        online = self._online
        self._listen(online is not None)
        barred = self._listener is not None and self._listener.barred
        if online is None or barred or (types and pin_reason_of_types(tuple(types))):
            return self._unplanned(func, args, kwargs)
        self._table.unit = self._paths.unit if self._paths is not None else 0
        online.evictor.live.ignore(tensors_in((*args, *kwargs.values())))
        return online.call(func, index, args, kwargs, self._clock)[0]

    def _planned(self, line: Line, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func, table = line.func, self._table
        assert func is not None
        ran = self._tried(func, args, kwargs) if line.replay and traits(func).unproven else None
        node = table.capture(func, index, args, kwargs) if line.replay else None
        if node is None:
            out = self._unplanned(func, args, kwargs) if ran is None else ran
            if line.away:
                self._put_away(line, out, [])
            return out
        if line.exposed and self._sleeper is not None and not table.shield(node, SHIELDED_BYTES):
            self._sleeper.stays_awake = True
        if line.writes:
            table.overwrites(func, args, kwargs)
        out = func(*args, **kwargs) if ran is None else ran
        values = table.bind(node, out)
        if line.normalises and has_shortcut(func, args, out):
            take_shortcut(node, values, out)
        for value, (cache, hold, kept) in zip(values, line.stays, strict=False):
            if value is not None:
                value.stays_while_awaited, value.hold = cache, hold
                if kept and value.node is not None:
                    table.hold(value)
        if line.away:
            self._put_away(line, out, values)
        first = out[0] if type(out) in (tuple, list) else out
        if line.shape and first.shape != line.shape:
            self._diverge(f"op {index} ({line.name}) made {tuple(first.shape)}, the plan expects {line.shape}")
        return out

    def _tried(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run another library's operator that no step of this process has recorded: the plan comes from elsewhere."""
        trial = OpTrial(func, args, kwargs)
        out = func(*args, **kwargs)
        trial.judge(out)
        return out

    def _put_away(self, line: Line, out: Any, values: Sequence[Value | None]) -> None:
        """Give the courier the op's outputs that are to be put away; outputs unlike the recorded ones are held."""
        courier = self._courier
        assert courier is not None, "a plan that puts something away has a courier"
        assert line.func is not None, "the op was seen"
        written = bool(traits(line.func).written)
        outs = out if type(out) in (tuple, list) else (out,)
        for position, identity in line.sends:
            tensor = outs[position]
            if can_wait(tensor):
                value = (values[position] if values else None) or self._table.track(tensor, written)
                courier.take(value, identity, tensor, line.tick, written=written)
        courier.passed(line.tick)

    def _expected(self, func: OpOverload, line: Line | None, index: int) -> bool:
        found = traits(func).name
        if line is not None and line.name == found:
            line.learn(func)
            return True
        self._diverge(f"op {index} is {found}, the plan expects {'the end' if line is None else line.name}")
        return False

    def _diverge(self, where: str) -> None:
        self.diverged = where
        if self._courier is not None:
            self._courier.forward_done()
        if self._sleeper is not None:
            self._sleeper.stays_awake = True

    def _unplanned(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if traits(func).writes:
            self._table.overwrites(func, args, kwargs)
        return func(*args, **kwargs)

    def _unpack_with_bells(self, handle: Handle | Held | Belled) -> Tensor:
        if type(handle) is Belled:
            assert self._courier is not None, "bells are the courier's"
            self._courier.rings(handle.tick)
            handle = handle.handle
        assert not isinstance(handle, Belled), "a bell holds a handle"
        return unpack(handle) if self.evictor is None else self._unpack_online(handle)

    def _unpack_online(self, handle: Handle | Held) -> Tensor:
        assert self.evictor is not None
        return self.evictor.fetch(handle.value) if self.diverged and type(handle) is Handle else unpack(handle)

    def _pack_with_bells(self, tensor: Tensor) -> Handle | Held | Belled:
        handle = self._pack(tensor)
        line = self._lines[self._index - 1] if 0 < self._index <= self._length else None
        if line is not None and line.bell >= 0 and not self.diverged:
            return Belled(handle, line.bell)
        return handle

    def _pack(self, tensor: Tensor) -> Handle | Held:
        if self.diverged and self._online is not None:
            return Handle(self._online.pack(tensor))
        value = self._table.known(tensor)
        if value is None:
            return Held(tensor)
        if value.node is not None and value.node.view:
            hold_for_views(value)
        if self._courier is not None and root_of(value).comes_back == SIGNS:
            return SignHandle(value)
        return Handle(value)


def _saves_by_itself(line: Line | None) -> bool:
    """Whether a detach is autograd's own: it saves an output while we do not listen, or wraps a shared tensor."""
    return line is None or line.name != _DETACH_NAME


def _another_graph() -> ReplayError:
    return ReplayError(
        f"A tensor that was evicted from a step without a plan came back with other contents: {NOT_REPEATABLE}.",
        "give a larger budget, or leave it out; a Session and a Trainer run the step again by themselves.",
    )
