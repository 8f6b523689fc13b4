import gc
import weakref

import torch
from torch import nn

from ctdr_lightning.memory import Recorder
from ctdr_lightning.memory.recorder.step_log import StepLog, pin_what_cannot_wait
from ctdr_lightning.memory.traces.trace import OpRecord, Save, StorageRecord, Trace, ValueRecord
from tests.memory.leaks import left_behind


def make(ops, saves=None, lost=None, pins=None):
    """A trace of ops as ``(inputs, makes a value)``; values are numbered as they are made, -1 ... are from before."""
    n_before = 1
    n_ticks = len(ops) + 10
    records, values = [], [ValueRecord(0, -1, (1,), "uint8", (lost or {}).get(0, n_ticks), (), "")]
    for index, inputs in enumerate(ops):
        value = len(values)
        records.append(OpRecord("op", index, tuple(inputs), (value,), 1.0, 0, "", False, ""))
        until = (saves or {}).get(value)
        held = (Save(index, (until,), until),) if until is not None else ()
        pin = (pins or {}).get(value, "")
        values.append(ValueRecord(value, index, (1,), "uint8", (lost or {}).get(value, n_ticks), held, pin))
    storages = tuple(StorageRecord(1, i - n_before, n_ticks) for i in range(len(values)))
    return pin_what_cannot_wait(Trace(tuple(records), tuple(values), storages, n_ticks))


def pinned(trace):
    return [i for i, v in enumerate(trace.values) if v.pin]


def test_nothing_lost_nothing_pinned():
    assert pinned(make([(0,), (1,), (2,)], saves={3: 9})) == []


def test_what_reads_a_lost_input_is_pinned_for_as_long_as_it_is_needed():
    ops = [(0,), (1,), (2,)]
    assert pinned(make(ops, saves={3: 9}, lost={0: 3})) == [1]
    assert pinned(make(ops, saves={3: 9}, lost={0: 10})) == []
    assert pinned(make(ops, lost={0: 3})) == [], "nobody asks for it"


def test_a_lost_value_that_can_be_made_again_pins_nothing():
    assert pinned(make([(0,), (1,), (2,)], saves={3: 9}, lost={1: 2})) == []


def test_pins_go_on_along_lost_values():
    """1 is pinned as its input is lost; as it is lost itself, 2 cannot be made from it."""
    assert pinned(make([(0,), (1,), (2,)], saves={3: 9}, lost={0: 3, 1: 4})) == [1, 2]
    assert pinned(make([(0,), (1,), (2,)], saves={3: 9}, lost={1: 4}, pins={1: "random"})) == [1, 2]


def test_what_led_to_a_pinned_value_is_not_pinned_for_it():
    """As where a gradient moves a weight: what the weight becomes is not made again."""
    ops = [(0,), (1,), (2,)]
    assert pinned(make(ops, saves={1: 3, 3: 9}, lost={0: 4}, pins={3: "written over a tensor from before"})) == [3]
    assert pinned(make(ops, saves={1: 3, 3: 9}, lost={0: 4})) == [1]


def test_what_autograd_awaits_though_it_was_overwritten_is_pinned():
    trace = make([(0,), (1,)], saves={1: 9}, lost={1: 5})
    assert trace.values[1].pin == "overwritten while autograd awaits it"
    assert pinned(trace) == [1]


def test_a_log_is_in_no_cycle():
    def step():
        log = StepLog()
        log.tick = 0
        x = torch.zeros(3)
        log.ran(torch.ops.aten.zeros.default, (), {}, (), x, seconds=0, temp_bytes=0)
        log.close()
        return weakref.ref(log)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_a_recorded_step_whose_trace_is_never_asked_for_leaves_nothing():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def step():
        with Recorder():
            net(torch.ones(2, 4)).sum().backward()

    objects, n_bytes = left_behind(step)
    assert not objects
    assert n_bytes == 0


def test_live_bytes_while_a_step_runs():
    x = torch.zeros(1000, requires_grad=True)
    with Recorder() as recorder:
        y = x.exp()
        assert recorder.log.live_bytes == 4000
        z = y.detach().sin()
        assert recorder.log.live_bytes == 8000
        del z
        assert recorder.log.live_bytes == 4000


def test_what_came_back_otherwise_first_is_told_from_what_follows():
    net, side, x = nn.Sequential(*(nn.Tanh() for _ in range(4))), nn.Sigmoid(), torch.ones(2, 4, requires_grad=True)
    with Recorder() as recorder:
        loss = net(x).sum() + side(x).sum()
        loss.backward()
    names = {op[1]: op[0] for op in recorder.log._ops if not op[7]}
    tanhs = [tick for tick, name in names.items() if name == "aten.tanh.default"]
    (sigmoid,) = (tick for tick, name in names.items() if name == "aten.sigmoid.default")
    assert recorder.log.first_of({tanhs[1], tanhs[3]}) == {tanhs[1]}
    assert recorder.log.first_of({tanhs[1], sigmoid}) == {tanhs[1], sigmoid}
