"""Steps of FSDP2 that are not there: their bytes are those of real ranks, and their seconds follow the model."""

import os
from dataclasses import replace

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import Figures, write_figures
from benchmarks.sharded import BENCHMARK, Depth, Row, Search, deep
from benchmarks.sharded_step import GATHER, SCATTER, WIRES, Llama, Model, recorded, ring_s, sharded, step_s
from ctdr_lightning.basics.devices import device_model
from ctdr_lightning.memory import simulate
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.trainer.training_step.optimizer.resident import local_bytes, state_bytes
from tests import forks
from tests.true_peaks import TruePeaks

SMALL = Model(layers=4, width=128, heads=4, hidden=344, vocabulary=512, tokens=128)
WIDE = Model(layers=4)  # kernels that take longer than their launch
RANKS, BATCH = 2, 2
STEPS, SETTLED = 8, 2


def measured_peaks(model, batch, checkpointed):
    """The peaks of a rank's settled steps."""
    distributed.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=RANKS)
    net = sharded(Llama(model, checkpointed), init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    ids = torch.zeros(batch, model.tokens, dtype=torch.int64)

    def standing_bytes():
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        return local_bytes([*net.parameters(), *net.buffers(), ids, *gradients]) + state_bytes([optimizer])

    peaks = TruePeaks()
    for number in range(STEPS):
        optimizer.zero_grad()
        before = standing_bytes()
        with memory_profiler() as profiler:
            net(ids).backward()
            optimizer.step()
        if number >= SETTLED:
            peaks.add(profiler, before, standing_bytes())
    distributed.destroy_process_group()
    return peaks


def check_peak(model, batch, checkpointed):
    predicted = simulate(recorded(model, batch, RANKS, None, checkpointed).account.whole).peak_bytes
    peaks = measured_peaks(model, batch, checkpointed)
    assert 0.95 * peaks.least <= predicted <= 1.05 * peaks.most


WIDER = replace(SMALL, width=256, hidden=1024, tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "checkpointed"),
    [
        (SMALL, True),
        pytest.param(WIDER, False, marks=pytest.mark.slow),
        pytest.param(SMALL, False, marks=pytest.mark.exhaustive),
        pytest.param(WIDER, True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_predicted_peak_is_that_of_two_real_ranks(model, checkpointed):
    assert forks.run(check_peak, model, BATCH, checkpointed, ranks=RANKS) == [0, 0]


@pytest.fixture(scope="module")
def step():
    return recorded(SMALL, BATCH, 8, device_model("h100"))


@pytest.mark.slow
def test_bytes_that_stay_are_16_for_each_weight_of_the_shard_and_buffers(step):
    net = Llama(SMALL)
    shards = sum(-(-p.shape[0] // 8) * p[0].numel() for p in net.parameters())
    steps_taken = 4 * len(list(net.parameters()))
    assert step.stays_bytes == 16 * shards + steps_taken + net.turns.nbytes


def test_weights_and_gradients_are_exchanged_once_a_unit_and_pass(step):
    names = [op.name for op in step.account.step.ops]
    units = SMALL.layers + 1  # the outermost one stays gathered for the backward
    assert (names.count(GATHER), names.count(SCATTER)) == (2 * units - 1, units)


def test_a_ring_takes_its_hops_and_its_bytes():
    wires = replace(WIRES["h100"], within_bytes_per_s=100e9, machine_bytes_per_s=50e9, hop_s=1e-6)
    assert ring_s(0, 8, wires) == pytest.approx(8.4e-6 + 7e-6)
    assert ring_s(0, 1024, wires) == pytest.approx(8.4e-6 + 896e-6 + 127 * 9.6e-6)
    assert ring_s(8 * 10**9, 8, wires) == pytest.approx(7 / 80, rel=1e-3)
    assert ring_s(16 * 10**9, 16, wires) == pytest.approx(15 / 40, rel=1e-3)


def test_the_network_is_hidden_behind_the_arithmetic_or_the_other_way_round(step):
    trace, wires = step.account.step, WIRES["h100"]
    collectives = [op for op in trace.ops if op.name in (GATHER, SCATTER)]

    def network_s(cards, of):
        sizes = [max(trace.value_bytes(v) for v in (*op.inputs, *op.outputs)) for op in collectives]
        return sum(ring_s(n_bytes, cards, of) for n_bytes in sizes)

    seconds = step_s(trace, 8, wires)
    assert trace.seconds < seconds < trace.seconds + network_s(8, wires)
    slow = replace(wires, machine_bytes_per_s=1e6)
    assert network_s(64, slow) < step_s(trace, 64, slow) < network_s(64, slow) + trace.seconds
    assert step_s(trace, 8, wires, again_s=1.0) == pytest.approx(1 + seconds, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_foreseen_batch_is_the_recorded_one(checkpointed):
    search = Search(WIDE, "h100", 8)
    foreseen, found = search.account(7, checkpointed), search.recorded(7, checkpointed).account
    assert simulate(foreseen.whole).peak_bytes == simulate(found.whole).peak_bytes
    assert foreseen.step.seconds == pytest.approx(found.step.seconds, rel=0.01)


@pytest.mark.slow
def test_batches_of_a_row_fill_the_budget_and_no_larger_one_fits():
    search = Search(WIDE, "h100", 8, most=64)
    search.limit_bytes = simulate(search.account(9).whole).peak_bytes
    row = search.row()
    assert 4 <= row.plain_batch <= 9
    assert row.plain_batch < min(row.block_batch, row.plan_batch)
    for batch, checkpointed in ((row.plain_batch, False), (row.block_batch, True)):
        assert search.fits(batch, checkpointed)
        assert not search.fits(batch + 1, checkpointed)
    made = search.planned(row.plan_batch)
    assert simulate(made.trace, made.timeline.actions).peak_bytes <= search.limit_bytes
    assert 0 < row.plan_s <= row.longest_s
    assert row.plan_tokens == search.tokens(row.plan_batch, made=made) < search.tokens(row.plan_batch)


ROWS = [
    Row("a10g", 8, 20 * 2**30, 2**30, 0, 0.0, 4, 1712.3, 1804.7, 5, 1700.0, 1.8, 11.4),
    Row("h100", 1024, 70 * 2**30, 2**29, 2, 9000.0, 25, 8000.0, None, 24, 8100.0, 1.5, 2.0),
]
DEPTHS = [Depth(8, 64, 2690, 2.0, 0.9, 1.05)]


def test_tables_say_where_nothing_fits_and_no_plan_was_found(tmp_path):
    write_figures(tmp_path / "sharded.json", rows=ROWS, depths=DEPTHS)
    text = (tmp_path / "sharded.json").read_text()
    assert Figures(text, BENCHMARK.parts).rows(Row) == ROWS
    assert BENCHMARK.table(text, "batches").splitlines()[2:4] == [
        "| a10g, 20.0 GiB | 8 | 1.00 GiB | does not fit | 4: 1,712 | 1,805 | 5: 1,700 | 1.8 (11.4) |",
        "| h100, 70.0 GiB | 1,024 | 0.50 GiB | 2: 9,000 | 25: 8,000 | not found | 24: 8,100 | 1.5 (2.0) |",
    ]
    assert BENCHMARK.table(text, "planning").splitlines()[2] == "| 8 | 64 | 2,690 | 2.0 | 0.9 | x1.050 |"


@pytest.mark.slow
def test_each_figure_has_a_place_of_its_own():
    assert len({row.place for row in (*ROWS, *DEPTHS, deep(replace(SMALL, layers=2), 8))}) == 4
