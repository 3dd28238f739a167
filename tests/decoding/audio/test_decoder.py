"""Samples of recordings: those of other decoders, at the rate and with the channels asked for."""

from __future__ import annotations

import io
import random
import struct
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

import mmstream as mm
from mmstream.decoding.audio import check_result
from tests.helpers.media_files import (
    AUDIO_KINDS,
    audio_file,
    num_bytes,
    read_by_ranges,
    tone,
    video_file,
)
from tests.helpers.paths import DATA

NATIVE = mm.AudioDecoder(sample_rate=None, channels=None)
LOSSLESS = ("wav", "flac")
NUM_SAMPLES = {"mp3": 16_000, "vorbis": 16_000, "opus": 48_000}
"""Of a file of one second. AAC and Matroska keep what the encoder adds to fill its last frame."""


def wav(values: NDArray[np.generic], code: int = 1, rate: int = 16_000, **sizes: int) -> bytes:
    """Return a WAV with these values [T, C] as they are."""
    raw, bits = values.tobytes(), 8 * values.itemsize
    num_channels = values.shape[1]
    frame_bytes = num_channels * values.itemsize
    header = struct.pack(
        "<IHHIIHH", 16, code, num_channels, rate, rate * frame_bytes, frame_bytes, bits
    )
    size = struct.pack("<I", sizes.get("data_bytes", len(raw)))
    return b"RIFF" + struct.pack("<I", 36 + len(raw)) + b"WAVEfmt " + header + b"data" + size + raw


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_every_kind_is_decoded_to_the_recording_that_was_encoded(kind: str) -> None:
    channels = 2 if kind == "vorbis" else 1
    data = audio_file(kind, channels=channels)
    plan = NATIVE.plan(data)
    samples = NATIVE(data)
    expected = tone(1.0, plan.shape.sample_rate, channels)
    assert samples.shape == (channels, plan.shape.num_samples)
    assert samples.dtype == np.float32
    assert samples.flags.c_contiguous
    if kind in LOSSLESS:
        np.testing.assert_allclose(samples, expected, atol=2**-15)
    else:
        assert samples.shape[1] == NUM_SAMPLES.get(kind, samples.shape[1])
        assert 0 <= samples.shape[1] - expected.shape[1] < 2 * 1152
        lag = 1024 if kind == "aac" else 0  # ADTS does not say what was added before the first
        similar = samples[0, lag : lag + 8000], expected[0, :8000]
        assert np.corrcoef(*similar)[0, 1] > 0.9


def test_a_real_mp3_has_the_samples_of_librosa_and_torchcodec() -> None:
    """The numbers are those of librosa 0.11 at 16 kHz, and of torchcodec 0.17 at 8 kHz."""
    data = (DATA / "audio" / "nasa.mp3").read_bytes()
    speech = mm.AudioDecoder()(data)
    assert speech.shape == (208_896,)
    expected = [-0.001656202, -0.026971133, -0.011754438, 0.003694146]
    np.testing.assert_allclose(speech[[1000, 50_000, 100_000, 200_000]], expected, atol=2e-7)
    assert np.sqrt(np.square(speech, dtype=np.float64).mean()) == pytest.approx(0.0725951114)
    stereo = NATIVE(data)
    assert stereo.shape == (2, 104_448)
    expected = [[0.00853136, 0.000746128], [-0.0327227, -0.018621026], [0.05082819, 0.04960048]]
    np.testing.assert_allclose(stereo[:, [0, 1000, 52_224]].T, expected, atol=2e-6)


def test_the_sound_of_a_real_video_has_the_samples_of_torchcodec() -> None:
    samples = NATIVE((DATA / "audio" / "nasa.mp4").read_bytes())
    assert samples.shape == (2, 32_768)
    expected = [[0.00939876, 0.000738467], [-0.0341865, -0.01964846], [0.02020376, 0.01486656]]
    np.testing.assert_allclose(samples[:, [0, 1000, 16_384]].T, expected, atol=2e-6)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_other_rates_and_channels_are_resampled_and_mixed_as_librosa_does(
    rate: int, channels: int
) -> None:
    data = audio_file("wav", seconds=0.5, sample_rate=rate, channels=channels)
    values, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    expected = soxr.resample(np.mean(values.T, axis=0), rate, 16_000)
    samples = mm.AudioDecoder()(data)
    np.testing.assert_array_equal(samples, expected)
    assert len(samples) == 8000


def test_channels_can_be_kept_repeated_and_mixed() -> None:
    stereo, mono = audio_file("flac", channels=2), audio_file("flac")
    assert mm.AudioDecoder(channels=None)(mono).shape == (1, 16_000)
    assert mm.AudioDecoder(channels=None)(stereo).shape == (2, 16_000)
    repeated = mm.AudioDecoder(channels=2)(mono)
    np.testing.assert_array_equal(repeated[0], repeated[1])
    surround = np.arange(48, dtype=np.int16).reshape(8, 6) * 100
    mixed = mm.AudioDecoder()(wav(surround))
    np.testing.assert_allclose(mixed, surround.mean(axis=1) / 2**15, rtol=1e-6)
    with pytest.raises(mm.errors.DecodeError, match="has 6 channels, and channels=2 was asked for"):
        mm.AudioDecoder(channels=2)(wav(surround))


def test_int16_gives_back_the_numbers_of_a_wav_and_clips_what_is_louder() -> None:
    values = np.array([[0], [1], [-1], [32_767], [-32_768]], np.int16)
    decoder = mm.AudioDecoder(dtype="int16")
    samples = decoder(wav(values))
    assert samples.dtype == np.int16
    np.testing.assert_array_equal(samples, values[:, 0])
    loud = np.array([[1.5], [-1.5]], np.float32)
    np.testing.assert_array_equal(decoder(wav(loud, code=3)), [32_767, -32_768])
    np.testing.assert_array_equal(mm.AudioDecoder()(wav(loud, code=3)), loud[:, 0])


@pytest.mark.parametrize(
    "subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "MS_ADPCM"]
)
@pytest.mark.parametrize("format_", ["WAV", "WAVEX"])
def test_every_wav_has_the_samples_of_soundfile(format_: str, subtype: str) -> None:
    if format_ == "WAVEX" and subtype == "MS_ADPCM":
        return  # libsndfile writes no such file
    file = io.BytesIO()
    soundfile.write(file, tone(0.1, channels=2).T, 16_000, format=format_, subtype=subtype)
    expected, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    np.testing.assert_array_equal(NATIVE(file.getvalue()), expected.T)


@pytest.mark.parametrize("data_bytes", [0xFFFF_FFFF, 236], ids=["of a pipe", "a few too many"])
def test_a_wav_that_states_too_many_bytes_has_the_samples_up_to_its_end(data_bytes: int) -> None:
    values = np.arange(100, dtype=np.int16)[:, None]
    samples = NATIVE(wav(values, data_bytes=data_bytes))
    np.testing.assert_array_equal(samples * 2**15, values.T)


def test_a_flac_that_does_not_know_its_length_is_counted() -> None:
    data = bytearray(audio_file("flac"))
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])  # the number of samples: 36 bits
    np.testing.assert_array_equal(NATIVE(bytes(data)), NATIVE(audio_file("flac")))


def test_a_flac_that_ends_a_little_early_ends_in_silence() -> None:
    data = bytearray(audio_file("flac"))
    num_samples = int.from_bytes(data[18:26], "big") % 2**36
    data[22:26] = (num_samples + 1000).to_bytes(4, "big")
    samples = NATIVE(bytes(data))
    np.testing.assert_array_equal(samples[:, :num_samples], NATIVE(audio_file("flac")))
    assert samples.shape[1] == num_samples + 1000
    assert not samples[:, num_samples:].any()


def test_the_cover_of_a_song_is_no_video_and_no_harm() -> None:
    for kind in ("mp3", "m4a", "flac"):
        np.testing.assert_array_equal(
            NATIVE(audio_file(kind, cover=True)), NATIVE(audio_file(kind))
        )


def test_an_opus_in_matroska_begins_where_its_own_head_says() -> None:
    """FFmpeg 5 writes a third of the delay into the container, for speech at 16 kHz."""
    data = audio_file("mka")
    delay, third = ((ns).to_bytes(3, "big") for ns in (6_500_000, 2_166_667))
    changed = data.replace(b"\x56\xaa\x83" + delay, b"\x56\xaa\x83" + third)
    assert changed != data
    np.testing.assert_array_equal(NATIVE(changed), NATIVE(data))
    span = NATIVE(changed, span=(0.25, 0.5))
    np.testing.assert_array_equal(span, NATIVE(data)[:, 12_000:24_000])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_rate": 0}, "sample_rate=0: give a whole number from 1 up"),
        ({"channels": "mono"}, "channels='mono': give a whole number from 1 up"),
        ({"duration_s": 0}, "duration_s=0: give a number above 0"),
        ({"max_duration_s": None}, "max_duration_s=None: give a number above 0"),
        ({"offset_s": -1.0}, "offset_s=-1.0: give a number from 0 up"),
        ({"dtype": "int32"}, "dtype='int32': give 'float32' or 'int16'"),
        ({"crop": "center"}, "crop='center': give 'random' or None"),
        ({"crop": "random"}, 'crop="random": give duration_s too'),
        ({"features": 80}, r"features=80: give mm.families.whisper.WhisperFeatures\(...\)"),
        (
            {"features": mm.families.whisper.WhisperFeatures(), "sample_rate": 8000},
            "features need sample_rate",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.AudioDecoder(**settings)  # type: ignore[arg-type]


# -- damage and limits -----------------------------------------------------------------------------


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
        (wav(np.zeros((9, 1), np.int16), rate=999), "a sample rate of 999 Hz"),
        (wav(np.zeros((9, 1), np.int16), rate=1_000_001), "a sample rate of 1000001 Hz"),
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
    limits = replace(NATIVE, timeout_s=1e-9).start_limits()
    assert NATIVE.plan(audio_file("wav"), limits=limits)  # reading numbers takes no time
    with pytest.raises(mm.errors.TimeoutError, match="decoding takes longer than timeout_s=1e-09"):
        NATIVE.decode(audio_file(kind), limits=limits)


# -- spans and crops -------------------------------------------------------------------------------

SPEECH = mm.AudioDecoder()
ROUNDING = 1e-6
"""Of float32 in the resampler, whose blocks begin elsewhere in a span."""


def long_recording(kind: str, seconds: float = 3.0, rate: int | None = None) -> bytes:
    return audio_file(
        kind, seconds=seconds, sample_rate=rate, channels=2 if kind == "vorbis" else 1
    )


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_a_span_has_the_samples_of_the_whole_recording_bit_by_bit(kind: str) -> None:
    data = long_recording(kind)
    whole = NATIVE(data)
    rate = NATIVE.plan(data).shape.sample_rate
    for start_s, end_s in ((0.0, 0.5), (0.9871, 1.5), (2.0, 2.9), (0.00001, 3.0)):
        span = NATIVE(data, span=(start_s, end_s))
        expected = whole[:, round(start_s * rate) : round(end_s * rate)]
        np.testing.assert_array_equal(span, expected)


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 48_000])
def test_a_resampled_span_has_the_samples_of_the_whole_result(rate: int) -> None:
    data = long_recording("wav", rate=rate)
    whole = SPEECH(data)
    assert len(whole) == 48_000
    for start_s, end_s in ((0.0, 0.1), (1.23457, 1.3), (2.5, 3.0)):
        span = SPEECH(data, span=(start_s, end_s))
        expected = whole[round(start_s * 16_000) : round(end_s * 16_000)]
        np.testing.assert_allclose(span, expected, atol=ROUNDING)


def test_the_row_names_the_span() -> None:
    data = long_recording("flac")
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
    data = long_recording("flac")
    row = {"start_s": 2.0, "end_s": 3.0}
    half = mm.AudioDecoder(span=(0.5, 1.0)).decode(data, row=row)
    np.testing.assert_array_equal(half.samples, SPEECH(data)[8000:16_000])
    whole = mm.AudioDecoder(span=None).decode(data, row=row)
    assert whole.num_samples == 48_000


def test_a_span_behind_the_end_of_the_recording_is_a_bad_sample() -> None:
    with pytest.raises(mm.errors.DecodeError, match="no audio in the span: the file has 3 s"):
        SPEECH.plan(long_recording("wav"), {"start_s": 3.0})


def test_offset_and_duration_count_within_the_span() -> None:
    data = long_recording("flac")
    decoder = mm.AudioDecoder(offset_s=0.25, duration_s=0.5)
    result = decoder.decode(data, row={"start_s": 1.0, "end_s": 3.0})
    np.testing.assert_array_equal(result.samples, SPEECH(data)[20_000:28_000])


def test_a_random_crop_is_the_same_for_the_same_draw_and_lies_in_the_span() -> None:
    data = long_recording("flac")
    decoder = mm.AudioDecoder(crop="random", duration_s=0.5)
    assert decoder.is_random
    row = {"start_s": 1.0, "end_s": 2.0}
    starts = set()
    for seed in range(20):
        result = decoder.decode(data, row=row, rng=np.random.default_rng(seed))
        again = decoder.plan(data, row, np.random.default_rng(seed))
        assert again == result.plan
        np.testing.assert_array_equal(decoder.decode(data, again).samples, result.samples)
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
    file, ranges = read_by_ranges(long_recording("wav", seconds=60.0))
    SPEECH(file, span=(30.0, 40.0))
    assert num_bytes(ranges) < 320_000 + 3 * 65_536  # read in blocks


@pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
def test_times_in_a_video_count_from_its_first_frame(kind: str) -> None:
    data = video_file(kind, audio_codec="aac", num_frames=20)
    plan = SPEECH.plan(data, {"start_s": 1.0, "end_s": 1.5})
    whole = SPEECH.plan(data)
    assert abs(plan.start_s - 1.0) < 1 / 16_000
    assert plan.start == round((1.0 - whole.start_s) * 16_000)
    assert plan.shape.num_samples == 8000
    with pytest.raises(mm.errors.DecodeError, match="has no audio in it"):
        SPEECH(video_file(kind))
