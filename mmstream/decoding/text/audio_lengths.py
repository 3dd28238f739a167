"""How many tokens an audio takes in the text, by the rules of common models.

Place in the flow: `AudioDecoder.plan` says how many frames of log-mel features there will be. A
function of this module says how many vectors a model makes of them. `placeholders.py` then puts as
many tokens into the text.

Each public function here returns such a function, for ``TextDecoder(audio_length=)``. It can be
pickled, so that it travels to worker processes. A function of your own must be defined in a module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mmstream.decoding.media_shapes import AudioShape
from mmstream.decoding.text.media_text import MediaText
from mmstream.errors import ConfigError, DecodeError

AudioLength: TypeAlias = Callable[[AudioShape], int | MediaText]
"""Says how many tokens an audio of a shape takes, from 1 up, or which text takes its place."""


def qwen_audio_length() -> AudioLength:
    """Count the tokens of an audio for Qwen2-Audio and Qwen2.5-Omni.

    The encoder halves the number of feature frames twice: a token stands for 40 ms. The rule is
    that of transformers' ``Qwen2AudioProcessor``.

    Returns:
        A function for ``TextDecoder(audio_length=)``. Use it with
        ``AudioDecoder.from_processor(processor)``, which makes features.

    Examples:
        >>> length = qwen_audio_length()
        >>> length(AudioShape(num_samples=48_000, num_feature_frames=300, sample_rate=16_000))
        75
    """
    return num_audio_tokens


def qwen3_omni_audio_length() -> AudioLength:
    """Count the tokens of an audio for Qwen3-Omni: 13 a second, and those of the last part of one.

    The rule is ``_get_feat_extract_output_lengths`` of transformers' Qwen3-Omni.

    Returns:
        A function for ``TextDecoder(audio_length=)``. Use it with
        ``AudioDecoder.from_processor(processor)``, which makes features.

    Examples:
        >>> length = qwen3_omni_audio_length()
        >>> length(AudioShape(num_samples=48_000, num_feature_frames=300, sample_rate=16_000))
        39
    """
    return num_qwen3_omni_tokens


def num_audio_tokens(shape: AudioShape) -> int:
    """Count the tokens of an audio whose frames are halved twice; see `qwen_audio_length`."""
    halved = (_num_feature_frames(shape) - 1) // 2 + 1
    return _checked((halved - 2) // 2 + 1, shape)


def num_qwen3_omni_tokens(shape: AudioShape) -> int:
    """Count the tokens of whole seconds, 100 frames each, and of the frames behind them."""
    num_seconds, rest = divmod(_num_feature_frames(shape), 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return _checked(rest + 13 * num_seconds, shape)


def _num_feature_frames(shape: AudioShape) -> int:
    if shape.num_feature_frames < 1 <= shape.num_samples:
        raise ConfigError(
            "audio_length: the audio has no features, of which the tokens are made: give "
            "AudioDecoder.from_processor(processor), or AudioDecoder(features=)"
        )
    return shape.num_feature_frames


def _checked(num_tokens: int, shape: AudioShape) -> int:
    if num_tokens < 1:
        raise DecodeError(
            f"an audio of {shape.num_samples} samples is too short: it takes no token of the text"
        )
    return num_tokens
