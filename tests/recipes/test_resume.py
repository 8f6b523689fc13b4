"""A run that is preempted anywhere and resumed ends to the bit as one that was not."""

import os
import signal
from copy import copy

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning import Callback
from torch.utils.data import TensorDataset

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes import train as recipe
from ctdr_recipes.resume import ResumableLoader, check_same, flat
from tests.recipes.test_configs import CONF
from tests.recipes.test_train import TINY

RECOVERED = ["ctdr.rank=0.4", "+ctdr.recovery.batchnorm_batches=2"]
PREEMPTED = [
    "ckpt_path=last", "trainer.max_epochs=2",
    "+callbacks.preemption._target_=ctdr_recipes.preemption.PreemptionCheckpoint",
    "+callbacks.preemption.path=${output_dir}/checkpoints/last.ckpt",
]  # fmt: skip


class Requeued(Exception):
    pass


class Preempt(Callback):
    """Signals this process when so many steps are done."""

    def __init__(self, step):
        self.step = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the recipe; returns its weights and scores. Its launcher's handler ends the run by an exception."""

    def requeue(number, frame):
        raise Requeued

    before = signal.signal(signal.SIGUSR2, requeue)
    callbacks = recipe._callbacks

    def call(folder, *overrides, preempted_at=None):
        more = [Preempt(preempted_at)] if preempted_at is not None else []
        monkeypatch.setattr(recipe, "_callbacks", lambda config: [*callbacks(config), *more])
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("train", [f"output_dir={tmp_path / folder}", *TINY, *PREEMPTED, *overrides])
        scores = recipe.train(config)
        last = torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True)
        return last["state_dict"], {name: value for name, value in scores.items() if name.startswith(("val", "test"))}

    yield call
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow
@pytest.mark.parametrize("ctdr", ["none", "default"])
@pytest.mark.parametrize("step", [2, 5, 8])
def test_a_preempted_run_is_the_undisturbed_one(run, ctdr, step):
    overrides = [
        f"ctdr={ctdr}",
        *(["ctdr.rank=0.4", "+ctdr.recovery.batchnorm_batches=2"] if ctdr == "default" else []),
    ]
    weights, scores = run("whole", *overrides)
    with pytest.raises(Requeued):
        run("cut", *overrides, preempted_at=step)
    again, scored = run("cut", *overrides)
    assert scored == scores
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def loader(**options):
    data = TensorDataset(torch.arange(20))
    return ResumableLoader(data, 3, shuffle=True, **options)


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("seen", [0, 1, 6])
def test_a_loader_goes_on_at_its_batch_and_draws_later_epochs_alike(n_workers, seen):
    first = loader(num_workers=n_workers)
    torch.manual_seed(1)
    batches = iter(first)
    for _ in range(seen):
        next(batches)
    state, random = first.state_dict(), torch.get_rng_state()
    rest = [batch[0].tolist() for batch in batches]
    later = [batch[0].tolist() for batch in first]
    again = loader(num_workers=n_workers)
    again.load_state_dict(state)
    resumed = iter(again)
    torch.set_rng_state(random)
    assert [batch[0].tolist() for batch in resumed] == rest
    assert [batch[0].tolist() for batch in again] == later


@pytest.mark.parametrize(("limit", "seen"), [(None, 7), (4, 4)])
def test_a_loader_whose_epoch_was_over_begins_a_new_one(limit, seen):
    first = loader(epoch_batches=None if limit is None else lambda: limit)
    batches = iter(first)
    for _ in range(seen):
        next(batches)
    again = loader(epoch_batches=None if limit is None else lambda: limit)
    again.load_state_dict(first.state_dict())
    assert len(list(again)) == 7


def test_a_copy_of_a_loader_draws_without_moving_it():
    first = loader()
    batches = iter(first)
    one = next(batches)[0].tolist()
    state = first.state_dict()
    seen = [number for batch in copy(first) for number in batch[0].tolist()]
    assert sorted(seen) == list(range(20))
    assert first.state_dict() == state
    rest = [number for batch in batches for number in batch[0].tolist()]
    assert sorted(one + rest) == list(range(20))


def test_configs_are_compared_by_what_is_trained():
    config = {"seed": 0, "ctdr": {"rank": 0.5, "select": ["a", "b"]}, "trainer": {"max_epochs": 3}, "name": "x"}
    longer = {**config, "trainer": {"max_epochs": 5}, "name": "y"}
    check_same(dict(flat(config)), dict(flat(longer)))
    other = {**config, "seed": 1, "ctdr": {"rank": 0.5, "select": ["a"]}}
    with pytest.raises(ConfigError, match=r"seed was 0, now 1; ctdr\.select\.1 was b, now absent"):
        check_same(dict(flat(config)), dict(flat(other)))
