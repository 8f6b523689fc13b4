"""One plan for all processes: searched once, taken by the others; whoever finds no plan there plans alone."""

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback, plan, record
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.torch_private import group_store
from ctdr_lightning.memory import KEEP, RECOMPUTE, Plan, Prepared, simulate
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.trainer.training_step import shared_plans
from ctdr_lightning.trainer.training_step.shared_plans import SharedPlans, digest_of
from tests import forks, parts
from tests.trainer.test_sharded_peaks import Gpt
from tests.trainer.training_step.test_many_lengths import BATCH, VOCABULARY, Words

HUGE = 2**40


def chain(n_samples=256):
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())])
    x = torch.randn(n_samples, 16)
    return record(lambda: net(x).sum())


@pytest.fixture(scope="module")
def step():
    return chain()


def on_all_ranks(thing):
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, thing)
    return found


def searched_in(callback):
    return callback.run.memory.planner.shapes.counts["searched"]


def words(lengths):
    """A rank's own batches of these lengths."""
    generator = torch.Generator().manual_seed(parts.rank())
    return [torch.randint(VOCABULARY, (BATCH, length), generator=generator) for length in lengths]


def trained(lengths, ranks, budget=None):
    parts.seed_everything(0, verbose=False)
    module, data = Words(), (DataLoader(words(lengths), batch_size=None), None)
    ours = [] if budget is None else [CTDRCallback(rank=None, memory_budget=budget, verbose=False)]
    parts.fit(
        module, *ours, data=data, strategy="ddp", devices=ranks, max_epochs=2, use_distributed_sampler=False,
        limit_val_batches=0,
    )  # fmt: skip
    return module, *ours


def peak_of(lengths, ranks):
    """The most that a step takes without a plan, on any rank."""
    _, ours = trained(lengths, ranks, HUGE)
    return max(on_all_ranks(max(made.peak_bytes for made in ours.run.memory.session.plans)))


def check_even(ranks):
    lengths = [65] * 3
    budget = int(0.85 * peak_of(lengths, ranks))
    plain, _ = trained(lengths, ranks, HUGE)
    module, ours = trained(lengths, ranks, budget)
    made = ours.run.memory.last_plan
    found = on_all_ranks((made.actions, made.peak_bytes, made.budget_bytes, made.policy))
    assert all(other == found[0] for other in found)
    assert not made.keeps_all
    assert made.peak_bytes <= budget
    assert len(set(on_all_ranks(made.trace.seconds))) == ranks  # each has measured its own
    assert sum(on_all_ranks(searched_in(ours))) == 1
    counts = sum(map(Counter, on_all_ranks(ours.run.memory.planner.shared.counts)), Counter())
    assert counts == {"published": 1, "taken": ranks - 1}
    assert parts.same(plain.state_dict(), module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_even_batches_have_one_plan_of_one_search(ranks):
    assert forks.run(check_even, ranks, ranks=ranks, timeout_s=300) == [0] * ranks


@contextlib.contextmanager
def digests():
    """The digests of the steps that are planned in the block."""
    found, digest = [], shared_plans.digest_of
    shared_plans.digest_of = lambda *args: found.append(digest(*args)) or found[-1]
    yield found
    shared_plans.digest_of = digest


def check_uneven(ranks):
    lengths = [65, 61, 57, 81]  # copies of a batch are bytes beside its steps: near each other, they round alike
    own = lengths[parts.rank() :] + lengths[: parts.rank()]
    budget = int(0.85 * peak_of(own, ranks))
    plain = trained(own, ranks)[0]
    with digests() as asked:
        module, ours = trained(own, ranks, budget)
    everywhere = on_all_ranks(set(asked))
    assert max(Counter(digest for rank in everywhere for digest in rank).values()) > 1
    counts = sum(map(Counter, on_all_ranks(ours.run.memory.planner.shared.counts)), Counter())
    assert counts["published"] == len(set.union(*everywhere))
    assert counts["taken"] > 0
    assert sum(counts.values()) == sum(on_all_ranks(len(asked)))
    assert parts.same(plain.losses, module.losses)
    assert parts.same(plain.state_dict(), module.state_dict())
    plans = ours.run.memory.session.plans
    assert any(on_all_ranks(any(not made.keeps_all for made in plans)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_uneven_batches_wait_for_no_kind_that_others_do_not_meet(ranks):
    assert forks.run(check_uneven, ranks, ranks=ranks, timeout_s=300) == [0] * ranks


def check_sharded():
    def fit(budget=None):
        parts.seed_everything(0, verbose=False)
        module = Gpt()
        ours = [] if budget is None else [CTDRCallback(rank=None, memory_budget=budget, verbose=False)]
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        data, batch_size = module.data()
        parts.fit(module, *ours, data=(DataLoader(data, batch_size), None), strategy=strategy, devices=2, max_steps=4)
        return module, *ours

    plain, unplanned = fit(HUGE)
    budget = int(0.8 * max(on_all_ranks(unplanned.run.memory.last_plan.peak_bytes)))
    module, ours = fit(budget)
    first, second = on_all_ranks(ours.run.memory.last_plan.actions)
    assert first == second
    assert set(first.values()) != {KEEP}
    published, taken = (on_all_ranks(ours.run.memory.planner.shared.counts[name]) for name in ("published", "taken"))
    assert sum(published) == sum(taken) == 1
    assert parts.same(plain.losses, module.losses)


@pytest.mark.slow
def test_shards_of_one_size_have_one_plan():
    assert forks.run(check_sharded, ranks=2, timeout_s=200) == [0, 0]


def check_infeasible():
    _, unplanned = trained([65] * 3, 2, HUGE)
    rest_bytes = unplanned.run.memory.rest_peak_bytes  # the optimizer's step fits, and no plan of the step before it
    with digests() as asked, pytest.raises(InfeasibleBudgetError, match="least peak") as caught:
        trained([65] * 3, 2, rest_bytes)
    assert asked
    assert "HINT" in str(caught.value)


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_is_the_error_of_every_process():
    assert forks.run(check_infeasible, ranks=2, timeout_s=200) == [0, 0]


def check_publisher_raises():
    """The first to come fails when the second waits for it already."""
    distributed.init_process_group("gloo", rank=parts.rank(), world_size=2)
    step, shared = Prepared(chain()), SharedPlans()
    asked, budget = ("auto", 1), int(0.8 * simulate(chain()).peak_bytes)

    def refuse():
        group_store().set("began", "")
        while group_store().add(f"ctdr_lightning/plans/0/{digest_of(step.trace, asked)}/asked", 0) < 2:
            pass
        raise InfeasibleBudgetError("No plan fits.")

    if parts.rank() == 0:
        with pytest.raises(InfeasibleBudgetError, match="No plan fits"):
            shared(step, asked, refuse)
        assert shared.counts == {"published": 0, "taken": 0, "alone": 0}
    else:
        group_store().wait(["began"])
        made = shared(step, asked, lambda: plan(step, budget))
        assert made.peak_bytes <= budget
        assert shared.counts == {"published": 0, "taken": 0, "alone": 1}
    distributed.barrier()


def test_whoever_waits_for_a_search_that_fails_plans_alone():
    assert forks.run(check_publisher_raises, ranks=2) == [0, 0]


def stored_at(path):
    """A store that outlives the processes which use it."""
    return lambda: distributed.FileStore(str(path))


def test_a_process_that_dies_in_its_search_stops_nobody(tmp_path, monkeypatch, step):
    def search_and_die(path):
        shared_plans.group_store = stored_at(path)
        SharedPlans()(Prepared(step), 1, forks.die)

    assert forks.run(search_and_die, tmp_path / "store") == [-9]
    monkeypatch.setattr(shared_plans, "group_store", stored_at(tmp_path / "store"))
    monkeypatch.setattr(shared_plans, "MOST_WAIT_S", 0.0)
    shared, made = SharedPlans(), plan(step, policy="sqrt")
    with pytest.warns(UserWarning, match="plans alone from now on"):
        assert shared(Prepared(step), 1, lambda: made) is made
    assert shared(Prepared(step), 2, lambda: made) is made  # without another wait, and without a word
    assert shared.counts == {"published": 0, "taken": 0, "alone": 1}


def test_a_store_that_has_gone_ends_no_run(monkeypatch, step):
    class Gone:
        def add(self, key, number):
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(shared_plans, "group_store", Gone)
    shared, made = SharedPlans(), plan(step, policy="sqrt")
    assert shared(Prepared(step), 1, lambda: made) is made
    assert shared.counts["alone"] == 1


def test_alone_a_process_asks_for_no_digest(monkeypatch, step):
    monkeypatch.setattr(shared_plans, "digest_of", None)
    made = plan(step, policy="sqrt")
    assert SharedPlans()(Prepared(step), 1, lambda: made) is made


def machine():
    link = Link("host", out_bytes_per_s=1e9, in_bytes_per_s=2e9)
    return [link], [CodecCost("bf16", exact=False, needs="float", payload_bits=16.0)]


def test_measured_numbers_are_no_part_of_a_digest_and_all_others_are(step):
    name = digest_of(step, ("auto", 1))
    again = step.with_costs([2 * op.seconds + 1e-3 for op in step.ops], {}, 1e-4).with_zeros({step.saved[0]: 0.5})
    assert digest_of(again, ("auto", 1)) == name
    more = replace(step.storages[0], n_bytes=step.storages[0].n_bytes + 4)
    others = [
        chain(255), step.with_pins({step.saved[0]: "pinned"}), step.with_machine(*machine()),
        replace(step, storages=(more, *step.storages[1:])), step.with_static(step.resident_bytes // 10),
        replace(step, device="cuda"), replace(step, n_training=step.n_training + 1),
    ]  # fmt: skip
    assert len({name, digest_of(step, ("auto", 2)), *(digest_of(other, ("auto", 1)) for other in others)}) == 9
    fast, slow = (step.with_machine([replace(machine()[0][0], out_bytes_per_s=rate)]) for rate in (1e9, 1e10))
    assert digest_of(fast, 1) == digest_of(slow, 1)


def test_a_plan_is_judged_by_whoever_takes_it(monkeypatch, tmp_path):
    step = chain().with_machine(*machine())
    values = step.saved
    actions = {values[0]: RECOMPUTE, values[1]: Offload("host", out_at=step.values[values[1]].op + 4)}
    timeline = simulate(step, actions)
    made = Plan("auto", timeline, timeline.peak_bytes, options={"n_slots": 3})
    monkeypatch.setattr(shared_plans, "group_store", stored_at(tmp_path / "store"))
    assert SharedPlans()(Prepared(step), 1, lambda: made) is made
    slower = step.with_costs([3 * op.seconds for op in step.ops], {})
    taken = SharedPlans()(Prepared(slower), 1, pytest.fail)
    assert taken.trace is slower
    assert taken.actions == made.actions
    assert (taken.policy, taken.budget_bytes, taken.options) == ("auto", made.budget_bytes, {"n_slots": 3})
    assert taken.seconds > 2 * made.seconds
    assert taken.bound_seconds == slower.seconds
    shared, own = SharedPlans(), plan(step, policy="sqrt")
    assert shared(Prepared(step.with_static(8)), 1, lambda: own) is own  # the budget has no room for these 8 bytes
    assert shared.counts["alone"] == 1


def test_compressed_values_travel_too(monkeypatch, tmp_path):
    step = chain().with_machine(*machine())
    actions = {v: Compress(("bf16",)) for v in step.saved if "float" in facts_of(step)[v].kinds}
    made = Plan("auto", simulate(step, actions))
    assert made.away
    monkeypatch.setattr(shared_plans, "group_store", stored_at(tmp_path / "store"))
    SharedPlans()(Prepared(step), 1, lambda: made)
    assert SharedPlans()(Prepared(step), 1, pytest.fail).actions == made.actions
