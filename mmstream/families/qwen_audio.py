"""Qwen2-Audio: features of recordings beside the text. The Qwen omni models hear the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmstream.decoding.media_shapes import AudioShape
from mmstream.decoding.text.placeholders import AudioLength
from mmstream.errors import ConfigError, DecodeError
from mmstream.families.family import Blank, Family, Features, Inputs, TokenCount

# -- tokens of audio -------------------------------------------------------------------------------


def audio_length() -> AudioLength:
    """Count the tokens of an audio for Qwen2-Audio and Qwen2.5-Omni.

    The encoder halves the number of feature frames twice: a token stands for 40 ms. The rule is
    that of transformers' ``Qwen2AudioProcessor``.

    Returns:
        A function for ``TextDecoder(audio_length=)``. Use it with
        ``AudioDecoder.from_processor(processor)``, which makes features.

    Examples:
        >>> length = audio_length()
        >>> length(AudioShape(num_samples=48_000, num_feature_frames=300, sample_rate=16_000))
        75
    """
    return num_tokens


def num_tokens(shape: AudioShape) -> int:
    """Count the tokens of an audio whose frames are halved twice; see `audio_length`."""
    return at_least_one(halved_twice(num_feature_frames(shape)), shape)


def num_feature_frames(shape: AudioShape) -> int:
    """Return the feature frames of a recording.

    Raises:
        ConfigError: No features are made of it.
    """
    if shape.num_feature_frames < 1 <= shape.num_samples:
        raise ConfigError(
            "audio_length: the audio has no features, of which the tokens are made: give "
            "AudioDecoder.from_processor(processor), or AudioDecoder(features=)"
        )
    return shape.num_feature_frames


def at_least_one(num_tokens: int, shape: AudioShape) -> int:
    """Return the number of tokens of a recording.

    Raises:
        DecodeError: There are none.
    """
    if num_tokens < 1:
        raise DecodeError(
            f"an audio of {shape.num_samples} samples is too short: it takes no token of the text"
        )
    return num_tokens


def halved_twice(num_frames: Any) -> Any:
    """Return the tokens of so many feature frames: a number, or a tensor of numbers."""
    return ((num_frames - 1) // 2 - 1) // 2 + 1


# -- the family ------------------------------------------------------------------------------------

BLANK_AUDIO_FRAMES = 8
"""Feature frames that are audio in a blank recording. They take two tokens, or one of Qwen3-Omni.

Qwen2-Audio expands a text by itself, wrongly here, where no two audio tokens are neighbours.
"""


@dataclass(frozen=True)
class QwenAudio(Family):
    """Recordings as features, of a fixed number of frames."""

    takes: tuple[str, ...] = ("audio",)

    def audio_inputs(self, features: Features, config: Any) -> Inputs:
        """Return the features, and which frames are audio."""
        if (num_frames := features.values.shape[-1]) != 3000:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes features of 3,000 frames, not "
                f"{num_frames:,}: AudioDecoder(features=mm.families.whisper.WhisperFeatures("
                'num_mels=128, padding="max"))'
            )
        return heard(features)

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the tokens of the frames that are audio."""
        number = int(halved_twice(medium.lengths).sum())
        return TokenCount(number, "mm.families.qwen_audio.audio_length()")

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a short recording, of two tokens."""
        tokens = [config.audio_token_id] * halved_twice(BLANK_AUDIO_FRAMES)
        return Blank(tokens, blank_features(config, 2 * config.audio_config.max_source_positions))


def heard(features: Features) -> Inputs:
    """Return what models take that hear and read: the features, and which frames are audio."""
    import torch

    positions = torch.arange(features.values.shape[-1], device=features.values.device)
    is_audio = positions < features.lengths.to(features.values.device)[:, None]
    return {"input_features": features.values, "feature_attention_mask": is_audio.long()}


def blank_features(config: Any, num_frames: int) -> Features:
    """Return a silent recording of so many frames, of which a few are audio."""
    import torch

    return Features(
        torch.zeros(1, config.audio_config.num_mel_bins, num_frames),
        torch.tensor([BLANK_AUDIO_FRAMES]),
        torch.tensor([0]),
    )


FAMILIES: dict[str, Family] = {"qwen2_audio": QwenAudio()}
