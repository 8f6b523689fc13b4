"""Small programs over virtual streams. Each returns its complaints: an empty list is what has to come out."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import torch

from ctdr_lightning.memory import Tape
from ctdr_lightning.memory.holders import HOLDERS, HolderOptions
from ctdr_lightning.memory.holders.optimizer_state import StateAway
from ctdr_lightning.memory.tape.online import Evictor
from tests.memory.harness import planned
from tests.memory.holders.test_tape_away import another_way, away_actions, benched
from tests.virtual_cuda.streams import Machine

SIZES = (3, 1000, 70_000)


@contextmanager
def holder_of(name, folder):
    holder = HOLDERS[name](HolderOptions(folder=folder, device="cuda"))
    try:
        yield holder
    finally:
        holder.close()


def contents(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def same(machine, tensor, want, stream=None):
    """Complaints on a tensor that a stream reads; the stream is waited for."""
    machine.use(tensor, stream)
    (stream or machine.current()).synchronize()
    return [] if torch.equal(tensor, want) else [f"{len(want)} numbers are others"]


def there_and_back(machine, name, folder):
    """Tensors of several sizes in one parcel, fetched twice."""
    with holder_of(name, folder) as holder:
        want = [contents(n, n) for n in SIZES]
        parcel = holder.put([machine.make(w) for w in want])
        parcel.gone()
        twice = [*parcel.fetch(), *parcel.fetch()]
        return [c for t, w in zip(twice, [*want, *want], strict=True) for c in same(machine, t, w)]


def straight_back(machine, name, folder):
    """A parcel is asked back before it is gone."""
    step = machine.step_stream(at_once=False)
    with holder_of(name, folder) as holder, machine.entered(step):
        parcel = holder.put([machine.make(contents(4000))])
        return same(machine, parcel.fetch()[0], contents(4000))


class LateWriter:
    """In place of the disk's writing thread: a job begins when its result is asked for, as late as it may."""

    def submit(self, job, *arguments):
        return SimpleNamespace(result=cache(partial(job, *arguments)))

    def shutdown(self, **_):
        """Nothing waits."""


def written_over(machine, name, folder):
    """The source is written over once it is gone; a disk writes late."""
    with holder_of(name, folder) as holder:
        if name == "disk":
            holder.writer.shutdown()
            holder.writer = LateWriter()
        source = contents(9000)
        want = source.clone()
        parcel = holder.put([source])
        parcel.gone()
        source.fill_(7)
        return same(machine, parcel.fetch()[0], want)


def late_step(machine, name, folder):
    """The step is on a stream of its own and late: what it makes, frees and reads again is in its order."""
    step, found = machine.step_stream(at_once=False), []
    with holder_of(name, folder) as holder, machine.entered(step):
        want = [contents(n, n) for n in SIZES]
        parcels = [holder.put([machine.make(w)]) for w in want]
        for parcel in parcels:
            parcel.gone()
        landings = [parcel.fetch()[0] for parcel in reversed(parcels)]
        for landing, w in zip(landings, reversed(want), strict=True):
            found += same(machine, landing, w)
    return found


def let_go_elsewhere(machine, name, folder):
    """Another stream of the step's waits until the source is gone, and the memory is used again on its own."""
    first, second = machine.step_stream(at_once=False), machine.step_stream(at_once=False)
    with holder_of(name, folder) as holder:
        want = contents(5000)
        with machine.entered(first):
            parcel = holder.put([machine.make(want)])
        with machine.entered(second):
            parcel.gone()
        first.synchronize()
        with machine.entered(first):
            return same(machine, parcel.fetch()[0], want)


def read_elsewhere(machine, name, folder):
    """The backward of a value is on another stream than its forward."""
    first, second = machine.step_stream(at_once=False), machine.step_stream(at_once=False)
    with holder_of(name, folder) as holder:
        want = contents(5000)
        with machine.entered(first):
            parcel = holder.put([machine.make(want)])
            parcel.gone()
        with machine.entered(second):
            landing = parcel.fetch()[0]
            machine.use(landing)
            seen, block = torch.zeros(5000), machine.block_of(landing)
            second.do(lambda: machine.plain_copy(seen, torch.frombuffer(block.memory, dtype=torch.float32)))
        found = [] if block.owner is first else ["memory came back on another stream than that of its value"]
        del landing
        first.synchronize()
        second.synchronize()
        return found + ([] if torch.equal(seen, want) else ["the second stream read other numbers"])


def forgotten(machine, name, folder):
    """Parcels that are dropped on their way out and back, on their own stream and on another."""
    first, second = machine.step_stream(at_once=False), machine.step_stream(at_once=False)
    found = []
    with holder_of(name, folder) as holder:
        for stream in (first, second):
            with machine.entered(first):
                out = holder.put([machine.make(contents(4000))])
                back = holder.put([machine.make(contents(4000, 1))])
                back.gone()
                back.start()
            with machine.entered(stream):
                del out, back
            with machine.entered(first):
                last = holder.put([machine.make(contents(8000, 2))])
                last.gone()
                found += same(machine, last.fetch()[0], contents(8000, 2))
                del last
    return found + ([f"{holder.held_bytes} bytes are still held"] if holder.held_bytes else [])


def taken_again(machine, name, folder):
    """Host memory is written again by another stream while the last copy out of it is still to come."""
    first, second = machine.step_stream(at_once=False), machine.step_stream(at_once=False)
    with holder_of(name, folder) as holder:
        want, other = contents(6000), contents(6000, 1)
        with machine.entered(first):
            parcel = holder.put([machine.make(want)])
            parcel.gone()
            landing = parcel.fetch()[0]
            del parcel
        with machine.entered(second):
            again = holder.put([machine.make(other)])
            again.gone()
            second.synchronize()
        with machine.entered(first):
            found = same(machine, landing, want)
        with machine.entered(second):
            return found + same(machine, again.fetch()[0], other)


def second_device(machine, name, folder):
    """A tensor of the second device, while the first is the current one."""
    step = machine.step_stream(1, at_once=False)
    with holder_of(name, folder) as holder:
        want = contents(3000)
        source = machine.make(want, step)
        with machine.entered(step), machine.entered(machine.home[0]):
            parcel = holder.put([source])
            del source
            parcel.gone()
            landing = parcel.fetch()[0]
        block = machine.block_of(landing)
        found = same(machine, landing, want, step)
        lanes = {stream.device.index for stream in block.uses}
        return found + ([] if lanes == {1} else [f"a tensor of device 1 was moved on streams of {sorted(lanes)}"])


prepared = cache(benched)  # the recorder counts allocations: it runs before the machine is installed


def whole_tape(machine, name, folder, seeds=2):
    """Random plans of all four actions under the tape's own holders, guided and diverged."""
    bench, want, trace = prepared(name)
    found = []
    for seed in range(seeds):
        made = planned(replace(trace, device="cuda"), away_actions(trace, seed))
        for plan, evictor in ((made, None), (another_way(made), Evictor(int(0.7 * made.peak_bytes)))):
            pinned = len(machine.pinned_bytes)
            found += bench.run(Tape(plan, evictor)).differs_from(want)
            if plan.away and len(machine.pinned_bytes) == pinned:
                found.append("the tape's own holders are not for the plan's device")
    return found


def optimizer_state(machine, name, folder):
    """Six steps of AdamW whose state waits elsewhere."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]))
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2, foreach=False) for net in nets]
    with holder_of(name, folder) as holder:
        StateAway(optimizers[1], holder)
        for step in range(6):
            x = contents(8 * 64, step).view(8, 64)
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
        same_bits = (torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
        return [] if all(same_bits) else ["the weights are others"]


PARCELS = (
    there_and_back,
    straight_back,
    written_over,
    late_step,
    let_go_elsewhere,
    read_elsewhere,
    forgotten,
    taken_again,
    second_device,
    optimizer_state,
)


def complaints(program, schedule, seed, name, folder, monkeypatch, *, catch=False):
    """Run a program over a machine of its own; ``catch`` makes a complaint of an error."""
    with monkeypatch.context() as patch:
        machine = Machine(schedule, seed).install(patch)
        try:
            found = program(machine, name, folder)
        except Exception as error:
            if not catch:
                raise
            found = [repr(error)]
            del error
        if program is whole_tape or found:
            gc.collect()  # a tape closes its holders when nobody has it any more: while the machine is there
        return found + machine.errors
