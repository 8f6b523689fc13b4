"""Resuming, loading and refusing checkpoints of decomposed models: each says what is so, and names the way."""

import re
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import ctdr_lightning
from ctdr_lightning import CTDRCallback, Ranks, Recovery, restore
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.checkpoints import CompleteFileIO
from ctdr_lightning.trainer.groups import grouped
from tests import parts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run at rank 0.5, after one epoch."""
    folder = tmp_path_factory.mktemp("run")
    saver = ModelCheckpoint(folder, filename="run")
    callback = CTDRCallback(rank=0.5, policy="keep", verbose=False)
    parts.fit(parts.blobs(), callback, saver, enable_checkpointing=True, max_epochs=1)
    return folder / "run.ckpt"


def resume(path, capfd=None, **arguments):
    """Resume; returns what was warned and printed."""
    callback = CTDRCallback(policy="keep", **grouped(arguments))
    module = parts.blobs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts.fit(module, callback, ckpt_path=path, max_epochs=2)
    return module, [str(w.message) for w in caught if "ignored of this run" in str(w.message)]


def test_a_resumed_run_shows_the_layers_that_it_trains_and_names_what_it_ignores(checkpoint, caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        module, said = resume(checkpoint, rank=0.1, method="svd")
    layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, "ranks")}
    (table,) = [record.message for record in caplog.records if record.message.startswith("CTDR:\nlayer")]
    rows = {line.split()[0]: line for line in table.splitlines() if line.startswith("net.")}
    assert rows.keys() == layers.keys()
    for name, layer in layers.items():
        assert f"{layer.method} " in rows[name]
        assert " x ".join(map(str, layer.ranks)) in rows[name]
        assert "as in the checkpoint" in rows[name]
    assert f"-> {sum(p.numel() for p in module.parameters()):,}" in table
    assert said == ["The checkpoint's layers are trained unchanged; ignored of this run: rank=0.1, method='svd'."]


def test_a_resumed_run_with_the_same_arguments_ignores_nothing(checkpoint):
    assert resume(checkpoint, rank=0.5, verbose=False)[1] == []


def test_a_fresh_runs_table_is_of_its_own_cut(caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        parts.fit(parts.blobs(), CTDRCallback(rank=0.5, policy="keep", ranks=Ranks(data=None)), max_epochs=1)
    (table,) = [record.message for record in caplog.records if record.message.startswith("CTDR:\nlayer")]
    assert re.search(r"0\.\d{3}  least found", table), "with the errors that the cut had"
    assert "memory" not in table.splitlines()[1], "no column without entries"


def test_load_from_checkpoint_works_or_names_the_call_that_does(checkpoint):
    with pytest.raises(RuntimeError, match=r"ctdr_lightning\.load_from_checkpoint\(MyModule, path\)"):
        parts.Blobs.load_from_checkpoint(checkpoint)
    loaded = ctdr_lightning.load_from_checkpoint(parts.Blobs, checkpoint)
    assert type(loaded) is parts.Blobs
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    own = loaded.state_dict()
    assert len(own) == len(saved) - 1, "all but the note"
    assert all(torch.equal(own[name], saved[name]) for name in own)
    restored = restore(parts.Blobs(), checkpoint).state_dict()
    assert all(torch.equal(own[name], restored[name]) for name in own)


def test_a_dense_runs_checkpoint_holds_no_note(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="run")
    parts.fit(parts.blobs(), CTDRCallback(rank=None, policy="sqrt", verbose=False), saver, enable_checkpointing=True)
    assert parts.Blobs.load_from_checkpoint(tmp_path / "run.ckpt") is not None


@pytest.mark.parametrize(
    ("kind", "path", "options", "said"),
    [
        (torch.nn.Linear, "run.ckpt", {}, "is not a LightningModule class"),
        (parts.Blobs, "absent.ckpt", {}, "does not exist"),
        (parts.Blobs, None, {"width": 9}, "do not fit layer|does not fit Blobs"),
        (parts.Blobs, __file__, {}, "does not fit Blobs"),
    ],
)
def test_what_cannot_be_loaded_is_said(checkpoint, kind, path, options, said):
    with pytest.raises((ConfigError, CheckpointError), match=said) as caught:
        ctdr_lightning.load_from_checkpoint(kind, path or checkpoint, **options)
    assert caught.value.hint


NONSENSE = {
    "text": "yes",
    "list": [1, 2],
    "empty": {},
    "words": {"torch": "state"},
    "flat": {"torch": torch.zeros(5)},
    "no rank": {"torch": torch.zeros(0, 5)},
    "alone": {"torch": torch.zeros(1, 5056, dtype=torch.uint8)},
    "short": {"torch": torch.zeros(1, 3, dtype=torch.uint8)},
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_nonsense_random_state_is_refused_before_training(checkpoint, tmp_path, nonsense):
    state = torch.load(checkpoint, weights_only=True)
    state["callbacks"]["CTDRCallback"]["random"] = NONSENSE[nonsense]
    torch.save(state, tmp_path / "bad.ckpt")
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="random state is damaged"):
        resume(tmp_path / "bad.ckpt", rank=0.5, verbose=False)
    assert len(torch.get_rng_state()) == len(before)


@pytest.mark.parametrize("entry", ["callbacks", "state_dict"])
@pytest.mark.parametrize("value", [[1], "text", 3, None])
def test_an_entry_that_is_no_mapping_is_refused(checkpoint, tmp_path, entry, value):
    state = torch.load(checkpoint, weights_only=True)
    state[entry] = value
    torch.save(state, tmp_path / "bad.ckpt")
    for use in (
        lambda: resume(tmp_path / "bad.ckpt", rank=0.5, verbose=False),
        lambda: CompleteFileIO().load_checkpoint(tmp_path / "bad.ckpt"),
        lambda: CTDRCallback.from_checkpoint(tmp_path / "bad.ckpt"),
    ):
        with pytest.raises(CheckpointError, match=f"its {entry!r} is a {type(value).__name__}"):
            use()


@pytest.mark.parametrize("version", [0, 1, 99, "2", True, None])
def test_restore_refuses_callback_state_of_a_version_that_it_does_not_know(checkpoint, version):
    state = torch.load(checkpoint, weights_only=True)
    state["callbacks"]["CTDRCallback"]["version"] = version
    with pytest.raises(CheckpointError, match=f"has version {version!r}"):
        restore(parts.Blobs(), state)


@pytest.mark.parametrize(("epochs", "said"), [([0, 1], "the layers of 1 more stage stay dense"), ([0], "ends here. ")])
def test_a_schedule_that_the_resumed_run_lacks_is_named(tmp_path, epochs, said):
    recovery = Recovery(cut_epochs=epochs, phases=[Phase(1)], batchnorm_batches=0)
    saver = ModelCheckpoint(tmp_path, filename="run")
    first = CTDRCallback(rank=0.5, policy="keep", recovery=recovery, verbose=False)
    parts.fit(parts.blobs(), first, saver, enable_checkpointing=True, max_epochs=1)
    for given, expected in ((None, True), (recovery, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback = CTDRCallback(rank=0.5, policy="keep", recovery=given, verbose=False)
            parts.fit(parts.blobs(), callback, ckpt_path=tmp_path / "run.ckpt", max_epochs=2)
        assert any(said in str(w.message) for w in caught) is expected
