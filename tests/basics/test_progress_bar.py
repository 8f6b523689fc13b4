import itertools
import sys
import time

import pytest

from ctdr_lightning.basics import progress_bar as progress
from tests.interrupts import counting


def test_silent_when_quick_and_whole(capsys):
    assert list(progress.track(range(5), "count", total=5)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_work_of_unknown_length_counts_towards_no_end(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    assert list(progress.track("abc", "tried")) == list("abc")
    assert capsys.readouterr().err.splitlines()[-1] == "tried: 2"


@pytest.mark.parametrize("enabled", [True, False])
def test_plain_lines_when_it_lasts(monkeypatch, capsys, enabled):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    assert list(progress.track("abc", "spell", total=3, enabled=enabled)) == list("abc")
    assert ("spell: 2 of 3" in capsys.readouterr().err) == enabled


def test_plain_lines_become_rarer_the_longer_it_lasts(monkeypatch, capsys):
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now_s[0])
    show, _ = progress.open_bar("choose", 600)
    for now_s[0] in range(600):
        show(f"{now_s[0]}", now_s[0])
    seen = [int(line) for line in lines(capsys)]
    pauses = [later - before for before, later in itertools.pairwise(seen)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (4, 61)
    assert len(seen) < 25


def test_bar_on_a_terminal_is_taken_down_even_after_an_error(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stopped = []
    real = progress.open_bar

    def opened(label, total):
        show, stop = real(label, total)
        return show, lambda: (stop(), stopped.append(True))

    monkeypatch.setattr(progress, "open_bar", opened)

    def items():
        yield 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(progress.track(items(), "try", total=2))
    assert stopped == [True]


def lines(capsys):
    return capsys.readouterr().err.splitlines()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)


@pytest.mark.usefixtures("_impatient")
def test_what_is_tracked_inside_shares_the_bar_and_says_all_that_is_under_way(capsys):
    for _ in progress.track(range(2), "choose", total=2):
        with progress.doing("record"):
            pass
        list(progress.track("ab", "factorize", total=2))
    found = lines(capsys)
    assert "choose: 1 of 2, record" in found
    assert "choose: 1 of 2, factorize: 1 of 2" in found
    assert not any(line.startswith(("record", "factorize")) for line in found)


@pytest.mark.usefixtures("_impatient")
def test_one_after_the_other_is_one_bar(monkeypatch, capsys):
    opened = []
    real = progress.open_bar
    monkeypatch.setattr(progress, "open_bar", lambda label, total: (opened.append(label), real(label, total))[1])
    with progress.one_bar():
        list(progress.track("ab", "choose", total=2))
        list(progress.track("ab", "factorize", total=2))
    assert opened == ["choose"]
    assert "factorize: 1 of 2" in lines(capsys)
    list(progress.track("ab", "alone", total=2))
    assert opened == ["choose", "alone"]


@pytest.mark.usefixtures("_impatient")
def test_inside_a_disabled_bar_all_is_quiet(capsys):
    with progress.one_bar(enabled=False), progress.doing("plan"):
        assert list(progress.track("ab", "choose", total=2)) == ["a", "b"]
    assert lines(capsys) == []


def test_what_lasts_without_a_word_is_said_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    with progress.one_bar(), progress.doing("plan the step"):
        time.sleep(0.5)
    assert set(lines(capsys)) == {"plan the step"}
    with progress.one_bar(), progress.doing("quick"):
        pass
    time.sleep(0.2)
    assert lines(capsys) == []


@pytest.mark.slow
def test_no_bar_outlives_an_interrupt_at_any_of_its_lines(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    down, up = [], []

    def opened(label, total):
        up.append(label)
        return lambda text, n_done: None, lambda: down.append(label)

    monkeypatch.setattr(progress, "open_bar", opened)

    def work():
        with progress.one_bar():
            for _ in progress.track("ab", "choose", total=2):
                with progress.doing("record"):
                    pass

    with counting(work) as counter:
        work()
    assert counter.count > 60
    for at in range(1, counter.count + 1):
        with counting(work, at=at), pytest.raises(KeyboardInterrupt):
            work()
        assert progress._open() is None, at
        assert down == up, at
    assert len(up) > counter.count // 2
