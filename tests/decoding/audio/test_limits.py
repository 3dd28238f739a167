"""Recordings that are damaged, cut, lying or too long: a reason in one line, and no wasted work."""

from __future__ import annotations

import io
import random
from fractions import Fraction

import av
import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding.audio.decoder import AudioLimits, check_result
from tests.decoding.audio.test_decoder import wav
from tests.helpers.media_files import AUDIO_KINDS, audio_file

NATIVE = mm.AudioDecoder(sample_rate=None, channels=None)


def recording(kind: str) -> bytes:
    return audio_file(kind, seconds=2.0, channels=2 if kind == "vorbis" else 1)


@pytest.mark.parametrize("kind", [kind for kind in AUDIO_KINDS if kind != "aac"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.8])
def test_a_recording_that_is_cut_is_refused(kind: str, share: float) -> None:
    data = recording(kind)
    with pytest.raises(mm.errors.DecodeError, match=r"truncated|damaged|not those of a known"):
        NATIVE(data[: int(share * len(data))])


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_damage_gives_samples_or_a_reason_and_never_another_error(kind: str) -> None:
    data = recording(kind)
    draws = random.Random(0)
    for _ in range(15):
        damaged = bytearray(data)
        for _ in range(draws.choice([1, 5, 30])):
            damaged[draws.randrange(len(data))] = draws.randrange(256)
        span = draws.choice([None, (0.5, 1.0)])
        try:
            samples = NATIVE(bytes(damaged), span=span)
        except mm.errors.DecodeError:
            continue
        assert np.isfinite(samples).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"no recording at all", "not those of a known audio or video format"),
        (wav(np.zeros((0, 1), np.int16)), "no audio in the span: the file has 0 s"),
        (wav(np.zeros((9, 1), np.int16), data_bytes=4000), "truncated wav: 3,982 bytes"),
        (wav(np.zeros((9, 1), np.int16), rate=7), "a sample rate of 7 Hz"),
        (wav(np.zeros((9, 1), np.int16), rate=2**30), "a sample rate of 1073741824 Hz"),
        (wav(np.full((9, 1), np.nan, np.float32), code=3), "NaN or infinite"),
        (wav(np.full((9, 1), np.inf, np.float32), code=3), "NaN or infinite"),
        (wav(np.array([[0.5], [-np.inf]], np.float32), code=3), "NaN or infinite"),
    ],
    ids=["empty", "text", "no samples", "cut", "slow", "fast", "nan", "infinite", "below all"],
)
def test_odd_files_are_refused_with_their_reason(data: bytes, reason: str) -> None:
    with pytest.raises(mm.errors.DecodeError, match=reason):
        NATIVE(data)


def test_a_flac_that_claims_to_last_for_weeks_is_refused() -> None:
    """To decode as much as it claims would take longer than the limit of this test."""
    data = bytearray(audio_file("flac"))
    data[21:26] = bytes([data[21] | 0x0F, 255, 255, 255, 255])
    with pytest.raises(
        mm.errors.DecodeError, match=r"audio of 4294967.3 s exceeds max_duration_s=3600"
    ):
        NATIVE(bytes(data))
    with pytest.raises(mm.errors.DecodeError, match="damaged or truncated: its header promises"):
        NATIVE(bytes(data), span=(0.0, 5.0))


def test_a_recording_with_a_gap_in_its_times_is_refused() -> None:
    """Its samples in a row would be heard too early, and a lost page of a file looks the same."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for start_s in (0, 1, 3):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.int16), "s16", "mono")
            frame.sample_rate, frame.pts = 16_000, start_s * 16_000
            frame.time_base = Fraction(1, 16_000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    with pytest.raises(mm.errors.DecodeError, match=r"its audio has a gap of 1.00 s at 2.00 s"):
        NATIVE(file.getvalue())


def test_limits_of_bytes_and_seconds_hold() -> None:
    data = audio_file("wav", seconds=2.0)
    with pytest.raises(mm.errors.DecodeError, match=r"audio of \d+ bytes exceeds max_bytes=1000"):
        mm.AudioDecoder(max_bytes=1000)(data)
    short = mm.AudioDecoder(max_duration_s=1.5)
    with pytest.raises(mm.errors.DecodeError, match=r"audio of 2.0 s exceeds max_duration_s=1.5"):
        short(data)
    assert len(short(data, span=(0.5, 2.0))) == 24_000


def test_the_recordings_of_a_sample_share_its_limits() -> None:
    decoder = mm.AudioDecoder(max_duration_s=3.0)
    data = audio_file("wav", seconds=2.0)
    limits = decoder.start_limits()
    first = decoder.decode(data, limits=limits)
    limits = limits.holding(first.num_samples / 16_000)
    with pytest.raises(
        mm.errors.DecodeError, match=r"audio of 2.0 s after 2.0 s of the sample's other"
    ):
        decoder.plan(data, limits=limits)


def test_a_result_with_too_many_channels_is_refused() -> None:
    with pytest.raises(mm.errors.DecodeError, match=r"and 200 channels needs 131,835 MiB"):
        check_result(48_000 * 3600, 200)


@pytest.mark.parametrize("kind", ["mp3", "flac", "opus", "m4a"])
def test_the_end_of_the_time_ends_the_work(kind: str) -> None:
    limits = AudioLimits.start(3600.0, 1e-9)
    assert NATIVE.plan(audio_file("wav"), limits=limits)  # reading numbers takes no time
    with pytest.raises(mm.errors.TimeoutError, match="decoding takes longer than timeout_s=1e-09"):
        NATIVE.decode(audio_file(kind), limits=limits)
