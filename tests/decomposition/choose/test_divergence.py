"""How far outputs are from the dense ones, whatever the outputs are."""

import math
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.decomposition.choose.batches import Batches, merged, untouched
from ctdr_lightning.decomposition.choose.divergence import Judge, kind_of_output
from tests.interrupts import counting

Pair = namedtuple("Pair", ["mean", "spread"])


class Wrapped(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.body, self.form = nn.Linear(8, 6), form

    def forward(self, x):
        return self.form(self.body(x))


FORMS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, [y * 2]),
    "named tuple": lambda y: Pair(y, y.exp()),
    "mapping": lambda y: {"logits": y, "hidden": y * 1e9},
    "probabilities": lambda y: y.sigmoid(),
    "shares": lambda y: y.softmax(-1),
    "one number a sample": lambda y: y[:, :1],
    "whole numbers beside": lambda y: (y, y.argmax(-1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_zero_for_the_same_and_more_for_more(form):
    torch.manual_seed(0)
    model, batches = Wrapped(FORMS[form]), Batches.draw([torch.randn(32, 8) for _ in range(4)], 4, None)
    judge = Judge(model, batches)
    assert judge.divergence(model) == pytest.approx(0, abs=1e-6)
    found = []
    for _ in range(3):
        with torch.no_grad():
            model.body.weight.add_(0.1 * torch.ones_like(model.body.weight).tril())
        found.append(judge.divergence(model))
    assert found == sorted(found)
    assert found[0] > 1e-6


CERTAIN = {
    "logits": (50 * torch.eye(4), math.log(4)),
    "shares": (torch.eye(4), math.log(4)),
    "probabilities": (torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), 2 * math.log(2)),
    "values": (3 * torch.eye(4) - 1, 0.5),
}


@pytest.mark.parametrize("kind", CERTAIN)
def test_the_spread_of_certain_outputs_is_their_entropy_and_that_of_equal_ones_is_nothing(kind):
    rows, spread = CERTAIN[kind]
    model = nn.Linear(rows.shape[1], rows.shape[1], bias=False)
    nn.init.eye_(model.weight)
    labels = torch.arange(4).repeat(64) if kind == "logits" else torch.zeros(256)
    for outputs, expected in ((rows.repeat(64, 1), spread), (rows[:1].repeat(256, 1).clone(), 0.0)):
        judge = Judge(model, Batches.draw([(outputs, labels)], 1, lambda net, batch: net(batch[0]).sum()))
        if kind != "values" or expected:  # equal values have no variance to be compared with
            assert judge.spread() == pytest.approx(expected, rel=0.01, abs=1e-5)


def test_logits_are_told_by_labels():
    x, labels = torch.randn(32, 8), torch.randint(6, (32,))
    assert kind_of_output("", torch.randn(32, 6), (x, labels)) == ("logits", 1)
    assert kind_of_output("", torch.randn(4, 6, 5, 5), (x, torch.zeros(4, 5, 5, dtype=torch.int64))) == ("logits", 1)
    assert kind_of_output("", torch.randn(4, 9, 6), (x, torch.zeros(4, 9, dtype=torch.int64))) == ("logits", 2)
    assert kind_of_output("", torch.randn(32, 6), (x, torch.randn(32, 6)))[0] == "values"
    assert kind_of_output("", F.log_softmax(torch.randn(32, 6), -1), x)[0] == "logits"


def test_an_output_that_is_not_finite_is_infinitely_far():
    model, batches = Wrapped(lambda y: y), Batches.draw([torch.randn(4, 8)], 1, None)
    judge = Judge(model, batches)
    with torch.no_grad():
        model.body.weight.fill_(torch.nan)
    assert judge.divergence(model) == float("inf")


def test_a_step_that_calls_parts_is_judged_by_its_last_outputs():
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "head": nn.Linear(8, 6)})

    def step(model, batch):
        return F.cross_entropy(model["head"](model["encoder"](batch[0])), batch[1])

    batches = Batches.draw([(torch.randn(32, 8), torch.randint(6, (32,)))], 1, step)
    judge = Judge(model, batches)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    with torch.no_grad():  # another basis between the parts: the same outputs
        model["encoder"].weight.copy_(turn @ model["encoder"].weight)
        model["encoder"].bias.copy_(turn @ model["encoder"].bias)
        model["head"].weight.copy_(model["head"].weight @ turn.T)
    assert judge.divergence(model) == pytest.approx(0, abs=1e-5)


def test_batches_of_one_shape_are_merged():
    first, second, odd = ((torch.randn(n, 3), {"y": torch.arange(n), "k": 2}) for n in (4, 2, 3))
    odd = (torch.randn(3, 5), odd[1])
    x, rest = merged([first, second, odd])
    assert torch.equal(x, torch.cat((first[0], second[0])))
    assert torch.equal(rest["y"], torch.cat((first[1]["y"], second[1]["y"])))
    assert rest["k"] == 2


def test_a_model_is_left_untouched():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with untouched(model, training=False):
        model.train()(torch.randn(8, 4))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupt_at_any_line_leaves_no_switch_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def run():
        with untouched(model, training=False):
            model(torch.ones(2, 4))

    with counting(run) as lines:
        run()
    assert lines.count > 10
    for at in range(1, lines.count + 1):
        with pytest.raises(KeyboardInterrupt), counting(run, at=at):
            run()
        stance = torch.compiler.set_stance("default").prev
        assert (stance.stance, torch.is_grad_enabled(), model.training) == ("default", True, True), at


def test_eight_batches_are_looked_at_and_the_others_serve_the_refinement():
    drawn = [torch.full((2, 2), float(number)) for number in range(12)]
    found = Batches.draw(drawn, 11, None)
    assert [int(batch[0, 0]) for batch in found.judging] == [3, 7]
    assert [int(batch[0, 0]) for batch in found.fitting] == [0, 1, 2, 4, 5, 6]
    assert [int(batch[0, 0]) for batch in found.more] == [8, 9, 10]


def test_a_batch_that_judges_is_never_refined_on_though_it_comes_twice():
    batches = [torch.randn(2, 2) for _ in range(4)]
    found = Batches.draw(batches * 3, 12, None)
    assert not any(batch is other for batch in (*found.fitting, *found.more) for other in found.judging)
