"""A step runs through its layers from the outermost in, is done from the innermost out, and runs again at will."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ctdr_lightning.trainer.training_step.guided import Taught, Unguided
from ctdr_lightning.trainer.training_step.layers import Chain, Layer, Step, loss_of
from ctdr_lightning.trainer.training_step.metered import Metered
from ctdr_lightning.trainer.training_step.patches import LogCalls
from ctdr_lightning.trainer.training_step.pipeline import StepRunner
from tests.basics.test_op_mode import Counting


class Noting(Layer):
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def forward(self, step, rest):
        self.notes.append(f"{self.name} forward")
        return super().forward(step, rest)

    def backward(self, loss, rest):
        self.notes.append(f"{self.name} backward")
        super().backward(loss, rest)

    def done(self):
        self.notes.append(f"{self.name} done")

    def leave(self):
        self.notes.append(f"{self.name} left")


class Twice(Layer):
    def forward(self, step, rest):
        rest.forward(step)
        return rest.forward(step)


def step(run=lambda x, scale=1.0: x.sum() * scale, **options):
    module = nn.Linear(2, 2)
    module.trainer = SimpleNamespace(optimizers=[])
    return Step(module, run, ((torch.ones(3),), {"scale": 2.0}), **options)


def test_the_outermost_runs_first_and_is_told_last():
    notes = []
    chain = Chain([Noting("outer", notes), Noting("inner", notes)])
    assert chain.forward(step()) == 6
    chain.backward(torch.ones(()), lambda loss: notes.append("backward"))
    chain.done()
    chain.leave()
    both = ("outer", "inner")
    assert notes[:5] == [*(f"{n} forward" for n in both), *(f"{n} backward" for n in both), "backward"]
    assert notes[5:] == ["inner done", "outer done", "inner left", "outer left"]


def test_a_layer_may_run_the_rest_again():
    notes = []
    assert Chain([Twice(), Noting("inner", notes)]).forward(step()) == 6
    assert notes == ["inner forward"] * 2


def test_the_output_is_finished_outside_of_the_teacher():
    seen = []
    taught = Taught(lambda module, run: seen.append(module) or run() + 1)
    found = step(finish=lambda output: 10 * output)
    assert Chain([Unguided(), taught]).forward(found) == 70
    assert seen == [found.module]


def test_meters_are_off_after_a_step_that_fails():
    meters, notes = Metered(), []
    meters.batch_begins(metered=True)
    meters.count_next()

    def fails(x, scale):
        torch.ones(4) @ torch.ones(4)
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="own"):
        Chain([meters, Noting("inner", notes)]).forward(step(fails))
    assert notes == ["inner left", "inner forward"]
    assert meters.measured is not None
    meters.batch_begins(metered=False)
    assert Chain([meters]).forward(step()) == 6
    assert meters.batch_done() is None


def test_operations_are_counted_once_asked():
    meters = Metered()
    meters.count_next()
    chain = Chain([meters])
    chain.forward(step(lambda x, scale: torch.ones(2, 3) @ torch.ones(3, 4)))
    meters.backward_done()
    assert meters.step_flops == 2 * 2 * 3 * 4
    chain.forward(step(lambda x, scale: torch.ones(8, 8) @ torch.ones(8, 8)))
    meters.backward_done()
    assert meters.step_flops == 2 * 2 * 3 * 4


def test_counting_operations_runs_each_op_whole_and_lets_a_step_ask_for_gradients():
    """torch's counter ran the fused RMSNorm in parts, and refused ``torch.autograd.grad`` under modules."""
    lib = torch.library.Library("counted", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    lib.impl("twice", lambda x: x * 2, "CPU")
    lib.impl("twice", torch.library.fallthrough_kernel, "AutogradCPU")
    net, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def penalised(*_, **__):
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        torch.ops.counted.twice(x.detach())
        return gradient.square().sum()

    meters = Metered()
    meters.count_next()
    with Counting() as seen:
        Chain([meters]).forward(step(penalised)).backward()
        meters.backward_done()
    assert "counted.twice.default" in seen.names
    assert meters.step_flops > 0


@pytest.mark.parametrize(
    ("session", "retries", "names"),
    [
        (None, True, ["Metered", "Unguided", "Tracked", "Updating"]),
        ("session", False, ["Lean", "Planned", "Metered", "Guided", "Tracked", "Updating"]),
        ("session", True, ["Lean", "Planned", "Retry", "Metered", "Guided", "Tracked", "Updating"]),
    ],
)
def test_the_layers_of_a_run(session, retries, names):
    runner = StepRunner(SimpleNamespace(session=session), None, retries=retries)
    assert [type(layer).__name__ for layer in runner._layers(LogCalls())] == names


def test_the_loss_of_an_output():
    loss = torch.ones(())
    assert loss_of(loss) is loss_of({"loss": loss}) is loss
    assert loss_of({"other": loss}) is loss_of(None) is None
