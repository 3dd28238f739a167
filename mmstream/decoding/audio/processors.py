"""Settings of Hugging Face feature extractors -> settings of `AudioDecoder`.

Place in the flow: before a run, `AudioDecoder.from_processor` calls it once. Settings are read by
name, so transformers is not imported.
"""

from __future__ import annotations

from typing import Any

from mmstream.decoding.audio.features import FFT_SIZE, HOP, SAMPLE_RATE, WhisperFeatures
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import checked, shown

_PADDINGS = {"Qwen2_5OmniProcessor": "valid", "Qwen3OmniMoeProcessor": "longest"}
"""How a processor calls the extractor, by the name of its class. All others pad to the maximum."""


@checked(cure="processor=: a setting that its class does not write; run it as a transform")
def settings_of(processor: Any) -> dict[str, Any]:
    """Return the settings of an `AudioDecoder` that makes the same features.

    Raises:
        ConfigError: The class is not known, or a setting has no counterpart. The message names it.
    """
    extractor = getattr(processor, "feature_extractor", processor)
    name = type(extractor).__name__
    if name != "WhisperFeatureExtractor":
        raise ConfigError(f"{name}: not WhisperFeatureExtractor; run it as a transform")
    expected = {
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP,
        "n_fft": FFT_SIZE,
        "dither": 0.0,
        "padding_value": 0.0,
        "do_normalize": False,
    }
    for setting, expected_value in expected.items():
        value = getattr(extractor, setting, expected_value)
        if value != expected_value:
            raise ConfigError(
                f"{name}: {setting}={shown(value)} has no counterpart in WhisperFeatures"
            )
    padding: Any = _PADDINGS.get(type(processor).__name__, "max")
    features = WhisperFeatures(
        num_mels=extractor.feature_size, padding=padding, chunk_s=extractor.chunk_length
    )
    return {"sample_rate": SAMPLE_RATE, "channels": 1, "features": features}
