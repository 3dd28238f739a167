"""Log-mel features: those of the extractor of transformers, of one recording or of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

import mmstream as mm
from tests.helpers.media_files import audio_file, tone

LENGTHS = (1, 159, 160, 161, 200, 201, 400, 48_000, 48_077, 479_900, 480_000)


def extracted(samples: np.ndarray, num_mels: int, **settings: Any) -> Any:
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    return extractor(
        samples,
        sampling_rate=16_000,
        return_tensors="np",
        return_attention_mask=True,
        **settings,
    )


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_and_their_number_are_those_of_the_extractor(num_mels: int) -> None:
    everything = tone(30.0)[0]
    for length in LENGTHS:
        samples = everything[:length]
        features = mm.families.whisper.WhisperFeatures(num_mels=num_mels)
        expected = extracted(samples, num_mels)
        result = features(torch.from_numpy(samples))
        np.testing.assert_allclose(result, expected.input_features[0], atol=1e-6)
        num_frames = features.num_frames(length)
        assert num_frames == expected.attention_mask.sum()
        valid = mm.families.whisper.WhisperFeatures(num_mels=num_mels, padding="valid")
        few = valid(torch.from_numpy(samples))
        np.testing.assert_allclose(few, result[:, :num_frames], atol=1e-6)


@pytest.mark.parametrize("length", [201, 400, 4800, 48_077])
def test_without_padding_features_are_those_of_a_single_recording(length: int) -> None:
    samples = tone(30.0)[0, :length]
    features = mm.families.whisper.WhisperFeatures(padding="longest")
    expected = extracted(samples, 80, padding="longest", truncation=False)
    np.testing.assert_allclose(
        features(torch.from_numpy(samples)), expected.input_features[0], atol=1e-6
    )
    assert features.num_frames(length) == expected.attention_mask.sum()


@pytest.mark.parametrize("settings", [{"num_mels": 128}, {"padding": "longest"}], ids=str)
def test_features_do_not_depend_on_the_number_of_threads(settings: dict[str, Any]) -> None:
    """Worker processes have one thread, and the main process has one for each core."""
    features = mm.families.whisper.WhisperFeatures(**settings)
    samples = [torch.from_numpy(tone(seconds)[0]) for seconds in (0.0625, 0.19, 1.01, 3.0047)]
    results = []
    for num_threads in (1, 2, 3, 4, 7, 16):
        torch.set_num_threads(num_threads)  # set back after the test, for all tests
        results.append([features(recording) for recording in samples])
    for result in results[1:]:
        for values, expected in zip(result, results[0], strict=True):
            assert torch.equal(values, expected)


def test_silence_has_the_features_of_silence() -> None:
    samples = np.zeros(16_000, np.float32)
    features = mm.families.whisper.WhisperFeatures()
    expected = extracted(samples, 80).input_features[0]
    np.testing.assert_array_equal(features(torch.from_numpy(samples)), expected)
    np.testing.assert_array_equal(features(torch.zeros(0)), expected)
    assert features.num_frames(0) == 0


@pytest.mark.parametrize("padding", ["max", "valid", "longest"])
def test_a_batch_has_the_features_of_each_recording_alone(padding: Any) -> None:
    features = mm.families.whisper.WhisperFeatures(padding=padding)
    recordings = [tone(seconds)[0] for seconds in (0.5, 2.0, 1.3)]
    batch = torch.zeros(3, 32_000)
    for row, samples in zip(batch, recordings, strict=True):
        row[: len(samples)] = torch.from_numpy(samples)
    lengths = torch.tensor([len(samples) for samples in recordings])
    result = features(batch, lengths)
    for row, samples in zip(result, recordings, strict=True):
        alone = features(torch.from_numpy(samples))
        np.testing.assert_array_equal(row[:, : alone.shape[1]], alone)
        assert not row[:, alone.shape[1] :].any()
    assert features(batch[:0], lengths[:0]).shape[:2] == (0, 80)


def test_int16_samples_have_the_features_of_their_floats() -> None:
    decoder = mm.AudioDecoder(dtype="int16")
    data = audio_file("wav")
    levels = torch.from_numpy(decoder(data))
    floats = torch.from_numpy(mm.AudioDecoder()(data))
    features = mm.families.whisper.WhisperFeatures()
    torch.testing.assert_close(features(levels), features(floats), atol=0, rtol=0)


def test_a_recording_that_is_too_long_is_refused_or_cut_when_asked() -> None:
    data = audio_file("wav", seconds=31.0)
    decoder = mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures())
    with pytest.raises(
        mm.errors.DecodeError, match=r"audio of 31.00 s is longer than the features' 30 s"
    ):
        decoder.plan(data)
    cut = mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures(), duration_s=30)
    expected = extracted(mm.AudioDecoder()(data), 80).input_features[0]  # which cuts it too
    np.testing.assert_allclose(cut(data), expected, atol=1e-6)
    with pytest.raises(mm.ConfigError, match=r"a recording of 31 s is longer than chunk_s=30"):
        mm.families.whisper.WhisperFeatures()(torch.zeros(31 * 16_000))
    with pytest.raises(mm.ConfigError, match=r"samples of shape \(1, 1, 9\): give"):
        mm.families.whisper.WhisperFeatures()(torch.zeros(1, 1, 9))


def processor(name: str, **settings: Any) -> Any:
    extractor = WhisperFeatureExtractor(**settings)
    return type(name, (SimpleNamespace,), {})(feature_extractor=extractor)


@pytest.mark.parametrize(
    ("given", "features"),
    [
        (WhisperFeatureExtractor(), mm.families.whisper.WhisperFeatures()),
        (
            processor("WhisperProcessor", feature_size=128),
            mm.families.whisper.WhisperFeatures(num_mels=128),
        ),
        (
            processor("Qwen2AudioProcessor", feature_size=128),
            mm.families.whisper.WhisperFeatures(num_mels=128),
        ),
        (
            processor("Qwen2_5OmniProcessor", feature_size=128, chunk_length=300),
            mm.families.whisper.WhisperFeatures(num_mels=128, chunk_s=300, padding="valid"),
        ),
        (
            processor("Qwen3OmniMoeProcessor", feature_size=128),
            mm.families.whisper.WhisperFeatures(num_mels=128, padding="longest"),
        ),
    ],
    ids=["Whisper", "large-v3", "Qwen2-Audio", "Qwen2.5-Omni", "Qwen3-Omni"],
)
def test_the_settings_of_a_processor_are_taken_over(
    given: Any, features: mm.families.whisper.WhisperFeatures
) -> None:
    decoder = mm.AudioDecoder.from_processor(given, duration_s=30.0)
    assert decoder == mm.AudioDecoder(features=features, duration_s=30.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SimpleNamespace(), "SimpleNamespace: not WhisperFeatureExtractor"),
        (WhisperFeatureExtractor(n_fft=512), "n_fft=512 has no counterpart"),
        (WhisperFeatureExtractor(dither=0.1), "dither=0.1 has no counterpart"),
        (WhisperFeatureExtractor(do_normalize=True), "do_normalize=True has no counterpart"),
    ],
    ids=["another class", "longer frames", "dither", "normalized"],
)
def test_a_processor_that_makes_other_features_is_refused(given: Any, message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.AudioDecoder.from_processor(given)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_same_features() -> None:
    features = mm.families.whisper.WhisperFeatures(num_mels=128)
    samples = torch.from_numpy(tone(5.0)[0])
    result = features(samples.cuda())
    assert result.is_cuda
    # On the CPU, a plain sum in float32 in place of its FFT changes the features by up to 4e-5.
    torch.testing.assert_close(result.cpu(), features(samples), atol=2e-4, rtol=0)
