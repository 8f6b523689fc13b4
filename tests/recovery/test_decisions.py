from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.recovery import Phase, Recovery
from ctdr_lightning.recovery.decisions import Progress, first_cut_epoch, next_move, observed, phase_at, settled, split

METRIC = {"monitor": "acc", "reference": 0.9, "tolerance": 0.01}


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 12)), st.integers(1, 8))
def test_stages_hold_every_layer_once_in_order(n_layers, per_stage, n_cuts):
    layers = list(range(n_layers))
    staged = Recovery(layers_per_stage=per_stage) if per_stage else Recovery(cut_epochs=list(range(n_cuts)))
    stages = split(layers, staged)
    assert [layer for stage in stages for layer in stage] == layers
    assert all(stages)
    if per_stage:
        assert all(len(stage) == per_stage for stage in stages[:-1])
    else:
        assert len(stages) == min(n_cuts, n_layers)
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert split(layers, None) == split(layers, Recovery()) == [layers]


def test_phases_follow_each_other_from_the_cut():
    recovery = Recovery(phases=[Phase(2), Phase(1, "factors")])
    progress = Progress(stage=1, stage_epoch=3)
    found = [phase_at(recovery, progress, epoch) for epoch in range(3, 8)]
    assert [phase and phase.train for phase, _ in found] == ["all", "all", "factors", None, None]
    assert [spent for _, spent in found] == [0, 1, 0, 0, 1]
    assert phase_at(recovery, Progress(stage=0), 5)[0] is None


def test_the_next_stage_is_cut_when_recovered_or_when_the_phases_are_over():
    recovery = Recovery(phases=[Phase(3)], layers_per_stage=1, **METRIC)
    progress = Progress(stages=2, stage=1, stage_epoch=0, reference=0.9)
    assert next_move(recovery, replace(progress, metric=0.5), 1) == "go on"
    assert next_move(recovery, replace(progress, metric=0.895), 1) == "cut"
    assert next_move(recovery, replace(progress, metric=0.5), 3) == "cut"


def test_cut_epochs_are_kept_whatever_the_metric():
    recovery = Recovery(cut_epochs=[2, 5], phases=[Phase(1)], **METRIC)
    assert first_cut_epoch(recovery) == 2
    progress = Progress(stages=2, reference=0.9, metric=0.9)
    assert [next_move(recovery, progress, epoch) for epoch in (0, 1, 2)] == ["go on", "go on", "cut"]
    progress = replace(progress, stage=1, stage_epoch=2)
    assert [next_move(recovery, progress, epoch) for epoch in (3, 4, 5)] == ["go on", "go on", "cut"]


@pytest.mark.parametrize(
    ("mode", "metric", "move"), [("max", 0.86, "roll back"), ("max", 0.88, "go on"), ("min", 0.95, "roll back")]
)
def test_a_last_stage_that_stays_below_max_drop_is_rolled_back(mode, metric, move):
    recovery = Recovery(phases=[Phase(2)], mode=mode, max_drop=0.03, stop_when_recovered=False, **METRIC)
    progress = Progress(stages=1, stage=1, reference=0.9, metric=metric)
    assert next_move(recovery, progress, 1) == "go on"
    assert next_move(recovery, progress, 2) == move
    assert next_move(recovery, replace(progress, rolled_back=True), 3) == "go on"


def test_a_metric_that_is_not_a_number_counts_as_failed():
    recovery = Recovery(phases=[Phase(1)], max_drop=0.5, **METRIC)
    assert next_move(recovery, Progress(stage=1, reference=0.9, metric=float("nan")), 1) == "roll back"


def test_training_stops_when_the_last_stage_has_recovered_and_not_before():
    recovery = Recovery(phases=[Phase(3)], layers_per_stage=1, **METRIC)
    progress = Progress(stages=2, stage=2, stage_epoch=4, reference=0.9, metric=0.9)
    assert next_move(recovery, progress, 5) == "stop"
    assert next_move(replace(recovery, stop_when_recovered=False), progress, 5) == "go on"
    assert next_move(recovery, replace(progress, metric=None), 5) == "go on"


def test_progress_survives_a_checkpoint_and_refuses_anything_else():
    progress = Progress(stages=3, stage=1, metric=0.5)
    assert Progress.from_dict(progress.to_dict()) == progress
    for bad in (None, [], {"stagex": 1}):
        with pytest.raises(CheckpointError):
            Progress.from_dict(bad)


FALLING = [0.1, 0.6, 0.3, 0.07, 0.03, 0.01]


def cut_at(changes, epochs):
    """Epoch at which a warm network is cut, the spectra of epoch n known at its start."""
    recovery = Recovery(cut_epochs="auto")
    moves = (next_move(recovery, Progress(changes=changes[:epoch]), epoch, epochs) for epoch in range(len(changes) + 1))
    return next((epoch for epoch, move in enumerate(moves) if move == "cut"), None)


def test_a_warm_network_is_cut_when_its_spectra_settle_and_when_a_fifth_of_the_run_is_left_at_the_latest():
    assert cut_at(FALLING, 40) == cut_at(FALLING, None) == 5
    assert cut_at(FALLING, 5) == 4
    assert cut_at([0.5] * 10, 12) == 10
    assert cut_at([0.5] * 10, None) is None
    assert [cut_at([0.5] * 10, epochs) for epochs in (1, 2, 3, 5)] == [1, 1, 2, 4]
    assert cut_at([0.0, 0.0], 40) == 1, "frozen weights are settled"
    assert first_cut_epoch(Recovery(cut_epochs="auto")) is None
    assert split([1, 2, 3], Recovery(cut_epochs="auto")) == [[1, 2, 3]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(1e-3, 1e3))
def test_the_unit_of_the_changes_does_not_matter(changes, unit):
    scaled = [change * unit for change in changes]
    clear = abs(changes[-1] - 0.05 * max(changes)) > 1e-9
    assert not clear or settled(changes, 1, None) == settled(scaled, 1, None)


def test_a_network_that_diverged_has_not_settled():
    lost = observed(observed(Progress(), [4.0]), [float("nan")])
    assert not settled(lost.changes, 1, 20)
    assert settled(lost.changes, 16, 20)


def test_a_warm_network_is_cut_once():
    recovery = Recovery(cut_epochs="auto", stop_when_recovered=False)
    progress = Progress(stages=1, stage=1, stage_epoch=4, changes=FALLING)
    assert [next_move(recovery, progress, epoch, 20) for epoch in (5, 10, 19)] == ["go on"] * 3


def test_changes_are_relative_and_begin_with_the_second_measurement():
    first = observed(Progress(), [4.0, 0.0])
    assert (first.spectra, first.changes) == ([4.0, 0.0], [])
    second = observed(first, [2.0, 0.0])
    assert second.changes == [0.25]
    assert first.changes == [], "an interrupted epoch must find the state of before"
    assert observed(second, [2.0]).changes == [0.25], "layers changed: nothing to compare"
    assert Progress.from_dict(second.to_dict()) == second


@pytest.mark.parametrize("entry", [{"changes": 3}, {"spectra": ["4"]}, {"changes": [None]}])
def test_damaged_spectra_are_refused(entry):
    with pytest.raises(CheckpointError, match=next(iter(entry))):
        Progress.from_dict(entry)
