"""Training from scratch: dense until the spectra have settled, then one cut with ranks of that moment."""

import math
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from ctdr_lightning import CTDRCallback, Ranks, Recovery
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.recovery import Phase
from ctdr_lightning.recovery.decisions import settled
from ctdr_lightning.trainer.accuracy.coach import epochs_of
from ctdr_lightning.trainer.structure import factorized_names
from tests import forks, parts

RECOVERY = Recovery(cut_epochs="auto", batchnorm_batches=2, phases=[Phase(1)])
EPOCHS, QUIET_AFTER, LATEST = 10, 2, 8


class Settling(parts.Blobs):
    """Learns at a high rate for two epochs, then at nearly none, so that its spectra settle."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < QUIET_AFTER else 1e-4)
        return [optimizer], [rate]


class Watch(Callback):
    """Notes the dense spectra and the factorized layers at each epoch's start; precedes ours in the list."""

    def __init__(self):
        self.ranks, self.layers, self.weights = [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.layers.append(factorized_names(pl_module))
        if not self.layers[-1]:
            self.weights.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})
            matrices = [layer.weight[0].flatten(1).double() for layer in find_layers(pl_module)]
            spectra = [torch.linalg.svdvals(matrix) for matrix in matrices]
            self.ranks.append([float((s**2).sum() / s[0] ** 2) for s in spectra])

    def changes(self):
        pairs = zip(self.ranks, self.ranks[1:], strict=False)
        moved = [[abs(a - b) / max(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        return [sum(row) / len(row) for row in moved]


def ours(rank=0.5, recovery=RECOVERY, **options):
    return CTDRCallback(rank=rank, recovery=recovery, policy="keep", verbose=False, **options)


def settling(seed=0):
    parts.seed_everything(seed, verbose=False)
    return Settling()


def fit(callback, *others, seed=0, **options):
    module = settling(seed)
    trainer = parts.fit(module, *others, callback, **{"max_epochs": EPOCHS, **options})
    return module, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with a checkpoint of each epoch."""
    folder, callback, watch = tmp_path_factory.mktemp("whole"), ours(), Watch()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    module, _ = fit(callback, watch, saver, enable_checkpointing=True)
    return folder, callback, watch, module


def test_all_layers_are_cut_once_at_the_first_epoch_with_settled_spectra(whole):
    _, callback, watch, module = whole
    changes, cut = watch.changes(), callback.run.coach.progress.stage_epoch
    assert cut == next(n for n in range(EPOCHS) if settled(changes[:n], n, EPOCHS))
    assert QUIET_AFTER < cut < LATEST, "settled, and not at the bound"
    assert callback.run.coach.progress.changes == pytest.approx(changes[:cut], rel=0.1, abs=1e-4)
    assert [bool(layers) for layers in watch.layers] == [False] * (cut + 1) + [True] * (EPOCHS - cut - 1)
    assert factorized_names(module) == set(callback.run.surgeon.choices.factorized)
    assert callback.run.surgeon.report.compression > 1.8


def test_ranks_are_those_of_the_weights_at_the_cut(whole):
    _, callback, watch, _ = whole
    cut = callback.run.coach.progress.stage_epoch
    there = ours(ranks=Ranks(data=None))
    fit(there)
    warm = settling()
    warm.load_state_dict(watch.weights[cut])
    expected = CTDRCallback(rank=0.5, ranks=Ranks(data=None), policy="keep", verbose=False)
    parts.fit(warm, expected, max_epochs=1, limit_train_batches=1)
    assert there.run.surgeon.choices.same_layers(expected.run.surgeon.choices)


def test_training_data_serve_at_the_cut_and_move_nothing_of_the_run(whole):
    _, callback, watch, _ = whole
    assert not math.isnan(callback.run.surgeon.report.divergence), "told by outputs on training batches"
    plain_watch = Watch()
    fit(CTDRCallback(rank=None, policy="keep", verbose=False), plain_watch)
    for before, after in zip(watch.weights, plain_watch.weights, strict=False):
        assert parts.same(before, after)


@pytest.mark.parametrize("offset", [-2, -1, 0, 1])
def test_a_resumed_run_ends_to_the_bit_as_the_undisturbed_one(whole, offset):
    folder, callback, _, module = whole
    path = folder / f"epoch={callback.run.coach.progress.stage_epoch + offset}.ckpt"
    again, _ = fit(resumed := ours(), seed=9, ckpt_path=path)
    assert resumed.run.coach.progress == callback.run.coach.progress
    assert parts.same(again.state_dict(), module.state_dict())


def test_a_checkpoint_from_before_the_cut_gives_no_ranks_to_a_new_callback(whole):
    folder, callback, _, module = whole
    with pytest.raises(ConfigError, match="choices cut no layer"):
        CTDRCallback.from_checkpoint(folder / "epoch=0.ckpt")
    follower = CTDRCallback.from_checkpoint(folder / "epoch=0.ckpt", ranks={"choices": None}, verbose=False)
    again, _ = fit(follower, seed=9, ckpt_path=folder / "epoch=0.ckpt")
    assert parts.same(again.state_dict(), module.state_dict())
    late = CTDRCallback.from_checkpoint(folder / f"epoch={EPOCHS - 2}.ckpt")
    assert late.options.choices.same_layers(callback.run.surgeon.choices)


def test_given_choices_wait_for_the_warm_network_too(whole):
    choices = whole[1].run.surgeon.choices
    callback = ours(None, ranks=Ranks(choices=choices))
    module, _ = fit(callback)
    assert callback.run.coach.progress.stage_epoch == whole[1].run.coach.progress.stage_epoch
    assert callback.run.surgeon.choices.same_layers(choices)
    assert factorized_names(module) == set(choices.factorized)


def test_spectra_that_never_settle_are_cut_when_a_fifth_of_the_run_is_left():
    callback = ours(recovery=Recovery(cut_epochs="auto", batchnorm_batches=0))
    module = parts.blobs()
    parts.fit(module, callback, max_epochs=5)
    assert callback.run.coach.progress.stage_epoch == 4
    assert factorized_names(module)


def test_a_limit_of_steps_bounds_the_warm_up_as_one_of_epochs():
    callback = ours()
    parts.fit(parts.blobs(), callback, max_epochs=-1, max_steps=20)  # five epochs of four batches
    assert callback.run.coach.progress.stage_epoch == 4
    assert epochs_of(parts.quiet_trainer(max_epochs=-1, max_steps=-1)) is None


def test_a_rule_that_no_layer_meets_leaves_the_network_dense_with_a_warning():
    module = parts.blobs()
    with pytest.warns(UserWarning, match="no layer is worth a cut before epoch 2"):
        parts.fit(module, ours("error=1e-9"), max_epochs=3)
    assert not factorized_names(module)


def test_a_cut_that_costs_too_much_is_rolled_back_once():
    strict = Recovery(
        cut_epochs="auto", batchnorm_batches=0, phases=[Phase(1)], monitor="val_loss", mode="min", reference=-1e9,
        max_drop=0.0,
    )  # fmt: skip
    module, callback = parts.blobs(), ours(recovery=strict)
    parts.fit(module, callback, max_epochs=6)
    assert callback.run.coach.progress.rolled_back
    assert not factorized_names(module)


def train_on_two_ranks(folder):
    callback = ours()
    module, trainer = fit(callback, strategy="ddp", devices=2)
    state = {"progress": callback.run.coach.progress.to_dict(), "weights": module.state_dict()}
    torch.save(state | {"choices": callback.run.surgeon.choices.to_dict()}, folder / f"{trainer.global_rank}.pt")


@pytest.mark.slow
def test_two_ranks_cut_at_the_same_epoch_with_the_same_factors(tmp_path):
    assert forks.run(train_on_two_ranks, tmp_path, ranks=2) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["progress"]["stage"] == 1
    assert QUIET_AFTER < first["progress"]["stage_epoch"] < LATEST
    statistics = ("running_mean", "running_var")  # of each rank's own batches
    for state in (first, second):
        state["weights"] = {k: v for k, v in state["weights"].items() if not k.endswith(statistics)}
    assert parts.same(first, second)


@pytest.mark.parametrize(
    ("options", "others", "named"),
    [
        ({"rank": "auto", "memory_budget": "1GiB"}, [], "chooses ranks when the network is warm"),
        ({"rank": {"nothing.*": 0.5}}, [], "nothing"),
        ({"rank": 10_000}, [], "above the largest rank"),
        ({"select": "nothing"}, [], "select"),
        ({}, [EMAWeightAveraging()], "averages the old ones"),
    ],
)
def test_what_cannot_wait_is_refused_before_training(options, others, named):
    with pytest.raises(ConfigError, match=named) as caught:
        parts.fit(parts.blobs(), ours(**options), *others)
    assert caught.value.hint


def test_a_run_of_one_epoch_has_no_room_for_a_warm_up():
    with pytest.raises(ConfigError, match="one epoch in all"):
        parts.fit(parts.blobs(), ours(), max_epochs=1)


def test_a_checkpoint_with_damaged_spectra_is_refused(whole, tmp_path):
    state = torch.load(whole[0] / "epoch=1.ckpt", weights_only=True)
    state["callbacks"]["CTDRCallback"]["recovery"]["progress"]["changes"] = "none"
    torch.save(state, tmp_path / "damaged.ckpt")
    with pytest.raises(CheckpointError, match="changes"):
        fit(ours(), ckpt_path=tmp_path / "damaged.ckpt")


def hints(**options):
    """Hints at the warm-up that a short fit gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts.fit(wide := options.pop("module"), CTDRCallback(policy="keep", verbose=False, **options), max_epochs=2)
    assert factorized_names(wide) or options.get("rank") is None
    return sum("looks untrained" in str(one.message) for one in caught)


def test_a_cut_at_the_start_of_an_untrained_network_names_the_warm_up():
    assert hints(module=parts.blobs(width=16), rank=0.5) == 1
    assert hints(module=parts.blobs(width=16), rank=0.5, recovery=True) == 1


@pytest.mark.slow
def test_no_hint_comes_to_whoever_cuts_late_or_by_other_rules_or_a_trained_network():
    assert hints(module=parts.blobs(width=16), rank=0.5, recovery=RECOVERY) == 0
    assert hints(module=parts.blobs(width=16), rank=0.5, recovery={"cut_epochs": [1]}) == 0
    assert hints(module=parts.blobs(width=16), rank=4) == 0
    assert hints(module=parts.blobs(width=16), rank=None) == 0
    trained = Settling(width=16)
    parts.fit(trained, max_epochs=12)
    assert hints(module=trained, rank=0.5) == 0
