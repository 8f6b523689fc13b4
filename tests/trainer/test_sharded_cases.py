"""A table of features on shards: each trains as plain sharded training does, to the bit, or is refused by name.

Its points are those of one demand: ranks, recovery, communication, inside of sharded layers, DDP. Neighbours have the
checks that fit no table: ``test_sharded_ranks``, ``_recovery``, ``_gathers``, ``_peaks``, ``_optimizer``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from ctdr_lightning import decompose, restore
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory.guide.events import PlanMade
from ctdr_lightning.trainer.structure import factorized_names
from tests import forks, parts
from tests.trainer.sharded_runs import (
    EPOCHS,
    HUGE,
    KINDS,
    STEPS,
    FromMeta,
    FullyShard,
    Normed,
    TensorParallel,
    Unused,
    callback_of,
    plain_peak_bytes,
    planned,
    results,
    run,
    saver,
)  # fmt: skip
from tests.trainer.test_sharded_ranks import on_all_ranks

RANKS, RECOVERY, COMMUNICATION, INSIDE, DDP = "ranks", "recovery", "communication", "inside", "DDP"


class Case(NamedTuple):
    """One row: its check gets the case and a folder, and forks by itself."""

    point: str
    kind: str
    name: str
    check: Any
    options: dict[str, Any] = {}  # noqa: RUF012  read only
    ranks: int = 2
    fast: bool = False


def fork(case, check, *args, ranks=None):
    ranks = case.ranks if ranks is None else ranks
    assert forks.run(check, *args, ranks=ranks, timeout_s=400) == [0] * ranks


# --- exact: a plain run and one under the callback


def exact(case, folder, kind=None):
    fork(case, check_exact, kind or KINDS[case.kind], dict(case.options), case.ranks)


def check_exact(kind, options, ranks):
    run_with = {"ranks": ranks, "ddp": options.pop("ddp", None), **options.pop("trainer", {})}
    plain = results(run(kind, **run_with))
    if isinstance(options.get("memory_budget"), float):
        whole = callback_of(**{**options, "memory_budget": HUGE})
        run(kind, whole, **run_with)
        options["memory_budget"] = int(options["memory_budget"] * whole.run.memory.session.plan.peak_bytes)
    callback = callback_of(**options)
    assert parts.same(plain, results(run(kind, callback, **run_with)))
    session = callback.run.memory.session
    assert any(isinstance(event, PlanMade) for event in session.events)
    assert kind is Unused or session.plan.actions


PLANS = {
    "a budget": {"memory_budget": 0.8},
    "sqrt": {"policy": "sqrt"},
    "an optimal plan": {"policy": "optimal_fast", "memory_budget": 0.9},
    "offloading": {"policy": "vdnn_all", "memory": {"offload": ["disk"]}},
    "offloading by a budget": {"memory_budget": 0.8, "memory": {"offload": ["disk"]}},
    "exact codecs": {"memory_budget": 0.8, "memory": {"codecs": "exact"}},
    "gradients that stay": {"memory_budget": 0.9, "memory": {"keep_gradients": True}},
    "always verified": {"policy": "sqrt", "memory": {"verify": "always"}},
    "two batches a step": {"policy": "sqrt", "trainer": {"accumulate_grad_batches": 2}},
    "bfloat16": {"policy": "sqrt", "trainer": {"precision": "bf16-mixed"}},
    "clipped gradients": {"policy": "sqrt", "trainer": {"gradient_clip_val": 0.5}},
}
OF_DDP = {
    "a static graph": {"static_graph": True},
    "gradients that are views of buckets": {"gradient_as_bucket_view": True},
    "both of these": {"static_graph": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.05},
}


def plans():
    for kind in KINDS:
        for name, options in PLANS.items():
            if name == "clipped gradients" and kind in ("tensor parallel", "both"):
                continue  # torch sums no norms of both kinds of tensors
            if kind in ("FSDP2", "tensor parallel") or name in ("a budget", "sqrt"):
                point = {"FSDP2": COMMUNICATION, "DDP": DDP}.get(kind, INSIDE) if "memory_budget" in options else INSIDE
                yield Case(point, kind, name, exact, options, 4 if kind == "both" else 2, (kind, name) in FAST)
    for name, ddp in OF_DDP.items():
        yield Case(DDP, "DDP", name, exact, {"memory_budget": 0.8, "ddp": ddp})
    unused = {"policy": "sqrt", "ddp": {"find_unused_parameters": True}}
    yield Case(DDP, "DDP", "a block that every second batch leaves out", partial(exact, kind=Unused), unused)
    yield Case(RANKS, "FSDP2", "weights made from the meta device", partial(exact, kind=FromMeta), PLANS["a budget"])


FAST = {("FSDP2", "sqrt"), ("tensor parallel", "sqrt"), ("DDP", "sqrt")}


# --- budgets: a share of the plain peak, kept on every rank, fresh and resumed


def kept(case, folder):
    fork(case, check_kept, KINDS[case.kind], case.options["share"], case.ranks, folder)


def check_kept(kind, share, ranks, folder):
    budget = int(share * plain_peak_bytes(kind, ranks=ranks))
    plain = results(run(kind, ranks=ranks, max_epochs=EPOCHS))
    fresh, ours, peaks = planned(kind, budget, saver(folder), ranks=ranks)
    assert parts.same(plain, fresh)
    resumed = {"ranks": ranks, "ckpt_path": folder / "epoch=0.ckpt"}
    # DDP's first step sums in buckets of its own, which four processes round in another way.
    plain = results(run(kind, max_epochs=EPOCHS, **resumed))
    again, _, later = planned(kind, budget, **resumed)
    assert parts.same(plain, again)
    assert ours.run.memory.session.plan.actions
    assert len(peaks) == len(later) == STEPS
    # settled batches run the same ops; a thread of gloo's may free a result late in some of them
    assert max(min(peaks), min(later), ours.run.memory.session.plan.peak_bytes) <= budget


def budgets():
    for kind in KINDS:
        point = {"FSDP2": COMMUNICATION, "DDP": DDP}.get(kind, INSIDE)
        for ranks in (4,) if kind == "both" else (2, 4):
            for share in (0.7,) if kind == "both" else (0.7, 0.5):  # half is less than the least of any plan of both
                yield Case(point, kind, f"{share} of the peak, {ranks} processes", kept, {"share": share}, ranks)


# --- resumed on another number of processes, plain and under a budget


def moved(case, folder):
    kind, then = KINDS[case.kind], case.options["then"]
    fork(case, save, kind, case.ranks, folder)
    fork(case, check_moved, kind, then, folder / "last.ckpt", ranks=then)


def save(kind, ranks, folder):
    run(kind, callback_of(policy="sqrt"), ranks=ranks).trainer.save_checkpoint(folder / "last.ckpt")


def check_moved(kind, ranks, path):
    whole = callback_of(memory_budget=HUGE)
    run(kind, whole, ranks=ranks)
    budget = int(0.8 * whole.run.memory.session.plan.peak_bytes)
    plain = results(run(kind, ranks=ranks, max_epochs=2, ckpt_path=path))
    ours = callback_of(memory_budget=budget)
    assert len(plain[0]) == STEPS
    assert parts.same(plain, results(run(kind, ours, ranks=ranks, max_epochs=2, ckpt_path=path)))
    assert ours.run.memory.session.plan.actions


def moves():
    for ranks, then in ((2, 4), (4, 2)):
        yield Case(RANKS, "FSDP2", f"from {ranks} processes to {then}", moved, {"then": then}, ranks)
    yield Case(INSIDE, "tensor parallel", "from 2 processes to 4", moved, {"then": 4}, 2)


# --- ranks: a cut by the callback is the cut by hand

BY_WEIGHTS = {"data": None}


class CutByHand(FullyShard):
    """Its linear layers are cut before they are sharded."""

    def __init__(self):
        super().__init__()
        decompose(self, rank=0.5, progress=False)


class CutBesideShards(TensorParallel):
    """A layer outside of the tensor-parallel plan is cut."""

    def __init__(self):
        super().__init__()
        decompose(self, rank=0.5, select="first", progress=False)


BY_HAND = {FullyShard: (CutByHand, {}), TensorParallel: (CutBesideShards, {"select": "first"})}


def cut(case, folder):
    fork(case, check_cut, KINDS[case.kind], dict(case.options), case.ranks)


def check_cut(kind, options, ranks):
    by_hand, select = BY_HAND[kind]
    called = run(kind, callback_of(**{"rank": 0.5, "ranks": BY_WEIGHTS, **select, **options}), ranks=ranks)
    wanted = run(by_hand, ranks=ranks)
    assert factorized_names(called) == factorized_names(wanted) != set()
    assert parts.same(results(wanted), results(called))


def restored(case, folder):
    fork(case, check_saved, folder)
    module = restore(FullyShard(), folder / "last.ckpt")
    assert factorized_names(module)
    assert parts.same(dict(module.state_dict()), torch.load(folder / "weights.pt"))


def check_saved(folder):
    module = run(FullyShard, callback_of(rank=0.5, ranks=BY_WEIGHTS, policy="sqrt"))
    module.trainer.save_checkpoint(folder / "last.ckpt")
    weights = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in module.state_dict().items()}
    if parts.rank() == 0:
        torch.save(weights, folder / "weights.pt")


def cuts():
    plan = {"policy": "sqrt"}
    yield Case(RANKS, "FSDP2", "ranks under a plan", cut, plan)
    yield Case(RANKS, "FSDP2", "ranks under a plan, 4 processes", cut, plan, 4)
    yield Case(RANKS, "tensor parallel", "ranks of layers outside of its plan", cut, plan)
    yield Case(RANKS, "FSDP2", "ranks restored in one process", restored)


# --- recovery: phases change rates and freeze alike in both

FACTORS = [{"epochs": 1, "train": "factors", "lr_scale": 0.5, "warmup_epochs": 1}, {"epochs": 1}]


def recovered(case, folder):
    fork(case, check_recovered, KINDS[case.kind], dict(case.options), case.ranks)


def check_recovered(kind, recovery, ranks):
    options = {"rank": 0.5, "ranks": BY_WEIGHTS, **BY_HAND[kind][1], "recovery": {"batchnorm_batches": 0, **recovery}}
    run_with = {"ranks": ranks, "max_epochs": 2}
    plain, ours = callback_of(policy="keep", **options), callback_of(policy="sqrt", **options)
    assert parts.same(results(run(kind, plain, **run_with)), results(run(kind, ours, **run_with)))
    assert ours.run.memory.session.plan.actions


def estimated(case, folder):
    fork(case, check_estimated)


def check_estimated():
    """Statistics are averaged at the end of an epoch, alike on all processes, and equal under a plan."""

    def statistics(batches, policy):
        options = {"rank": 0.5, "ranks": BY_WEIGHTS, "select": "first.0", "policy": policy}
        module = run(Normed, callback_of(recovery={"batchnorm_batches": batches}, **options))
        return [buffer.clone() for buffer in module.first[1].buffers()]

    averaged = statistics(4, "keep")
    assert parts.same(averaged, statistics(4, "sqrt"))
    assert not parts.same(averaged, statistics(0, "keep"))
    assert on_all_ranks(averaged)


def recoveries():
    yield Case(RECOVERY, "tensor parallel", "BatchNorm statistics", estimated)
    for kind, module in (("FSDP2", ""), ("tensor parallel", "head")):
        yield Case(RECOVERY, kind, "phases that freeze and warm up", recovered, {"phases": FACTORS})
        yield Case(RECOVERY, kind, "a teacher", recovered, {"distill": {"module": module, "keep": "device"}})


# --- refused by name


def refused(case, folder):
    fork(case, check_refused, KINDS[case.kind], case.options["said"], case.options["given"], case.ranks)


def check_refused(kind, said, given, ranks):
    with pytest.raises((ConfigError, InfeasibleBudgetError), match=said):
        run(kind, callback_of(**given), ranks=ranks)


GOAL = {"monitor": "val_acc", "reference": 0.5}
REFUSED = {
    (INSIDE, "batches in parts"): ("process", {"memory": {"sub_batches": 2}}),
    (INSIDE, "a budget below all plans"): ("least peak|does not fit", {"memory_budget": "1MiB"}),
    (RANKS, "ranks for the budget"): ("rank=0.25", {"rank": "auto", "memory_budget": "1GiB"}),
    (RECOVERY, "stages"): ("layers_per_stage", {"rank": 0.5, "recovery": {**GOAL, "layers_per_stage": 1}}),
    (RECOVERY, "cuts at epochs"): ("cut_epochs", {"rank": 0.5, "recovery": {**GOAL, "cut_epochs": [1, 2]}}),
    (RECOVERY, "a measured reference"): ("measure", {"rank": 0.5, "recovery": {**GOAL, "reference": "measure"}}),
    (RECOVERY, "cuts that are taken back"): ("max_drop", {"rank": 0.5, "recovery": {**GOAL, "max_drop": 0.1}}),
}


def refusals():
    for kind in ("FSDP2", "tensor parallel"):
        for (point, name), (said, given) in REFUSED.items():
            quick = kind == "FSDP2" and point != INSIDE
            yield Case(point, kind, f"refused: {name}", refused, {"said": said, "given": given}, fast=quick)
    alone = {"said": "one process", "given": {"memory_budget": HUGE}}
    yield Case(RANKS, "FSDP2", "refused: a budget for one process", refused, alone, 1, fast=True)
    said, given = REFUSED[INSIDE, "batches in parts"]
    yield Case(DDP, "DDP", "refused: batches in parts", refused, {"said": said, "given": given}, fast=True)


CASES = [*plans(), *budgets(), *moves(), *cuts(), *recoveries(), *refusals()]


# Most options of a plan are in the slow tests on one kind of shards at least, and so are four processes.
REST = {
    *((kind, f"{share} of the peak, 4 processes") for kind in KINDS for share in (0.7, 0.5)),
    *((kind, "0.7 of the peak, 2 processes") for kind in KINDS),
    *(("tensor parallel", name) for name in PLANS if name not in ("a budget", "sqrt")),
    *(("DDP", name) for name in ("a budget", "a static graph", "gradients that are views of buckets")),
    ("FSDP2", "offloading by a budget"),
    ("both", "a budget"),
    *(("tensor parallel", name) for name in ("from 2 processes to 4", "a teacher", "phases that freeze and warm up")),
    ("FSDP2", "from 4 processes to 2"),
    ("tensor parallel", "0.5 of the peak, 2 processes"),
    ("FSDP2", "ranks under a plan, 4 processes"),
}


# Each takes 15 s: every second one of the others.
IN_CI = [(case.kind, case.name) for case in CASES if not case.fast and (case.kind, case.name) not in REST][::2]


def row(case):
    rest = pytest.mark.slow if (case.kind, case.name) in IN_CI else pytest.mark.exhaustive
    return pytest.param(case, id=f"{case.point}: {case.kind}, {case.name}", marks=() if case.fast else rest)


@pytest.mark.parametrize("case", [row(case) for case in CASES])
def test_shards_train_to_the_bit_or_are_refused_by_name(case, tmp_path):
    case.check(case, tmp_path)


def test_the_table_has_each_point_and_no_row_twice():
    assert {case.point for case in CASES} == {RANKS, RECOVERY, COMMUNICATION, INSIDE, DDP}
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES) >= 40
