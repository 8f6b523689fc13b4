"""A GPU's allocator holds more than a step's tensors: plans leave room for it, and for CUDA's context."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.gpu_memory import left_bytes, read_budget
from ctdr_lightning.basics.units import GIB, MIB
from ctdr_lightning.memory import plan, record, record_fake
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.bytes_beside import BytesBeside
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from tests.virtual_cuda.card import Card

CUDA = torch.device("cuda", 0)


def test_what_the_allocator_holds_beside_the_known_is_counted_once():
    net, beside = nn.Linear(1024, 1024, bias=False), BytesBeside(SimpleNamespace())
    known = beside.static_bytes(net)
    assert beside.unexplained_bytes(known + MIB // 2) == 0  # rounded blocks
    assert beside.unexplained_bytes(known + 40 * MIB) == 40 * MIB
    beside.held_bytes = 40 * MIB
    assert beside.static_bytes(net) == known + 40 * MIB
    assert beside.unexplained_bytes(known + 40 * MIB) == 0
    assert beside.unexplained_bytes(known) == 0


def test_it_counts_in_the_account_that_plans_are_made_for():
    net, x = nn.Linear(64, 64), torch.randn(8, 64)
    step, beside = record(lambda: net(x).sum()), BytesBeside(CallbackOptions(rank=None, memory_budget="1GiB"))
    before = beside.account(step)
    beside.held_bytes = 40 * MIB
    held = beside.account(step)
    assert held.standing.resident_bytes == before.standing.resident_bytes + 40 * MIB
    assert held.rest_bytes == before.rest_bytes + 40 * MIB


def looking(monkeypatch, peak_bytes):
    """A stage with a budget of a GiB and one plan, and the list of its calls to plan again."""
    stage, sets = MemoryStage(SimpleNamespace(places=None, policy="auto")), []
    made = SimpleNamespace(peak_bytes=peak_bytes, trace=SimpleNamespace(device="cpu"), actions={})
    stage.session = SimpleNamespace(plans=[made], due=lambda kind: None)
    stage.session.plan_with = lambda planner, kind: None
    stage._module, stage.planner.budget_bytes = nn.Identity(), GIB
    monkeypatch.setattr(stage, "_set_static", sets.append)
    return stage, sets


def test_a_step_is_planned_again_when_the_allocator_holds_more(monkeypatch):
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=GIB)
    card.allocate(8 * MIB)
    stage._look_at_allocator(CUDA, 8 * MIB)  # the batch
    stage._look_at_allocator(torch.device("cpu"), 0)
    assert sets == []
    card.allocate(64 * MIB)  # DDP's buckets
    for _ in range(2):
        stage._look_at_allocator(CUDA, 8 * MIB)
    assert sets == [[]]
    assert stage.beside.held_bytes == 64 * MIB


def test_a_plan_with_room_for_what_is_held_in_addition_stays(monkeypatch):
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=GIB - 7 * MIB)
    for step in range(1, 6):
        card.allocate(2 * MIB)  # what the user's step keeps
        stage._look_at_allocator(CUDA, 0)
        assert len(sets) == (step > 3)
        assert stage.beside.held_bytes == 2 * step * MIB
        if step == 3:
            assert stage.session.static_bytes == stage.beside.static_bytes(stage._module)
        if step == 4:
            stage.session.outdate = stage.session.plans.clear
            stage._replan()  # as _set_static does


@pytest.mark.parametrize("again", [True, False], ids=["served before", "never served"])
def test_a_plan_that_the_allocator_would_no_longer_serve_is_made_again(monkeypatch, again):
    """Its tensors would fit beside what is held, but not with the pieces between them."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=0)
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())))
    step = record_fake(net, torch.empty(20480, 512), lambda net, x: net(x).sum(), device="a100")
    made = plan(step, policy="keep")
    room = made.reserved.reserved_bytes - made.peak_bytes
    assert room > 3 * MIB
    stage.session.plans = [made]
    stage.planner.budget_bytes = made.reserved.reserved_bytes if again else made.peak_bytes + 2 * MIB
    card.allocate(2 * MIB)
    stage._look_at_allocator(CUDA, 0)
    assert bool(sets) is again


def test_the_optimizers_step_has_to_fit_beside_it_too(monkeypatch):
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=GIB // 2)
    stage.planner.rest_peak_bytes = GIB - MIB  # of the optimizer's step
    card.allocate(2 * MIB)
    stage._look_at_allocator(CUDA, 0)
    assert sets == [[]]


def test_an_allocator_that_counts_no_requests_is_asked_for_its_blocks(monkeypatch):
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=GIB)
    card.allocate(80 * MIB)
    card.slack_bytes = 80 * MIB  # all of them: cudaMallocAsync counts none
    stage._look_at_allocator(CUDA, 0)
    assert sets == [[]]


def test_blocks_that_are_larger_than_their_tensors_hold_nothing(monkeypatch):
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=GIB)
    card.allocate(80 * MIB)
    card.slack_bytes = 79.5 * MIB
    stage._look_at_allocator(CUDA, 0)
    assert (sets, stage.beside.held_bytes) == ([], 0)


def test_garbage_in_cycles_is_not_counted(monkeypatch):
    card = Card().install(monkeypatch)
    stage, sets = looking(monkeypatch, peak_bytes=GIB)
    card.allocate(64 * MIB)
    cycle = nn.Module()
    vars(cycle)["itself"] = cycle
    weakref.finalize(cycle, card.free, 64 * MIB)
    del cycle
    stage._look_at_allocator(CUDA, 0)
    assert sets == []
    assert stage.beside.held_bytes == 0


def test_a_budget_leaves_room_for_the_context(monkeypatch):
    card = Card(total_bytes=16 * GIB, elsewhere_bytes=GIB).install(monkeypatch)
    card.allocate(4 * GIB)  # the model is there already
    for asked in ("16GiB", 1.0):
        with pytest.warns(UserWarning, match="15.00 GiB for PyTorch"):
            assert read_budget(asked, CUDA) == 15 * GIB
    assert read_budget(0.5, CUDA) == 8 * GIB
    assert read_budget("16GiB", torch.device("cpu")) == 16 * GIB


@pytest.mark.parametrize(("share", "left"), [(1.0, 11), (0.5, 4)])
def test_what_is_left_is_free_on_the_card_or_in_the_cache_as_far_as_the_process_may_go(monkeypatch, share, left):
    card = Card(total_bytes=16 * GIB, elsewhere_bytes=GIB).install(monkeypatch)
    card.allocate(4 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    assert left_bytes(CUDA) == left * GIB
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")  # an older torch
    assert left_bytes(CUDA) == 11 * GIB
