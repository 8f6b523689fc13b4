"""Sends values away and asks them back at the plan's ticks, for one step.

The forward's ticks are its ops, the backward's are bells: unpacks of the tape's own handles. Memory is taken
and given back at these ticks alone, so that a step's peak is the plan's however fast a link is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.holders.away import AwayTensor
from ctdr_lightning.memory.holders.base import Holder
from ctdr_lightning.memory.simulator.actions import Away, Offload, keeps_sign_alone
from ctdr_lightning.memory.tape.zero_watch import ZeroWatch
from ctdr_lightning.memory.values.tensors import alias_of
from ctdr_lightning.memory.values.value import ABOUT, EXACT, SIGNS, Handle, Held, Value


class Belled:
    """A handle that tells when it is unpacked."""

    __slots__ = ("__weakref__", "handle", "tick")

    def __init__(self, handle: Handle | Held, tick: int) -> None:
        self.handle = handle
        self.tick = tick


class Courier:
    """Carries out the away actions of one step.

    Args:
        actions: By value id.
        holders: By name.
        zeros: Counts the zeros of what is put away.
    """

    def __init__(self, actions: Mapping[int, Away], holders: Mapping[str, Holder], zeros: ZeroWatch) -> None:
        self._actions, self._zeros = actions, zeros
        self._holders = holders
        self._to_send: dict[int, list[tuple[weakref.ref[Value], Offload]]] = defaultdict(list)
        self._to_leave: dict[int, list[weakref.ref[Value]]] = defaultdict(list)
        self._to_return: list[tuple[int, weakref.ref[Value]]] = []

    def take(self, value: Value, identity: int, tensor: Tensor, tick: int, *, written: bool) -> None:
        """An op at ``tick`` has made a value that is to be put away.

        Args:
            value: Its entry in the table.
            identity: Its id in the trace.
            tensor: The program's tensor.
            tick: When it was made.
            written: Whether the op wrote it in place, so that its version is about to rise.
        """
        action = self._actions[identity]
        value.identity, value.comes_back = identity, _comes_back(action)
        value.stays_while_awaited = value.hold = False
        value.node, value.leaves = None, True
        self._zeros.look(identity, tensor)
        if not isinstance(action, Offload):
            value.away = AwayTensor(tensor, action.codecs, None)
            return
        value.keep(alias_of(tensor))
        value.version += written
        if action.back_at >= 0:
            self._to_return.append((action.back_at, weakref.ref(value)))
        if action.out_at > tick:
            self._to_send[action.out_at].append((weakref.ref(value), action))
        else:
            self._send(value, action, tensor)

    def passed(self, tick: int) -> None:
        """The forward op at ``tick`` has run: send the values due now, and wait for those that must be gone."""
        for ref, action in self._to_send.pop(tick, ()):
            value = ref()
            tensor = value.get() if value is not None else None
            if value is not None and tensor is not None:  # else it was written over, or nobody awaits it
                self._send(value, action, tensor)
        for ref in self._to_leave.pop(tick, ()):
            _leave(ref())

    def forward_done(self) -> None:
        """The forward is over, or goes on without a plan: wait for pending transfers; the rest stays."""
        self._to_send.clear()
        for refs in self._to_leave.values():
            for ref in refs:
                _leave(ref())
        self._to_leave.clear()
        self._to_return.sort(key=lambda entry: -entry[0])

    def rings(self, tick: int) -> None:
        """The backward has come to ``tick``: ask back the values that must be on their way by now."""
        while self._to_return and self._to_return[-1][0] <= tick:
            value = self._to_return.pop()[1]()
            if value is not None and value.away is not None:
                value.away.start()

    def _send(self, value: Value, action: Offload, tensor: Tensor) -> None:
        value.away = AwayTensor(tensor, action.codecs, self._holders[action.to])
        if action.codecs:
            value.tensor = None
        self._to_leave[action.gone_by].append(weakref.ref(value))


def _comes_back(action: Away) -> str:
    if keeps_sign_alone(action):
        return SIGNS
    return EXACT if all(CODECS[name].exact for name in action.codecs) else ABOUT


def _leave(value: Value | None) -> None:
    """Wait until a value is away, and let go of its memory."""
    if value is not None and value.away is not None:
        value.away.gone()
        value.tensor = None
