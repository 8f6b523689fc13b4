import sys

import pytest

from ctdr_lightning.basics import progress_bar as progress


def test_silent_when_quick_and_whole(capsys):
    assert list(progress.track(range(5), "count", total=5)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("enabled", [True, False])
def test_plain_lines_when_it_lasts(monkeypatch, capsys, enabled):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    assert list(progress.track("abc", "spell", total=3, enabled=enabled)) == list("abc")
    assert ("spell: 2 of 3" in capsys.readouterr().err) == enabled


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
