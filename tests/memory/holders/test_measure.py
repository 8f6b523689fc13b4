"""Times of a codec that drops zeros: by bytes and by the share of zeros."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.holders import measure
from ctdr_lightning.memory.holders.measure import fitted

CALL_S, BYTE_S, MIXED_S = 2e-4, 1.3e-9, 7e-9


def seconds_of(n_bytes: int, zeros: float) -> float:
    return CALL_S + n_bytes * (BYTE_S + MIXED_S * zeros * (1 - zeros))


def test_a_fit_foretells_sizes_and_shares_that_it_has_not_seen():
    points = [(n, zeros) for n in (2**14, 2**20) for zeros in (0.1, 0.5, 0.9)]
    call_s, byte_s, mixed_s = fitted(points, [seconds_of(n, zeros) for n, zeros in points])
    for n, zeros in ((2**16, 0.3), (2**22, 0.7)):
        assert call_s + n * (byte_s + mixed_s * zeros * (1 - zeros)) == pytest.approx(seconds_of(n, zeros))


def test_no_part_of_a_fit_is_negative():
    """Where more bytes take less time, as in noise, and where mixing helps."""
    points = [(n, zeros) for n in (2**14, 2**20) for zeros in (0.1, 0.5, 0.9)]
    for seconds in ([3e-4] * 3 + [1e-4] * 3, [4e-4, 1e-4, 4e-4, 8e-4, 2e-4, 8e-4]):
        assert min(fitted(points, seconds)) >= 0


@pytest.mark.parametrize("zeros", [0.1, 0.5, 0.9])
def test_a_sample_has_the_zeros_that_are_asked_for(zeros):
    flat = measure._sample(CODECS["zvc"], "cpu", zeros)  # private: nothing else shows a sample's contents
    assert float((flat == 0).float().mean()) == pytest.approx(zeros, abs=0.01)


def test_a_measured_codec_has_the_times_of_its_calls(monkeypatch):
    """With a codec that takes a known time for each call: decoding twice as long as encoding."""

    def calls(name: str, device: str, samples: Sequence[Tensor]) -> list[float]:
        shares = [float((flat == 0).double().mean()) for flat in samples]
        encode = [seconds_of(flat.nbytes, zeros) for flat, zeros in zip(samples, shares, strict=True)]
        return [*encode, *(2 * seconds for seconds in encode)]

    monkeypatch.setattr(measure, "_call_seconds", calls)
    cost = measure._codec_cost.__wrapped__("zvc", "cpu")  # private: the public function remembers real times
    for n, zeros in ((2**16, 0.3), (2**22, 0.8)):
        assert cost.encode_seconds(n, zeros) == pytest.approx(seconds_of(n, zeros), rel=0.02)
        assert cost.decode_seconds(n, zeros) == pytest.approx(2 * seconds_of(n, zeros), rel=0.02)


def test_calls_that_take_all_the_time_leave_a_line(monkeypatch):
    """On a GPU a small tensor may take no less than a large one: a codec whose bytes are free would be used for all."""
    monkeypatch.setattr(measure, "_call_seconds", lambda name, device, samples: [1e-5] * (2 * len(samples)))
    cost = measure._codec_cost.__wrapped__("zvc", "cpu")  # private: the public function remembers real times
    assert min(cost.encode_s_per_byte, cost.decode_s_per_byte) > 0
    assert cost == replace(cost, encode_s_per_mixed_byte=0.0, decode_s_per_mixed_byte=0.0)
