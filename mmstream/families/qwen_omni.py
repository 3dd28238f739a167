"""Qwen's omni models, by their thinkers: pictures, videos and audio, each in the order of the text.

The sound of a video may stand between its frames. Then the positions of the frames and of the sound
follow the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmstream.decoding.media_shapes import AudioShape, MediaText, VideoShape
from mmstream.decoding.text.placeholders import AudioLength, VideoLength
from mmstream.errors import ConfigError
from mmstream.families.family import Blank, Family, Features, Inputs, Tensor, TokenCount, Videos
from mmstream.families.qwen_audio import (
    BLANK_AUDIO_FRAMES,
    at_least_one,
    blank_features,
    halved_twice,
    heard,
    num_feature_frames,
    num_tokens,
)
from mmstream.families.qwen_vl import QwenVL, merging, num_groups, num_squares, rule_of
from mmstream.settings import PositiveInt, checked

# -- tokens of videos and audio --------------------------------------------------------------------

CHUNK_S = 2
"""Seconds of a video whose frames stand together in Qwen2.5-Omni's text, and then their sound."""
POSITIONS_PER_S = 25
"""Positions of a second of Qwen2.5-Omni, and tokens of a second of sound."""
QWEN3_POSITIONS_PER_S = 13
"""The same of Qwen3-Omni."""


@checked()
def video_length(
    patch_size: PositiveInt = 14,
    merge_size: PositiveInt = 2,
    temporal_patch_size: PositiveInt = 2,
    *,
    video_token: str = "<|video_pad|>",
    audio_token: str = "<|AUDIO|>",
    audio_start_token: str = "<|audio_bos|>",
    audio_end_token: str = "<|audio_eos|>",
) -> VideoLength:
    """Write the tokens of a video for Qwen2.5-Omni, with its sound between them.

    The tokens of two seconds of frames stand together, then those of two seconds of sound, and so
    on. The rule is that of transformers' ``Qwen2_5OmniProcessor`` with ``load_audio_from_video``,
    which was called ``use_audio_in_video``. A video without sound takes tokens as by
    `mm.families.qwen_vl.video_length`.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.
        video_token: The ``video_token`` of the text decoder.
        audio_token: The ``audio_token`` of the text decoder.
        audio_start_token: What stands before the tokens of a video with sound.
        audio_end_token: What stands after them.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with ``audio_length=`` and
        ``VideoDecoder.from_processor(processor, audio=mm.AudioDecoder.from_processor(processor))``.
        It raises ConfigError for frames whose sides are not multiples of
        ``patch_size * merge_size``, and without ``VideoDecoder(fps=)`` of 1 or more: the processor
        counts time by the rate that it is asked for, whatever was taken of a video.

    Examples:
        >>> length = video_length()
        >>> shape = VideoShape(
        ...     num_frames=6, height=56, width=84, picture=(60, 90), fps=30.0, sampled_fps=2.0,
        ...     times_s=(0.0, 0.5, 1.0, 1.5, 2.0, 2.5), sound=AudioShape(48_000, 300, 16_000),
        ...     requested_fps=2.0,
        ... )
        >>> text = length(shape)  # three pairs of 2 x 3 squares, and 75 tokens of sound
        >>> text.lengths, text.audio_lengths
        ([12, 6], [50, 25])
    """
    return merging(
        _with_sound,
        patch_size,
        merge_size,
        temporal_patch_size,
        tokens=(audio_start_token, video_token, audio_token, audio_end_token),
    )


@checked()
def qwen3_video_length(
    patch_size: PositiveInt = 16,
    merge_size: PositiveInt = 2,
    temporal_patch_size: PositiveInt = 2,
    *,
    video_token: str = "<|video_pad|>",
    audio_token: str = "<|audio_pad|>",
    audio_start_token: str = "<|audio_start|>",
    audio_end_token: str = "<|audio_end|>",
) -> VideoLength:
    """Write the tokens of a video for Qwen3-Omni, with its sound between them.

    The tokens of each pair of frames stand where the pair begins, between the tokens of sound. The
    rule is that of transformers' ``Qwen3OmniMoeProcessor`` with ``load_audio_from_video``. A video
    without sound takes tokens as by `mm.families.qwen_vl.video_length`.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.
        video_token: The ``video_token`` of the text decoder.
        audio_token: The ``audio_token`` of the text decoder.
        audio_start_token: What stands before the tokens of a video with sound.
        audio_end_token: What stands after them.

    Returns:
        A function for ``TextDecoder(video_length=)``, as `video_length` returns. Use it
        with ``audio_length=qwen3_audio_length()``.

    Examples:
        >>> length = qwen3_video_length()
        >>> shape = VideoShape(
        ...     num_frames=4, height=64, width=96, picture=(60, 90), fps=30.0, sampled_fps=2.0,
        ...     times_s=(0.0, 0.5, 1.0, 1.5), sound=AudioShape(48_000, 300, 16_000),
        ...     requested_fps=2.0,
        ... )
        >>> text = length(shape)  # two pairs of 2 x 3 squares, and 39 tokens of sound
        >>> text.lengths, text.audio_lengths
        ([6, 6], [13, 26])
    """
    return merging(
        _among_sound,
        patch_size,
        merge_size,
        temporal_patch_size,
        tokens=(audio_start_token, video_token, audio_token, audio_end_token),
    )


def qwen3_audio_length() -> AudioLength:
    """Count the tokens of an audio for Qwen3-Omni: 13 a second, and those of the last part of one.

    The rule is ``_get_feat_extract_output_lengths`` of transformers' Qwen3-Omni.

    Returns:
        A function for ``TextDecoder(audio_length=)``. Use it with
        ``AudioDecoder.from_processor(processor)``, which makes features.

    Examples:
        >>> length = qwen3_audio_length()
        >>> length(AudioShape(num_samples=48_000, num_feature_frames=300, sample_rate=16_000))
        39
    """
    return num_qwen3_tokens


def _with_sound(
    shape: VideoShape, side: int, num_merged: int, tokens: tuple[str, str, str, str]
) -> int | MediaText:
    groups, squares = num_groups(shape, num_merged), num_squares(shape, side)
    if shape.sound is None:
        return groups * squares
    start, video, audio, end = tokens
    # Below this rate the processor would cut its parts within the tokens of a frame.
    fps = _requested_fps(shape, least=num_merged / CHUNK_S)
    seconds = num_merged / fps  # the order of products is the processor's
    positions = [group * seconds * POSITIONS_PER_S for group in range(groups)]
    chunks = Counter(int(position // (CHUNK_S * POSITIONS_PER_S)) for position in positions)
    chunk_groups = list(chunks.values())
    sounds = _chunks(num_tokens(shape.sound), CHUNK_S * POSITIONS_PER_S)
    pieces = [
        piece
        for chunk in range(max(len(chunk_groups), len(sounds)))
        for piece in (video * (chunk < len(chunk_groups)), audio * (chunk < len(sounds)))
    ]
    lengths = [number * squares for number in chunk_groups]
    return MediaText("".join([start, *pieces, end]), lengths, sounds)


def _among_sound(
    shape: VideoShape, side: int, num_merged: int, tokens: tuple[str, str, str, str]
) -> int | MediaText:
    groups, squares = num_groups(shape, num_merged), num_squares(shape, side)
    if shape.sound is None:
        return groups * squares
    start, video, audio, end = tokens
    num_sounds = num_qwen3_tokens(shape.sound)
    seconds = num_merged / _requested_fps(shape)  # the order of products is the processor's
    # How many tokens of sound stand before each pair of frames, and before the end.
    before = [
        min(num_sounds, math.ceil(group * seconds * QWEN3_POSITIONS_PER_S))
        for group in range(groups)
    ]
    sounds = np.diff([*before, num_sounds]).tolist()
    pieces = [video + audio * (number > 0) for number in sounds]
    text = "".join([start, *pieces, end])
    return MediaText(text, [squares] * groups, [number for number in sounds if number])


def _requested_fps(shape: VideoShape, least: float = 0.0) -> float:
    """Return the frames per second that the decoder was asked for.

    Raises:
        ConfigError: There are none, or fewer than `least`.
    """
    fps = shape.requested_fps
    if fps <= 0 or fps < least:
        needed = f"of {least:g} or more" if least else "above 0"
        raise ConfigError(
            "video_length: the Qwen omni models count time by the fps of the VideoDecoder, and "
            f"need one {needed}, not {f'{fps:g}' if fps else None}: give VideoDecoder(fps=2)"
        )
    return fps


def _chunks(number: int, size: int) -> list[int]:
    """Divide a number: 5 in chunks of 2 is [2, 2, 1]."""
    return [min(size, number - start) for start in range(0, number, size)]


def num_qwen3_tokens(shape: AudioShape) -> int:
    """Count the tokens of whole seconds, 100 frames each, and of the frames after them."""
    return at_least_one(_qwen3_frames(num_feature_frames(shape)), shape)


def _qwen3_frames(num_frames: Any) -> Any:
    """Return the tokens of whole seconds, 100 frames each, and of the frames after them."""
    num_seconds, remainder = num_frames // 100, num_frames % 100
    for _ in range(3):
        remainder = (remainder - 1) // 2 + 1
    return remainder + 13 * num_seconds


# -- the family ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QwenOmni(QwenVL):
    """A model that sees and hears.

    Attributes:
        writer: The function that writes a video with its sound between its frames.
        written_for: The settings of the model's config for which it writes.
        is_qwen3: Whether it is Qwen3-Omni, which counts the tokens of audio in another way.
    """

    takes: tuple[str, ...] = ("image", "video", "audio")
    seconds_name: str = "video_second_per_grid"
    writer: str = "mm.families.qwen_omni.video_length()"
    written_for: tuple[tuple[str, int], ...] = (
        ("position_id_per_seconds", POSITIONS_PER_S),
        ("seconds_per_chunk", CHUNK_S),
    )
    is_qwen3: bool = False

    def frames_per_second(self, videos: Videos, config: Any) -> Tensor:
        """Return the rates that the decoder was asked for, by which the processors count.

        Raises:
            ConfigError: It was asked otherwise, or the batch does not say it.
        """
        rates = videos.requested_fps
        if rates is None or len(rates) != len(videos.frames) or not bool((rates > 0).all()):
            raise ConfigError(
                f"model_inputs: {config.model_type} counts time by the frames per second that the "
                "decoder was asked for, and the batch has no such rate of each video in "
                "video_requested_fps: give VideoDecoder(fps=2)"
            )
        return rates

    def audio_inputs(self, features: Features, config: Any) -> Inputs:
        """Return the features, and which frames are audio. Their encoders take any length."""
        return heard(features)

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the tokens of pictures and videos as Qwen-VL, and those of audio."""
        if kind != "audio":
            return super().num_tokens(kind, medium, config)
        name = "qwen_omni.qwen3_audio_length" if self.is_qwen3 else "qwen_audio.audio_length"
        return TokenCount(int(self._heard_tokens(medium.lengths).sum()), f"mm.families.{name}()")

    def _heard_tokens(self, num_frames: Any) -> Any:
        return _qwen3_frames(num_frames) if self.is_qwen3 else halved_twice(num_frames)

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of one token, or a short recording, between their marks."""
        if kind == "audio":
            tokens = [config.audio_token_id] * self._heard_tokens(BLANK_AUDIO_FRAMES)
            tokens = [config.audio_start_token_id, *tokens, config.audio_end_token_id]
            return Blank(tokens, blank_features(config, BLANK_AUDIO_FRAMES))
        blank = super().blank(kind, config)
        assert blank is not None
        marks = (config.vision_start_token_id, config.vision_end_token_id)
        return blank._replace(tokens=[marks[0], *blank.tokens, marks[1]])

    def padded_positions(self, text: Inputs, media_inputs: Inputs, model: Any, config: Any) -> Any:
        """Return positions where a row has a video with its sound between its frames.

        The model itself would count all rows of the batch as such ones.
        """
        ids = text["input_ids"]
        with_sound = self._rows_with_sound(ids, config)
        if not with_sound.any():
            return None
        mask = text.get("attention_mask", ids.new_ones(ids.shape))
        return _positions_by_row(model, ids, mask, with_sound, media_inputs, config)

    def rule_positions(
        self,
        ids: Tensor,
        mask: Tensor,
        kinds: Tensor,
        media_inputs: Inputs,
        model: Any,
        config: Any,
    ) -> Tensor:
        """Return the positions of padded documents, with the sound of videos or without."""
        with_sound = self._rows_with_sound(ids, config)
        if not with_sound.any():
            return super().rule_positions(ids, mask, kinds, media_inputs, model, config)
        return _positions_by_row(model, ids, mask.long(), with_sound, media_inputs, config)

    def _rows_with_sound(self, ids: Tensor, config: Any) -> Tensor:
        """Tell which rows have a video with its sound between its frames, bool [B].

        Raises:
            ConfigError: The model wants longer or shorter parts of a video before its sound.
        """
        is_there = _marked(ids, config, config.audio_start_token_id).any(1).cpu()
        for name, written in self.written_for:
            if is_there.any() and getattr(config, name) != written:
                raise ConfigError(
                    f"model_inputs: the config has {name}={getattr(config, name)}, and "
                    f"{self.writer} writes for {written}: give a video_length= of your own, and "
                    "the positions too"
                )
        return is_there


def _positions_by_row(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    with_sound: Tensor,
    media_inputs: Inputs,
    config: Any,
) -> Tensor:
    """Return the positions of all rows by the model's rule, int64 [3, B, T].

    The rule is told once for a whole batch whether videos have their sound between their frames. A
    silent video would then get the positions of text, unnoticed. So each row is one call.

    Args:
        model: The model; None where only its config is known.
        ids: int64 [B, T].
        mask: int64 [B, T], 1 for tokens that are not padding.
        with_sound: bool [B], rows that have a video with its sound between its frames.
        media_inputs: The media as the model takes them, those of the rows one after another.
        config: The model's config.
    """
    import torch

    rule = rule_of(model, config)
    starts = {
        "image": _marked(ids, config, config.image_token_id),
        "video": _marked(ids, config, config.video_token_id)
        | _marked(ids, config, config.audio_start_token_id),
        "audio": ids == config.audio_start_token_id,
    }
    none = torch.zeros(0, 3, dtype=torch.int64)
    frames = media_inputs.get("feature_attention_mask")
    media = {
        "image_grid_thw": ("image", media_inputs.get("image_grid_thw", none)),
        "video_grid_thw": ("video", media_inputs.get("video_grid_thw", none)),
        "second_per_grids": ("video", media_inputs.get("video_second_per_grid", none)),
        "audio_seqlens": ("audio", none if frames is None else frames.sum(-1)),
    }
    counts = {kind: start.sum(1).tolist() for kind, start in starts.items()}
    pieces = {name: torch.split(value, counts[kind]) for name, (kind, value) in media.items()}
    rows = [
        rule(
            input_ids=ids[row : row + 1],
            attention_mask=mask[row : row + 1],
            use_audio_in_video=bool(with_sound[row]),
            **{name: values[row] for name, values in pieces.items()},
        )[0]
        for row in range(len(ids))
    ]
    return torch.cat(rows, dim=1)


def _marked(ids: Tensor, config: Any, token_id: int) -> Tensor:
    """Tell where a token stands after the start of a picture or video, bool [B, T - 1]."""
    marked: Tensor = (ids[:, :-1] == config.vision_start_token_id) & (ids[:, 1:] == token_id)
    return marked


FAMILIES: dict[str, Family] = {
    "qwen2_5_omni_thinker": QwenOmni(),
    "qwen3_omni_moe_thinker": QwenOmni(
        writer="mm.families.qwen_omni.qwen3_video_length()",
        written_for=(("position_id_per_seconds", QWEN3_POSITIONS_PER_S),),
        is_qwen3=True,
    ),
}
