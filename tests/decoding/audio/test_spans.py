"""Spans and crops: samples of the whole recording, wherever they begin."""

from __future__ import annotations

import numpy as np
import pytest

import mmstream as mm
from tests.decoding.test_lazy_media import CountedBytes
from tests.helpers.media_files import AUDIO_KINDS, audio_file, video_file

NATIVE = mm.AudioDecoder(sample_rate=None, channels=None)
SPEECH = mm.AudioDecoder()
ROUNDING = 1e-6
"""Of float32 in the resampler, whose blocks begin elsewhere in a span."""


def recording(kind: str, seconds: float = 3.0, rate: int | None = None) -> bytes:
    return audio_file(
        kind, seconds=seconds, sample_rate=rate, channels=2 if kind == "vorbis" else 1
    )


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_a_span_has_the_samples_of_the_whole_recording_bit_by_bit(kind: str) -> None:
    data = recording(kind)
    whole = NATIVE(data)
    rate = NATIVE.plan(data).shape.sample_rate
    for start_s, end_s in ((0.0, 0.5), (0.9871, 1.5), (2.0, 2.9), (0.00001, 3.0)):
        span = NATIVE(data, span=(start_s, end_s))
        expected = whole[:, round(start_s * rate) : round(end_s * rate)]
        np.testing.assert_array_equal(span, expected)


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 48_000])
def test_a_resampled_span_has_the_samples_of_the_whole_result(rate: int) -> None:
    data = recording("wav", rate=rate)
    whole = SPEECH(data)
    assert len(whole) == 48_000
    for start_s, end_s in ((0.0, 0.1), (1.23457, 1.3), (2.5, 3.0)):
        span = SPEECH(data, span=(start_s, end_s))
        expected = whole[round(start_s * 16_000) : round(end_s * 16_000)]
        np.testing.assert_allclose(span, expected, atol=ROUNDING)


def test_the_row_names_the_span() -> None:
    data = recording("flac")
    whole = NATIVE(data)[0]
    for row, span in (
        ({"start_s": 1.0, "end_s": 2.0}, slice(16_000, 32_000)),
        ({"start_s": 1}, slice(16_000, None)),
        ({"end_s": 0.5, "start_s": None}, slice(None, 8000)),
        ({"text": "hello"}, slice(None)),
        ({"start_s": 2.0, "end_s": 99.0}, slice(32_000, None)),
        (None, slice(None)),
    ):
        result = SPEECH.decode(data, row=row)
        np.testing.assert_array_equal(result.samples, whole[span])
        assert result.plan.start_s == (span.start or 0) / 16_000


def test_the_span_of_the_settings_is_the_same_for_every_row() -> None:
    data = recording("flac")
    row = {"start_s": 2.0, "end_s": 3.0}
    half = mm.AudioDecoder(span=(0.5, 1.0)).decode(data, row=row)
    np.testing.assert_array_equal(half.samples, SPEECH(data)[8000:16_000])
    whole = mm.AudioDecoder(span=None).decode(data, row=row)
    assert whole.num_samples == 48_000


def test_a_span_behind_the_end_of_the_recording_is_a_bad_sample() -> None:
    with pytest.raises(mm.errors.DecodeError, match="no audio in the span: the file has 3 s"):
        SPEECH.plan(recording("wav"), {"start_s": 3.0})


def test_offset_and_duration_count_within_the_span() -> None:
    data = recording("flac")
    decoder = mm.AudioDecoder(offset_s=0.25, duration_s=0.5)
    result = decoder.decode(data, row={"start_s": 1.0, "end_s": 3.0})
    np.testing.assert_array_equal(result.samples, SPEECH(data)[20_000:28_000])


def test_a_random_crop_is_the_same_for_the_same_draw_and_lies_in_the_span() -> None:
    data = recording("flac")
    decoder = mm.AudioDecoder(crop="random", duration_s=0.5)
    assert decoder.is_random
    row = {"start_s": 1.0, "end_s": 2.0}
    starts = set()
    for seed in range(20):
        result = decoder.decode(data, row=row, rng=np.random.default_rng(seed))
        again = decoder.plan(data, row, np.random.default_rng(seed))
        assert again == result.plan
        assert result.num_samples == 8000
        assert 16_000 <= result.plan.start <= 24_000
        starts.add(result.plan.start)
        np.testing.assert_array_equal(
            result.samples, SPEECH(data)[result.plan.start : result.plan.stop]
        )
    assert len(starts) > 10
    short = decoder.decode(data, row={"end_s": 0.25}, rng=np.random.default_rng(0))
    assert short.num_samples == 4000
    with pytest.raises(mm.ConfigError, match="rng: a random crop needs"):
        decoder(data)


def test_a_span_of_a_wav_reads_its_own_bytes_only() -> None:
    file = CountedBytes(recording("wav", seconds=60.0))
    SPEECH(file, span=(30.0, 31.0))
    assert file.num_bytes < 32_000 + 1000


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_times_in_a_video_count_from_its_first_frame(kind: str) -> None:
    data = video_file(kind, audio_codec="aac", num_frames=20)
    plan = SPEECH.plan(data, {"start_s": 1.0, "end_s": 1.5})
    whole = SPEECH.plan(data)
    assert abs(plan.start_s - 1.0) < 1 / 16_000
    assert plan.start == round((1.0 - whole.start_s) * 16_000)
    assert plan.shape.num_samples == 8000
