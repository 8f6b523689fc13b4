"""The recipe on two ranks: scores are of all the data; a run preempted by one rank's signal is the undisturbed one."""

import json
import os
import signal

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning import Callback

from ctdr_recipes import train as recipe
from tests import forks, parts
from tests.recipes.test_configs import CONF
from tests.recipes.test_train import TINY

RUN = ["trainer.max_epochs=2", "+trainer.strategy=ddp", "trainer.devices=2", "ctdr.rank=0.5", "ctdr.policy=keep"]
PREEMPTED = [
    "ckpt_path=last", "+callbacks.preemption._target_=ctdr_recipes.preemption.PreemptionCheckpoint",
    "+callbacks.preemption.path=${output_dir}/checkpoints/last.ckpt", "+callbacks.preemption.every_n_batches=1",
]  # fmt: skip
N_HELD_OUT = 719


class Requeued(Exception):
    pass


class SignalOneRank(Callback):
    """Signals the second rank alone, in the middle of an epoch."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 8 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)


def run(folder, name, *overrides, signalled=False):
    """Train in this process, one of two; writes its scores and weights."""

    def requeue(number, frame):
        raise Requeued

    signal.signal(signal.SIGUSR2, requeue)
    callbacks = recipe._callbacks
    recipe._callbacks = lambda config: [*callbacks(config), *([SignalOneRank()] if signalled else [])]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"output_dir={folder / name}", *TINY, *RUN, *overrides])
    try:
        scores = recipe.train(config)
    except Requeued:
        (folder / f"requeued{parts.rank()}").touch()
        return
    (folder / f"{name}{parts.rank()}.json").write_text(json.dumps(scores))


def scores_of(folder, name):
    """What each rank says of the whole data."""
    each = [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in (0, 1)]
    return [{key: value for key, value in scores.items() if key.startswith(("val/", "test/"))} for scores in each]


def test_scores_are_of_all_the_data_and_the_same_on_both_ranks(tmp_path):
    assert forks.run(run, tmp_path, "two", ranks=2) == [0, 0]
    first, second = scores_of(tmp_path, "two")
    assert first == second
    assert {"test/acc", "test/loss"} <= first.keys()
    last = tmp_path / "two" / "checkpoints" / "last.ckpt"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        more = [f"output_dir={tmp_path / 'one'}", "trainer.max_epochs=0", "ctdr=none", "model.scheduler=null"]
        alone = recipe.train(compose("train", [*TINY, *more, f"init_from={last}"]))
    # the ranks share 719 images evenly, so that one of them counts twice
    assert first["test/acc"] == pytest.approx(alone["test/acc"], abs=1 / N_HELD_OUT)
    assert first["test/loss"] == pytest.approx(alone["test/loss"], rel=0.02)


@pytest.mark.slow
def test_a_run_that_one_ranks_signal_preempts_is_the_undisturbed_one(tmp_path):
    assert forks.run(run, tmp_path, "whole", *PREEMPTED, ranks=2) == [0, 0]
    assert forks.run(signalled, tmp_path, "cut", ranks=2) == [0, 0]
    assert (tmp_path / "requeued0").exists()
    assert (tmp_path / "requeued1").exists()
    assert forks.run(run, tmp_path, "cut", *PREEMPTED, ranks=2) == [0, 0]
    assert scores_of(tmp_path, "cut") == scores_of(tmp_path, "whole")
    whole, cut = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "cut")
    )
    assert parts.same(dict(whole), dict(cut))


def signalled(folder, name):
    run(folder, name, *PREEMPTED, signalled=True)
