"""One plan for all processes: the first that meets a kind of step searches, and the others take its plan.

Processes measure other seconds of one step. Each alone would find another plan, in a search at the same time as the
others' searches. A plan travels through the key-value store of the process group. In a collective a process would wait
for others, which never come where batches are uneven: these do not meet its kind of step.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from math import log2
from operator import attrgetter
from time import monotonic, sleep
from typing import Any

import torch

from ctdr_lightning.basics.allocator_settings import expandable_segments
from ctdr_lightning.basics.documents import plain_of, read_record
from ctdr_lightning.basics.torch_private import group_store
from ctdr_lightning.memory import Plan, Prepared, Trace, simulate
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds
from ctdr_lightning.memory.plans.plan import PLAN_VERSION
from ctdr_lightning.memory.search.transfer import transferred
from ctdr_lightning.memory.simulator.actions import Action
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.traces.trace import RECOUNTED, OpRecord, StorageRecord, ValueRecord

# Four times the longest search seen. Only a process that was killed in its search never answers.
MOST_WAIT_S = 120.0
# Between two looks for a plan: a thousand processes ask the one that keeps the store 5,000 times a second.
MOST_PAUSE_S = 0.2
# torch's store drops a connection that sends more than 8 MiB; a plan of 10,000 values has 0.1 MiB.
MOST_BYTES = 4 * 2**20
NO_PLAN = b"-"
# Resident bytes are told apart in steps of 1.1 %: with uneven batches the largest copies so far differ by some
# kilobytes. Whoever takes a plan checks that it fits.
RESIDENT_STEPS = 64
# Times, rates and shares of zeros are measured, so that they differ on every process.
_EXACT = {
    kind: attrgetter(*(f.name for f in fields(kind) if f.type != "float"))
    for kind in (OpRecord, ValueRecord, StorageRecord, Link, CodecCost)
}


@dataclass(frozen=True)
class _Row:
    """An action by value id."""

    value: int
    action: Action


class SharedPlans:
    """Publishes the plans that are made here, and takes those of other processes: a `Share` of `ManyShapes`.

    A digest of a step stands for all that its plan depends on but measured numbers. Processes whose steps differ by a
    byte have other digests, so that each plans alone. So does a process whose predecessor found no plan: errors, with
    their proposals, remain each process's own. Alone in training, a process looks for nobody.

    Attributes:
        counts: How many plans were published, were taken, and were made alone among several processes.
    """

    def __init__(self) -> None:
        self.counts = {"published": 0, "taken": 0, "alone": 0}
        self._shares = True

    def __call__(self, step: Prepared, asked: Hashable, search: Callable[[], Plan]) -> Plan:
        """Take the plan of the process that came first, or search and publish.

        Args:
            step: The step to be planned.
            asked: All else that the plan depends on; numbers and text, alike on every process.
            search: Makes the plan; without collectives, as others may wait for it.

        Raises:
            InfeasibleBudgetError: Where the search finds nothing that fits.
        """
        store = group_store() if self._shares else None
        if store is None:
            return search()
        # a store may outlive its processes, and with it the claim of one that was killed in its search
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"ctdr_lightning/plans/{attempt}/{digest_of(step.trace, asked)}"
        try:
            found = None if store.add(f"{key}/asked", 1) == 1 else self._awaited(store, key)
        except RuntimeError:  # the process that keeps the store has gone, or the store keeps nothing
            self._shares, found = False, NO_PLAN
        if found is None:
            return self._published(store, key, search)
        made = None if found == NO_PLAN else _read(found, step)
        self.counts["taken" if made is not None else "alone"] += 1
        return made if made is not None else search()

    def _published(self, store: Any, key: str, search: Callable[[], Plan]) -> Plan:
        """Search, and tell the others how it ended."""
        text = NO_PLAN
        try:
            made = search()
            text = _written(made)
        finally:
            with suppress(RuntimeError):
                store.set(key, text if len(text) <= MOST_BYTES else NO_PLAN)
        self.counts["published"] += 1
        return made

    def _awaited(self, store: Any, key: str) -> bytes:
        """The answer of the process that came first; no plan where it does not come."""
        end_s, pause_s = monotonic() + MOST_WAIT_S, 0.005
        while not store.check([key]):  # `wait` would lock torch's own threads out of the store
            if monotonic() >= end_s:
                self._shares = False
                warnings.warn(
                    f"CTDR: another process began to plan this step, and had no plan after {MOST_WAIT_S:.0f} s. "
                    "This process plans alone from now on.",
                    stacklevel=2,
                )
                return NO_PLAN
            sleep(pause_s)
            pause_s = min(1.2 * pause_s, MOST_PAUSE_S)
        found: bytes = store.get(key)
        return found


def digest_of(trace: Trace, asked: Hashable) -> str:
    """A name for all that a plan depends on but measured numbers: ops, ticks, bytes, pins, links, codecs. Linear.

    Args:
        trace: The step, with the bytes beside it.
        asked: The rest: limits, policy.
    """
    parts = (trace.ops, trace.values, trace.storages, trace.links, trace.codecs)
    rows = [[_EXACT[type(record)](record) for record in records] for records in parts]
    card = torch.cuda.get_device_name() if trace.device == "cuda" and torch.cuda.is_available() else ""
    machine = trace.device, card, expandable_segments()
    resident = round(RESIDENT_STEPS * log2(max(trace.resident_bytes, 1)))
    recounted = trace.meta.get(RECOUNTED)  # a plan for other shares of zeros is not taken from before they changed
    facts = (PLAN_VERSION, machine, trace.n_ticks, trace.n_training, resident, asked, recounted, rows)
    return sha256(repr(facts).encode()).hexdigest()


def _written(made: Plan) -> bytes:
    """A plan without its trace, of which every process has its own."""
    actions = [plain_of(_Row(*item)) for item in made.actions.items()]
    head = {"policy": made.policy, "budget_bytes": made.budget_bytes, "options": dict(made.options)}
    return zlib.compress(json.dumps({**head, "actions": actions}).encode())


def _read(text: bytes, step: Prepared) -> Plan | None:
    """The actions of another process, judged on the step of this one; None where they do not fit it."""
    data = json.loads(zlib.decompress(text))
    rows = [read_record(_Row, row) for row in data.pop("actions")]
    actions = transferred({row.value: row.action for row in rows}, step.trace)
    made = Plan(timeline=simulate(step, actions), **data)
    limit_bytes = made.peak_bytes if made.budget_bytes is None else made.budget_bytes
    if made.peak_bytes > limit_bytes:
        return None
    bound_s = step.trace.seconds if made.away else lower_bound_seconds(step, limit_bytes)
    return replace(made, bound_seconds=bound_s)
