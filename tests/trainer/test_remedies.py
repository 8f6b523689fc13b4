"""What the error of a budget asks to change is given back and works: optimizer, place, codec, batch, rank."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import Choices, CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import parse_bytes
from ctdr_lightning.cli import main
from ctdr_lightning.memory import plan, record_fake
from ctdr_lightning.trainer.groups import grouped
from tests import parts

ASKED = re.compile(r"memory=Memory\(\.\.\., (\w+)='(\w+)'\), with which it takes ([\d.]+ \w+)")
WIDTH = 256


class Net(LightningModule):
    """A module that sums what its net makes of a batch."""

    def __init__(self, net, make=optim.Adam):
        super().__init__()
        self.net, self.make = net, make

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=1e-3)


class Noise(nn.Module):
    """Noise that cannot be made again."""

    def forward(self, x):
        return x * torch.empty_like(x).uniform_()


class Coins(nn.Module):
    """A dropout by hand, whose mask cannot be made again on a GPU either."""

    def forward(self, x):
        return x * torch.empty_like(x).bernoulli_(0.5).div_(0.5)


def heavy():
    """3 MiB of weights; activations are nothing beside them."""
    return Net(nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])), 4


def random_layers(layer):
    """What autograd saves of a layer that draws is most of the step: six times 2 MiB."""
    torch.manual_seed(0)
    return Net(nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(32, 32), layer())]), optim.SGD), 16384


def fit(made, budget, *callbacks, **options):
    module, batch_size = made
    torch.manual_seed(0)
    trained = {name: options.pop(name) for name in list(options) if name == "gradient_clip_val"}
    callback = CTDRCallback(
        **grouped({"rank": None, "memory_budget": budget, "verbose": False, "data": None, **options})
    )
    width = next(module.parameters()).shape[1]
    data = DataLoader(TensorDataset(torch.randn(3 * batch_size, width)), batch_size), None
    parts.fit(module, callback, *callbacks, data=data, max_epochs=1, **trained)
    return max(callback.run.memory.last_plan.peak_bytes, callback.run.memory.rest_peak_bytes)


def refused(made, budget, **options):
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(made, budget, **options)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "budget", "options", "argument"),
    [
        (heavy, "12MiB", {}, "optimizer_step"),
        (heavy, "12MiB", {"gradient_clip_val": 1.0}, "optimizer_state"),
        (heavy, "12MiB", {"keep_gradients": True}, "optimizer_state"),
        (lambda: random_layers(nn.Dropout), "22MiB", {}, "codecs"),
        (lambda: random_layers(Noise), "22MiB", {}, "offload"),
    ],
)
def test_the_callback_names_an_argument_with_a_figure_that_holds(make, budget, options, argument):
    error = refused(make(), budget, **options)
    found = ASKED.search(error.hint)
    assert found, error
    assert found[1] == argument
    assert found.start() < 10, "it is named first"
    peak = fit(make(), budget, **options, **{found[1]: found[2]})
    assert peak <= parse_bytes(budget)
    assert parse_bytes(found[3]) <= 1.01 * parse_bytes(budget)
    if argument.startswith("optimizer"):  # a plan within the budget may take more or less of it, as codecs' times vary
        assert peak == pytest.approx(parse_bytes(found[3]), rel=0.05)


def test_nothing_is_named_that_would_not_be_enough():
    error = refused(heavy(), "7MiB")
    assert "CTDRCallback" not in error.hint
    assert "a rank that leaves about 5" in error.hint


def test_a_rank_is_named_that_is_low_enough():
    error = refused(heavy(), "10MiB", gradient_clip_val=1.0, optimizer_state="disk")
    share = int(re.search(r"a rank that leaves about (\d+)% of the weights", error.hint)[1])
    peak = fit(heavy(), "10MiB", gradient_clip_val=1.0, optimizer_state="disk", rank=0.01 * share)
    assert peak <= parse_bytes("10MiB")


DEFAULT = "; or leave rank=None out, and layers are decomposed where nothing exact fits."


@pytest.mark.slow
def test_the_default_rank_is_named_and_fits():
    error = refused(heavy(), "7MiB", data="train")
    assert error.hint.endswith(DEFAULT)
    assert fit(heavy(), "7MiB", data="train", rank="if_needed") <= parse_bytes("7MiB")


def by_hand():
    module, batch_size = heavy()
    module.automatic_optimization = False
    return module, batch_size


def without_layers():
    return Net(nn.LayerNorm((1, 2**20))), 1


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (heavy, {"data": None}),
        (heavy, {"data": "train", "sub_batches": 2}),
        (heavy, {"data": "train", "choices": Choices({})}),
        (by_hand, {"data": "train"}),
        (without_layers, {"data": "train"}),
    ],
)
def test_the_default_rank_is_not_named_where_it_decomposes_nothing(make, options):
    assert "rank=None" not in refused(make(), "7MiB", **options).hint


def convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers), (3, 24, 24)


def linear():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]), (64,)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "share"), [(convolutions, 0.3), (convolutions, 0.8), (linear, 0.75)])
def test_a_batch_is_named_that_is_small_enough(make, share):
    def step(size):
        net, shape = make()
        return record_fake(net, torch.randn(size, *shape), lambda net, x: net(x).sum(), device="a100")

    least = least_of(step(200))
    budget = int(share * least)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(step(200), budget)
    named = re.search(r"a batch about (\d+)% as large", caught.value.hint)
    assert named, caught.value
    assert plan(step(2 * int(named[1])), budget).peak_bytes <= budget


def least_of(trace):
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(trace, 1)
    return caught.value.least_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "option"),
    [("tests.trainer.test_remedies:drops", "--codecs"), ("tests.trainer.test_remedies:draws", "--offload")],
)
def test_the_command_names_an_option_that_works(capsys, named, option):
    common = ["plan", named, "--input", "16384,32", "--optimizer", "sgd", "--device", "a100", "--budget", "17.5MiB"]
    common.append("--no-rounding")  # modules in tiles fit
    assert main(common) == 2
    found = re.search(r"HINT: Write (--\w+) (\w+), with which it takes [\d.]+ MiB; or ", capsys.readouterr().err)
    assert found
    assert found[1] == option
    assert main([*common, found[1], found[2]]) == 0, capsys.readouterr().err


def drops():
    """For the command: layers whose masks cannot be made again."""
    return random_layers(Coins)[0].net


def draws():
    """For the command: layers whose noise cannot be made again."""
    return random_layers(Noise)[0].net
