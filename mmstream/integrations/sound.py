"""How each family of models takes audio.

    arguments.model_arguments -> `features_of` -> `heard`, or `transcribed`

Models that hear and read get the features beside the text. Whisper gets a recording a row, and its
text as labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmstream.errors import ConfigError
from mmstream.integrations.counts import check_count, require_one_each
from mmstream.integrations.mrope_positions import OMNI, QWEN3_OMNI
from mmstream.types import Batch

HEARING = ("qwen2_audio", *OMNI)
"""Families that take audio beside text, by their ``model_type``."""


@dataclass(frozen=True)
class Features:
    """The log-mel features of a batch's recordings. There is at least one."""

    values: Tensor
    """Floating [num_audios, M, F]."""
    lengths: Tensor
    """int64 [num_audios], frames that are not padding."""
    rows: Tensor
    """int64 [num_audios], the row of each recording, ascending."""

    def of_dtype(self, dtype: torch.dtype) -> Features:
        """Return the same features in the dtype that a model computes in."""
        return replace(self, values=self.values.to(dtype))


def features_of(batch: Batch, field: str, family: str) -> Features | None:
    """Return the features of a batch's recordings; None if it has none.

    Args:
        batch: A batch of a loader, or of `mm.to_device`.
        field: The field of the recordings, such as ``audio``.
        family: The model's family, for messages.

    Raises:
        ConfigError: The batch has samples of recordings in place of features.
    """
    values = batch.get(f"{field}_features")
    if values is None:
        samples = batch.get(field)
        if samples is not None and len(samples):
            raise ConfigError(
                f"model_inputs: {family} takes features, and the batch has samples of {field!r}: "
                "AudioDecoder.from_processor(processor), or AudioDecoder(features=)"
            )
        return None
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"model_inputs: {family} takes features of one number of mel bands, these differ"
        )
    if not len(values):
        return None
    return Features(values, batch[f"{field}_features_length"], batch[f"{field}_row"])


def check_mel_bands(features: Features, config: Any) -> None:
    """Check that features have as many mel bands as the model takes.

    Args:
        features: Of the batch.
        config: The model's config.

    Raises:
        ConfigError: Says what to give the decoder.
    """
    for owner in (config, getattr(config, "audio_config", None)):
        expected = getattr(owner, "num_mel_bins", None)
        num_mels = features.values.shape[1]
        if expected is not None and num_mels != expected:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes {expected} mel bands, the features have "
                f"{num_mels}: AudioDecoder(features=mm.WhisperFeatures(num_mels={expected}))"
            )


def heard(features: Features, family: str) -> dict[str, Tensor]:
    """Return what models take that hear and read: the features, and which frames are audio."""
    num_frames = features.values.shape[-1]
    if family == "qwen2_audio" and num_frames != 3000:
        raise ConfigError(
            f"model_inputs: {family} takes features of 3,000 frames, not {num_frames:,}: "
            'AudioDecoder(features=mm.WhisperFeatures(num_mels=128, padding="max"))'
        )
    positions = torch.arange(num_frames, device=features.values.device)
    is_audio = positions < features.lengths.to(features.values.device)[:, None]
    return {"input_features": features.values, "feature_attention_mask": is_audio.long()}


def check_audio_tokens(ids: Tensor, features: Features, config: Any) -> None:
    """Check that a text has as many audio tokens as the model makes vectors of its audio.

    Args:
        ids: int64 [B, T].
        features: Of the batch.
        config: The model's config.

    Raises:
        ConfigError: Says which ``audio_length`` the model needs.
    """
    family = config.model_type
    number = int(num_tokens_of(features.lengths, family).sum())
    name = "qwen3_omni_audio_length" if family == QWEN3_OMNI else "qwen_audio_length"
    check_count(ids, config, "audio", "audio", number, f"mm.{name}()")


def num_tokens_of(lengths: Tensor, family: str) -> Tensor:
    """Return how many vectors a model makes of recordings of so many feature frames.

    Args:
        lengths: int64 [num_audios].
        family: The model's family.
    """
    if family == QWEN3_OMNI:
        seconds, rest = lengths // 100, lengths % 100
        for _ in range(3):
            rest = (rest - 1) // 2 + 1
        return 13 * seconds + rest
    halved = (lengths - 1) // 2 + 1
    return (halved - 2) // 2 + 1


def transcribed(
    batch: Batch, text: dict[str, Tensor], features: Features | None, config: Any
) -> dict[str, Tensor]:
    """Return what Whisper takes: a recording a row, and its text shifted by one token.

    The decoder's input begins with the config's ``decoder_start_token_id``, and each token of it
    predicts the next one. A text that begins with this token does not get it twice. For example,
    with the start token 9 and a text of [5, 6, 7]:

        decoder_input_ids   9 5 6
        labels              5 6 7

    A batch without labels has none here: its ids would teach the padding too.

    Raises:
        ConfigError: A row has no recording, or more than one. Or the text is padded on the left.
    """
    num_rows = len(text["input_ids"])
    counts = [0] * num_rows
    for row in [] if features is None else features.rows.tolist():
        counts[row] += 1
    require_one_each(batch, counts, "whisper", "audio")
    assert features is not None  # each row has one
    ids, labels = text["input_ids"], text.get("labels")
    if "attention_mask" in text and not bool(text["attention_mask"][:, 0].all()):
        raise ConfigError(
            'model_inputs: whisper takes texts padded on the right: tokenizer.padding_side="right"'
        )
    start = int(config.decoder_start_token_id)
    if bool((ids[:, 0] == start).all()):
        ids, labels = ids[:, 1:], None if labels is None else labels[:, 1:]
    first = torch.full_like(ids[:, :1], start)
    inputs = {
        "input_features": features.values,
        "decoder_input_ids": torch.cat((first, ids[:, :-1]), dim=1),
    }
    return inputs if labels is None else inputs | {"labels": labels}
