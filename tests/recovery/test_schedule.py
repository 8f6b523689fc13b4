from dataclasses import fields

import pytest

from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.recovery import Distillation, Phase, Recovery
from ctdr_lightning.recovery.schedule import _NOTES, read_yaml


def test_a_saved_schedule_reads_back_and_every_entry_has_a_note(tmp_path):
    schedule = Recovery(
        phases=[Phase(2, "factors", 0.5, 1.0), Phase(1, ["net.*"])],
        cut_epochs=[0, 3],
        monitor="val_acc",
        reference=0.9,
        max_drop=0.02,
        distill=Distillation(module="net"),
    )
    schedule.save(tmp_path / "recovery.yaml")
    assert Recovery.read(tmp_path / "recovery.yaml") == schedule
    assert Recovery.read(str(tmp_path / "recovery.yaml")) == schedule
    assert set(_NOTES) == {field.name for kind in (Recovery, Phase) for field in fields(kind)}
    for line in (tmp_path / "recovery.yaml").read_text().splitlines():
        name = line.split(":")[0].strip(" -")
        assert name not in _NOTES or f"# {_NOTES[name]}" in line


def test_a_warm_up_reads_back_from_its_file(tmp_path):
    Recovery(cut_epochs="auto").save(tmp_path / "recovery.yaml")
    read = Recovery.read(tmp_path / "recovery.yaml")
    assert read == Recovery(cut_epochs="auto")
    assert read.warms_up
    assert read.staged
    assert not Recovery(cut_epochs=[1]).warms_up


def test_what_the_callback_accepts_as_recovery():
    assert Recovery.read(None) is None
    assert Recovery.read(False) is None
    assert Recovery.read(True) == Recovery()
    assert Recovery.read({"phases": [{"epochs": 2}]}) == Recovery(phases=(Phase(2),))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"phase": []}, "Did you mean 'phases'"),
        ({"phases": {"epochs": 1}}, "phases"),
        ({"phases": [{"epochs": 0}]}, "epochs"),
        ({"phases": [{"epochs": 1, "warmup_epochs": 2}]}, "warmup_epochs"),
        ({"phases": [{"lr_scale": -1.0}]}, "lr_scale"),
        ({"phases": [{"train": []}]}, "train"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"mode": "best"}, "mode"),
        ({"cut_epochs": [3, 1]}, "cut_epochs"),
        ({"cut_epochs": [0, 1], "layers_per_stage": 2}, "not both"),
        ({"cut_epochs": "auto", "layers_per_stage": 2}, "not both"),
        ({"cut_epochs": "auto", "distill": {}}, "untrained network"),
        ({"cut_epochs": "soon"}, "cut_epochs='soon' is not known"),
        ({"reference": 0.9}, "monitor"),
        ({"monitor": "acc", "max_drop": 0.1}, "reference"),
        ({"monitor": "acc", "reference": "mesure"}, "reference"),
        ({"distill": {"weight": 2.0}}, "weight"),
        ({"distill": {"keep": "disk"}}, "keep"),
        ({"batchnorm_batches": -1}, "batchnorm_batches"),
        (["phases"], "entries"),
    ],
)
def test_wrong_entries_are_named(entries, named):
    with pytest.raises(ConfigError, match=named) as caught:
        Recovery.read(entries)
    assert caught.value.hint


def test_a_file_that_is_no_plain_yaml_is_refused_and_not_executed(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(f"!!python/object/apply:os.system ['touch {tmp_path}/ran']")
    with pytest.raises(CheckpointError, match="not plain YAML"):
        read_yaml(path)
    assert not (tmp_path / "ran").exists()
