"""Samples of recordings: those of other decoders, at the rate and with the channels asked for."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

import mmstream as mm
from tests.helpers.media_files import AUDIO_KINDS, audio_file, tone, video_file
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


@pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
def test_the_sound_of_a_video_is_decoded(kind: str) -> None:
    data = video_file(kind, audio_codec="aac")
    samples = mm.AudioDecoder()(data)
    assert abs(len(samples) / 16_000 - 1.2) < 0.05
    with pytest.raises(mm.errors.DecodeError, match="has no audio in it"):
        mm.AudioDecoder()(video_file(kind))


def test_an_opus_in_matroska_begins_where_its_own_head_says() -> None:
    """FFmpeg 5 writes a third of the delay into the container, for speech at 16 kHz."""
    data = audio_file("mka")
    delay, third = ((ns).to_bytes(3, "big") for ns in (6_500_000, 2_166_667))
    changed = data.replace(b"\x56\xaa\x83" + delay, b"\x56\xaa\x83" + third)
    assert changed != data
    np.testing.assert_array_equal(NATIVE(changed), NATIVE(data))
    span = NATIVE(changed, span=(0.25, 0.5))
    np.testing.assert_array_equal(span, NATIVE(data)[:, 12_000:24_000])


def test_a_plan_tells_the_length_before_decoding() -> None:
    decoder = mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures())
    data = audio_file("opus", seconds=2.0)
    plan = decoder.plan(data)
    assert plan.shape == (32_000, 200, 16_000)
    result = decoder.decode(data, plan)
    assert (result.samples, result.num_samples) == (None, 32_000)
    assert result.features.shape == (80, 3000)


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
