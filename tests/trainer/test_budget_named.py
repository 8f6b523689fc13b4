"""The budget that an error asks for is given back and works: planner, command, callback, rank="auto"."""

import re
import warnings
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.nets import Attention
from ctdr_lightning import CTDRCallback, Memory, Ranks
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import parse_bytes
from ctdr_lightning.cli import main
from ctdr_lightning.memory import Prepared, max_batch, plan, record_fake
from tests import parts

NAMED = re.compile(r"aise (?:memory_budget|--budget) to ([\d.]+ [KMG]?i?B)")


def named(error):
    """The budget that an error asks for; the last one where it has several remedies."""
    found = NAMED.findall(str(error))
    assert found, error
    return found[-1]


def convolutions(width=8):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


STEPS = {
    "convolutions": lambda: (convolutions(), torch.randn(8, 3, 16, 16)),
    "large weights": lambda: (nn.Sequential(*[nn.Linear(200, 200) for _ in range(4)]), torch.randn(4, 200)),
    "attention": lambda: (nn.Sequential(*[Attention(16) for _ in range(3)]), torch.randn(2, 40, 16)),
    "one layer": lambda: (nn.Linear(7, 3), torch.randn(5, 7)),
}
POLICIES = ["auto", "sqrt", "optimal", "optimal_fast", "rotor", "dtr", "capuchin", "checkmate", "keep"]


SHARES = (0.01, 0.5, 0.98)
FEW = [("convolutions", "auto", 0.5), ("convolutions", "sqrt", 0.5), ("one layer", "auto", 0.98)]


def each():
    """All kinds, policies and shares; the slow tests have each pair of them once."""
    for k, kind in enumerate(STEPS):
        for p, policy in enumerate(POLICIES):
            for s, share in enumerate(SHARES):
                rest = pytest.mark.slow if (k + p + s) % len(SHARES) == 0 else pytest.mark.exhaustive
                yield pytest.param(kind, policy, share, marks=[] if (kind, policy, share) in FEW else rest)


@cache
def step_of(kind):
    net, batch = STEPS[kind]()
    trace = record_fake(net, batch, lambda net, x: net(x).sum(), device="a100")
    return Prepared(trace.with_static(12_345))


@pytest.mark.parametrize(("kind", "policy", "share"), list(each()))
def test_the_planner(kind, policy, share):
    step = step_of(kind)
    try:
        least = plan(step, 1, policy).peak_bytes
    except InfeasibleBudgetError as error:
        least = error.least_peak_bytes
    try:
        made = plan(step, max(int(share * least), 1), policy)
    except InfeasibleBudgetError as error:
        if "fits it, with a step of" in error.hint:  # another policy is the remedy
            made = plan(step, max(int(share * least), 1), re.search(r"Policy '(\w+)'", error.hint)[1])
        else:
            asked = named(error)
            made = plan(step, asked, policy if policy == "auto" else best_of(step, asked, policy))
            assert made.peak_bytes <= parse_bytes(asked)
    assert made.peak_bytes <= made.budget_bytes


def best_of(step, asked, policy):
    """The policy itself where its least peak is the least of all, else the one that every error compares with."""
    try:
        plan(step, asked, policy)
    except InfeasibleBudgetError:
        return "auto"
    return policy


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "Adam for each": lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 1e-2, max_iter=2),
}


class Wide(parts.Blobs):
    def __init__(self, optimizer, width=24):
        super().__init__(width=width)
        self.make = OPTIMIZERS[optimizer]

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_the_callback_with_the_optimizers_state_counted(optimizer, batch_size):
    def run(budget):
        parts.seed_everything(0, verbose=False)
        callback = CTDRCallback(rank=None, memory_budget=budget, memory=Memory(over_budget="raise"), verbose=False)
        parts.fit(Wide(optimizer), callback, data=parts.loaders(batch_size), max_epochs=1)
        return callback

    with pytest.raises(InfeasibleBudgetError) as caught:
        run("1KiB")
    asked = named(caught.value)
    callback = run(asked)
    assert callback.run.memory.session.plan.peak_bytes <= parse_bytes(asked)


def test_the_callback_with_accumulated_batches():
    """Later batches add to the gradients of the first one, and need more: the first error counts them."""

    def run(budget):
        parts.seed_everything(0, verbose=False)
        callback = CTDRCallback(rank=None, memory_budget=budget, memory=Memory(over_budget="raise"), verbose=False)
        parts.fit(Wide("SGD with momentum", width=96), callback, max_epochs=1, accumulate_grad_batches=3)
        return callback

    with pytest.raises(InfeasibleBudgetError) as caught:
        run("1KiB")
    asked = named(caught.value)
    callback = run(asked)
    assert len(callback.run.memory.session.plans) > 1
    assert all(made.peak_bytes <= parse_bytes(asked) for made in callback.run.memory.session.plans)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0.3, marks=pytest.mark.slow), None])
def test_the_callback_in_the_middle_of_an_epoch(rank):
    """The optimizer's state is made by its first step, and batches grow: neither finds the named budget too small."""
    sizes = [4, 8, 16, 32, 8]

    def run(budget):
        parts.seed_everything(0, verbose=False)
        batches = [parts.images(size, seed=size).tensors for size in sizes]
        callback = CTDRCallback(
            rank=rank,
            ranks=Ranks(data=None),
            policy="auto",
            memory_budget=budget,
            memory=Memory(over_budget="raise"),
            verbose=False,
        )
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        parts.fit(parts.Blobs(width=16), callback, data=(loader, None), max_epochs=2)

    budget, asked = "1KiB", []
    for _ in sizes:  # each larger batch may ask for more; what it asks for is enough for it
        try:
            run(budget)
            break
        except InfeasibleBudgetError as error:
            budget = named(error)
            asked.append(parse_bytes(budget))
    else:
        run(budget)
    assert asked == sorted(set(asked))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["auto", "sqrt"])
def test_the_command(capsys, optimizer, policy):
    common = ["plan", "tests.test_cli:net", "--input", "4,3,24,24", "--optimizer", optimizer, "--policy", policy]
    assert main([*common, "--budget", "100KiB"]) == 2
    asked = named(capsys.readouterr().err)
    assert main([*common, "--budget", asked]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_command_for_the_largest_batch(capsys):
    common = ["max-batch", "tests.test_cli:net", "--input", "3,24,24"]
    assert main([*common, "--budget", "1KiB"]) == 2
    asked = named(capsys.readouterr().err)
    assert main([*common, "--budget", asked]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_largest_batch():
    def search(budget):
        net, batch = STEPS["convolutions"]()
        return max_batch(net, lambda size: batch[:1].expand(size, -1, -1, -1), lambda n, x: n(x).sum(), budget)

    with pytest.raises(InfeasibleBudgetError) as caught:
        search("2KiB")
    assert search(named(caught.value)).size >= 1


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1024, pytest.param("150KiB", marks=pytest.mark.slow)])
def test_rank_auto(budget):
    def run(asked):
        callback = CTDRCallback(
            rank="auto", memory_budget=asked, max_slowdown=50.0, memory=Memory(over_budget="raise"), verbose=False
        )
        parts.fit(parts.blobs(width=32), callback, max_epochs=1)
        return callback

    with pytest.raises(InfeasibleBudgetError) as caught:
        run(budget)
    asked = named(caught.value)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*with the smallest plan found.*")
        callback = run(asked)
    assert callback.fit.peak_bytes <= parse_bytes(asked)
    assert callback.run.memory.session.plan.peak_bytes <= parse_bytes(asked)
