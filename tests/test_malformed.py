"""Malformed input of every kind ends in our error type with a hint, runs no code, leaves no half-written file."""

import copy
import io
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from ctdr_lightning import CTDRCallback, Ranks, Recovery, decompose, restore
from ctdr_lightning.basics import files
from ctdr_lightning.basics.errors import CheckpointError, CTDRError
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.checkpoints import CompleteFileIO
from ctdr_lightning.trainer.groups import grouped
from tests import parts

WORDS = st.sampled_from(
    ["", "all", "0.5", "8GiB", "vbmf", "keep", "measure", "nan", "net.*", "../../etc", "\x00", "🙂"]
)
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS | st.text(max_size=5)
NESTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
MANY = settings(max_examples=80, suppress_health_check=list(HealthCheck))


def ends_well(call):
    """Run; an error must be ours and must say what to do."""
    found = None
    try:
        call()
    except CTDRError as error:
        found = error
    assert found is None or (found.problem and found.hint and "\nHINT: " in str(found))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A good checkpoint with every part that one can have."""
    folder = tmp_path_factory.mktemp("good")
    recovery = Recovery(
        cut_epochs=[0, 1], phases=[Phase(1)], distill={"module": "net"}, monitor="val_acc", reference=0.5, max_drop=0.9
    )
    callback = CTDRCallback(rank=0.5, recovery=recovery, policy="keep", verbose=False)
    parts.fit(parts.blobs(), callback, ModelCheckpoint(folder, filename="good"), enable_checkpointing=True)
    return folder / "good.ckpt"


@pytest.fixture(scope="module")
def content(checkpoint):
    """What that checkpoint holds, less the random state and what only the optimizers read."""
    found = torch.load(checkpoint, weights_only=True)
    del found["optimizer_states"], found["callbacks"]["CTDRCallback"]["random"]
    return found


@MANY
@given(st.dictionaries(st.sampled_from(sorted(Recovery.__dataclass_fields__)) | WORDS, NESTS, max_size=4))
def test_any_schedule(entries):
    ends_well(lambda: Recovery.read(entries))


@MANY
@given(st.dictionaries(st.sampled_from(sorted(Phase.__dataclass_fields__)) | WORDS, NESTS, max_size=4))
def test_any_phase(entries):
    ends_well(lambda: Recovery.read({"phases": [entries]}))


@MANY
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_schedule_file(content):
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"ctdr-{os.getpid()}.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        ends_well(lambda: Recovery.read(str(path)))
        ends_well(lambda: CTDRCallback(ranks=Ranks(choices=str(path))))
    finally:
        path.unlink()


ARGUMENTS = [
    "rank",
    "method",
    "select",
    "memory_budget",
    "policy",
    "recovery",
    "choices",
    "max_slowdown",
    "allow_untested",
    "verbose",
]


@MANY
@given(st.dictionaries(st.sampled_from(ARGUMENTS), NESTS, min_size=1, max_size=3))
def test_any_argument(arguments):
    strategy = SimpleNamespace(is_global_zero=True, broadcast=lambda found: found)

    def use():
        callback = CTDRCallback(**grouped(arguments))
        callback.run.surgeon.decide(parts.Blobs(), strategy)

    ends_well(use)


def mutate(draw, thing):
    """Replace, drop or add one entry somewhere in a nest."""
    thing = copy.deepcopy(thing)
    inner = thing
    while True:
        keys = sorted(inner, key=str) if isinstance(inner, dict) else list(range(len(inner)))
        if not keys:
            return thing
        key = draw(st.sampled_from(keys))
        if isinstance(inner[key], dict | list) and inner[key] and draw(st.booleans()):
            inner = inner[key]
            continue
        kind = draw(st.sampled_from(["replace", "drop", "add"]))
        if kind == "drop":
            del inner[key]
        elif kind == "add" and isinstance(inner, dict):
            inner[draw(WORDS)] = draw(NESTS)
        else:
            inner[key] = draw(NESTS)
        return thing


@pytest.mark.slow
@MANY
@given(st.data())
def test_any_change_to_a_plan(data):
    plan = decompose(parts.Blobs(), rank=0.5, progress=False).choices.to_dict()
    changed = mutate(data.draw, plan)
    ends_well(lambda: decompose(parts.Blobs(), choices=changed, progress=False))


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_any_change_to_the_state_in_a_checkpoint(content, tmp_path_factory, data):
    changed = {**content, "callbacks": {"CTDRCallback": mutate(data.draw, content["callbacks"]["CTDRCallback"])}}
    path = tmp_path_factory.mktemp("changed") / "changed.ckpt"
    torch.save(changed, path)
    ends_well(lambda: CTDRCallback.from_checkpoint(path))
    ends_well(lambda: restore(parts.Blobs(), path))
    ends_well(lambda: resume(changed))


def resume(changed):
    """Take up a checkpoint as Lightning does: the module as saved, then the callback's two hooks."""
    module = restore(parts.Blobs(), changed["state_dict"])
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), global_rank=0, world_size=1)
    callback = CTDRCallback(rank=0.5, recovery=Recovery(distill={"module": "net"}), policy="keep", verbose=False)
    callback.run.coach.prepare(parts.Blobs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no random state in this file, which is said
        callback.on_load_checkpoint(trainer, module, copy.deepcopy(changed))
        callback.load_state_dict(changed["callbacks"]["CTDRCallback"])


@pytest.mark.parametrize("part", ["choices", "stages"])
def test_a_part_of_the_decomposition_that_is_gone_is_damage(content, part):
    changed = copy.deepcopy(content)
    del changed["callbacks"]["CTDRCallback"]["surgery"][part]
    with pytest.raises(CheckpointError, match="choices are damaged"):
        resume(changed)


@MANY
@given(data=st.data())
def test_any_damage_to_the_bytes_of_a_checkpoint(checkpoint, tmp_path_factory, data):
    content = checkpoint.read_bytes()
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        start = data.draw(st.integers(0, len(content) - 9))
        content = content[:start] + data.draw(st.binary(min_size=1, max_size=8)) + content[start + 8 :]
    path = tmp_path_factory.mktemp("damaged") / "damaged.ckpt"
    path.write_bytes(content)
    ends_well(lambda: restore(parts.Blobs(), path))
    ends_well(lambda: CTDRCallback.from_checkpoint(path))
    assert path.read_bytes() == content


class Hostile:
    """Runs a command when unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def hostile_files(folder):
    mark = folder / "ran"
    attack = Hostile(f"touch {mark}")
    plain = folder / "plain.ckpt"
    plain.write_bytes(pickle.dumps({"state_dict": attack}))
    saved = folder / "saved.ckpt"
    torch.save({"state_dict": {"net.0.weight": attack}, "callbacks": {"CTDRCallback": attack}}, saved)
    legacy = folder / "legacy.ckpt"
    torch.save({"state_dict": attack}, legacy, _use_new_zipfile_serialization=False)
    archive = folder / "archive.ckpt"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickle.dumps(attack))
        zipped.writestr("archive/version", "3\n")
    return mark, [plain, saved, legacy, archive]


def test_hostile_pickles_are_refused_and_not_run(tmp_path):
    mark, hostile = hostile_files(tmp_path)
    for path in hostile:
        for read in (
            lambda path=path: restore(parts.Blobs(), path),
            lambda path=path: CTDRCallback.from_checkpoint(path),
            lambda path=path: CompleteFileIO().load_checkpoint(path),
            lambda path=path: CTDRCallback(ranks=Ranks(choices=str(path))),
            lambda path=path: parts.fit(
                parts.blobs(), CTDRCallback(rank=0.5, policy="keep", verbose=False), ckpt_path=path
            ),
        ):
            with pytest.raises(CTDRError) as caught:
                read()
            assert caught.value.hint
    assert not mark.exists()


def test_a_write_that_fails_leaves_the_old_file_whole_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "state.ckpt"
    io_plugin = CompleteFileIO()
    io_plugin.save_checkpoint({"value": torch.ones(3)}, path)

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError("No space left on device")

    inner = files.os.fdopen
    monkeypatch.setattr(files.os, "fdopen", lambda handle, mode: inner(handle, mode) and Full())
    with pytest.raises(OSError, match="No space left"):
        io_plugin.save_checkpoint({"value": torch.zeros(3)}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.ckpt"]
    assert torch.equal(io_plugin.load_checkpoint(path)["value"], torch.ones(3))
