"""Modules that run in tiles as no plan of the whole fits: which, in how many, and what is left whole."""

import copy

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import record, record_fake
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.lean.choice import choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import kept_peak_bytes

WIDTH = 16


class Block(nn.Module):
    """A residual block of a transformer without its attention."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(16 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def step(net, x):
    return net(x).square().mean()


def found_for(net, x, share):
    plain = BatchAccount(record_fake(net, x, step))
    budget_bytes = int(share * kept_peak_bytes(plain))
    made = choose_lean(net, lambda lean: BatchAccount(record_fake(net, x, lean.step(step))), budget_bytes, plain=plain)
    return made, plain, budget_bytes


def blocks(n, **options):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(**options) for _ in range(n)], nn.Linear(WIDTH, 4))


@pytest.mark.parametrize("shape", [(512, WIDTH), (1, 512, WIDTH), (16, 32, WIDTH)])
def test_all_modules_alike_run_in_tiles_and_the_plan_keeps_the_budget(shape):
    net, x = blocks(3), torch.randn(*shape)
    floor = BatchAccount(record_fake(net, x, step)).floor_bytes
    made, plain, budget_bytes = found_for(
        net, x, 0.75 * floor / kept_peak_bytes(BatchAccount(record_fake(net, x, step)))
    )
    assert set(made.tiles.tiles) == {"0.mlp", "1.mlp", "2.mlp"}
    assert made.account.floor_bytes <= budget_bytes < plain.floor_bytes
    real = BatchAccount(record(lambda: made.step.step(step)(net, x)))
    assert kept_peak_bytes(real) == kept_peak_bytes(made.account)


def test_the_gradients_are_those_of_the_whole():
    net, x = blocks(2), torch.randn(1, 512, WIDTH)
    made, *_ = found_for(net, x, 0.3)
    step(net, x).backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    made.step.step(step)(net, x).backward()
    for mine, theirs in zip((p.grad for p in net.parameters()), wanted, strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-9


def test_a_step_that_a_plan_fits_runs_whole():
    assert found_for(blocks(3), torch.randn(512, WIDTH), 0.9)[0] is None


def test_dropout_runs_in_tiles_with_the_numbers_of_the_whole():
    net, x = blocks(2, dropout=0.3), torch.randn(16, 32, WIDTH)
    made, plain, _ = found_for(net, x, 0.5)
    assert set(made.tiles.tiles) == {"0.mlp", "1.mlp"}
    found = []
    for lean in (LeanStep(), made.step):
        torch.manual_seed(1)
        net.zero_grad()
        lean.step(step)(net, x).backward()
        found.append([p.grad.clone() for p in net.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-9
    net.zero_grad()
    real = BatchAccount(record(lambda: made.step.step(step)(net, x)))
    assert kept_peak_bytes(real) == kept_peak_bytes(made.account) < kept_peak_bytes(plain)


def test_modules_that_mix_run_whole():
    net = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 256), nn.BatchNorm1d(256), nn.ReLU()), nn.Linear(256, 4))
    made, *_ = found_for(net, torch.randn(512, WIDTH), 0.4)
    assert made is None


def test_neighbours_between_batch_norms_run_as_one():
    layers = [nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH), nn.BatchNorm1d(WIDTH)]
    net = nn.Sequential(nn.Sequential(*layers, *[copy.deepcopy(layer) for layer in layers]), nn.Linear(WIDTH, 4))
    x = torch.randn(512, WIDTH)
    made, plain, budget_bytes = found_for(net, x, 0.4)
    assert set(made.tiles.tiles) == {f"0.{i}" for i in (0, 1, 2, 4, 5, 6)}
    assert made.account.floor_bytes <= budget_bytes < plain.floor_bytes
    made.step.step(step)(net, x).backward()
    assert made.step.left_alone == {}


def test_tokens_that_may_mix_are_not_cut():
    net = nn.Sequential(nn.Sequential(nn.Conv1d(WIDTH, 256, 3, padding=1), nn.ReLU()), nn.Conv1d(256, 4, 1))
    assert found_for(net, torch.randn(1, WIDTH, 512), 0.4)[0] is None


@pytest.mark.slow
def test_few_recordings_are_made():
    net, x = blocks(3), torch.randn(512, WIDTH)
    plain = BatchAccount(record_fake(net, x, step))
    n = 0

    def account(lean):
        nonlocal n
        n += 1
        return BatchAccount(record_fake(net, x, lean.step(step)))

    choose_lean(net, account, 1 << 10, plain=plain)
    assert 1 <= n <= 16


def test_a_lean_step_names_what_ran_whole():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    lean = LeanStep((), {"0": 2, "1": 2})
    lean.step(step)(net, torch.randn(8, 4)).backward()
    assert lean.left_alone == {"0": "normalises each sample by its whole batch"}


def test_samples_are_tried_once():
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return super().forward(x)

    net, x = nn.Sequential(Counted(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    lean = LeanStep((), {"0": 2})
    calls = []
    for _ in range(3):
        Counted.calls = 0
        lean.step(step)(net, x).backward()
        calls.append(Counted.calls)
    assert calls[0] > calls[1] == calls[2] == 4


def test_in_words():
    made, *_ = found_for(blocks(3), torch.randn(512, WIDTH), 0.2)
    assert str(made).startswith("0.mlp and 2 other modules run in 4 tiles each, the same up to rounding")
    assert str(made).endswith(": no plan of them whole fits.")


def test_the_model_itself_may_run_in_tiles():
    net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 12 * 12, 4))
    made, *_ = found_for(net, torch.randn(64, 1, 28, 28), 0.45)
    assert dict(made.tiles.tiles) in ({"": 4}, {"": 16})
    assert str(made).startswith("the model runs in")


def test_modules_inside_one_in_tiles_run_in_its_tiles():
    net, x = blocks(2), torch.randn(64, WIDTH)
    lean = LeanStep((), {"": 4, "0.mlp": 4})
    with lean.of(net):
        assert "forward" in vars(net)
        assert "forward" not in vars(net[0].mlp)
        step(net, x).backward()
    assert lean.left_alone == {}
