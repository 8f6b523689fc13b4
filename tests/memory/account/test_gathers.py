"""Which units' weights stay gathered: read from a trace, priced and chosen without a process."""

from dataclasses import replace

import pytest

from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.account.gathers import choose_staying
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.traces.gathers import gathers_of, staying
from ctdr_lightning.memory.traces.trace import OpRecord, Save, StorageRecord, Trace, ValueRecord

FILL = "fsdp.split_with_sizes_copy.default"


class Sharded:
    """A trace in the making of units of 100 bytes, each with an activation that its backward reads.

    Every storage has one value, whose id is the storage's index; the times at which weights are full come last.
    """

    def __init__(self, n_units=3, activation_bytes=50, device="cpu"):
        self.ops, self.sizes, self.lives, self.saves, self.full = [], [], [], {}, {}
        self.device, self.weights = device, [self.storage(0, -1) for _ in range(n_units)]
        activations = []
        for unit, weight in enumerate(self.weights):
            self.gather(weight, f"blocks.{unit}", backward=False)
            activations.append(self.run("aten.mm.default", [*activations[-1:], weight], activation_bytes, False))
            self.empty(weight)
        for unit, weight in reversed(list(enumerate(self.weights))):
            self.gather(weight, "", backward=True)
            last = self.run("aten.mm.backward", [activations[unit], weight], 10, True)
            self.saves[activations[unit]] = Save(self.lives[activations[unit]][0], (self.tick - 1,), self.tick - 1)
            self.empty(weight)
        self.run("aten.add.default", [last], 10, True)

    @property
    def tick(self):
        return len(self.ops)

    def storage(self, n_bytes, born):
        self.sizes.append(n_bytes)
        self.lives.append([born, max(born, 0)])
        return len(self.sizes) - 1

    def run(self, name, inputs, n_bytes, backward, module=""):
        made = (self.storage(n_bytes, self.tick),) if n_bytes else ()
        for source in inputs if not backward else ():  # autograd holds what a backward reads
            self.lives[source][1] = self.tick
        self.ops.append(OpRecord(name, self.tick, tuple(inputs), made, 1.0, 0, module, backward, ""))
        return made[0] if made else -1

    def gather(self, weight, module, *, backward):
        buffer = self.run("c10d._allgather_base_.default", [], 100, backward, module)
        self.lives[buffer][1] = self.tick
        self.full.setdefault(weight, []).append([self.tick, -1])
        self.run(FILL, [buffer, weight], 0, backward, module)

    def empty(self, weight):
        self.full[weight][-1][1] = self.tick - 1

    def trace(self):
        n = self.tick
        makers = {made: i for i, op in enumerate(self.ops) for made in op.outputs}
        values = [
            ValueRecord(s, makers.get(s, -1), (size,), "uint8", n, (self.saves[s],) if s in self.saves else (), "")
            for s, size in enumerate(self.sizes)
        ]
        storages = [StorageRecord(size, *life) for size, life in zip(self.sizes, self.lives, strict=True)]
        storages += [StorageRecord(100, *span) for weight in sorted(self.full) for span in self.full[weight]]
        return Trace(tuple(self.ops), tuple(values), tuple(storages), n, self.device)


def test_gathers_are_read_from_the_ops():
    trace = Sharded().trace()
    found = gathers_of(trace)
    assert [gather.unit for gather in found] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [(gather.n_bytes, gather.ticks) for gather in found] == [(100, 14), (100, 8), (100, 2)]
    assert all([trace.ops[i].name for i in g.ops] == ["c10d._allgather_base_.default", FILL] for g in found)
    assert [[trace.storages[b].n_bytes for b in gather.buffers] for gather in found] == [[100]] * 3


def test_weights_that_stay_take_bytes_in_between_and_no_second_gather():
    trace = Sharded().trace()
    first, *_ = gathers_of(trace)
    changed = staying(trace, [first])
    before, after = simulate(trace).bytes_at, simulate(changed).bytes_at
    assert list(after - before)[first.freed_at + 1 : first.again_at - 1] == [100] * (first.ticks - 2)
    assert [unit.unit for unit in gathers_of(changed)] == ["blocks.1", "blocks.2"]
    assert changed.seconds == trace.seconds - 2
    assert after[first.again_at] == before[first.again_at] - 100  # the buffer of the gather that is spared


@pytest.mark.parametrize("times", [1, 3])
def test_a_unit_that_is_not_gathered_twice_is_left_out(times):
    sharded = Sharded()
    if times == 3:
        sharded.gather(sharded.weights[0], "", backward=True)
        sharded.empty(sharded.weights[0])
    else:  # its user keeps it: full from its forward to its backward
        (first, last), _ = sharded.full[sharded.weights[0]]
        sharded.full[sharded.weights[0]] = [[first, last + 14]]
    assert [gather.unit for gather in gathers_of(sharded.trace())] == ["blocks.1", "blocks.2"]


def chosen(budget_bytes, seconds, **options):
    trace = Sharded(**options).trace()
    found = gathers_of(trace)
    return choose_staying(BatchAccount(trace), found, {g.unit: seconds for g in found}, budget_bytes)


def test_all_stay_where_there_is_room_and_none_where_nothing_fits():
    assert chosen(10**6, 1.0).units == ("blocks.2", "blocks.1", "blocks.0")
    assert chosen(10**6, 1.0).saved_s == 3.0
    assert chosen(100, 1.0).units == ()


def test_between_both_the_last_units_stay_whose_weights_are_away_for_the_shortest_time():
    trace = Sharded().trace()
    found, plain = gathers_of(trace), simulate(trace).peak_bytes
    most = simulate(staying(trace, found)).peak_bytes
    assert chosen((plain + most) // 2, 1e-6).units in (("blocks.2",), ("blocks.2", "blocks.1"))


def test_recomputation_pays_for_slow_gathers_alone():
    activations = {"activation_bytes": 300}
    peak = simulate(Sharded(**activations).trace()).peak_bytes
    few, many = chosen(peak, 1e-3, **activations), chosen(peak, 100.0, **activations)
    assert len(few.units) < len(many.units)
    assert few.recompute_s == 0 < many.recompute_s


def test_what_a_gpu_hides_behind_its_backward_spares_nothing():
    trace = Sharded(device="cuda").trace()
    slow = [replace(gather, hidden_s=2.0) for gather in gathers_of(trace)]
    found = choose_staying(BatchAccount(trace), slow, {gather.unit: 5.0 for gather in slow}, 10**6)
    assert found.saved_s == 9.0
