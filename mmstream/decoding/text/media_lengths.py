"""How many tokens an image, a video or an audio takes in the text, by the rules of common models.

Place in the flow: `ImageDecoder.prepared_shape` reads from an image's header which shape it will
have. `VideoDecoder.plan` says which frames of a video there will be, and of which size, and
`AudioDecoder.plan` how many frames of log-mel features. A function of this module says how many
vectors a model makes of that. `placeholders.py` then puts as many tokens into the text.

Each public function here returns such a function, for ``TextDecoder(image_length=)``,
``video_length=`` or ``audio_length=``. It can be pickled, so that it travels to worker processes. A
function of your own must be defined in a module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media_shapes import AudioShape, MediaText, VideoShape
from mmstream.errors import ConfigError, DecodeError
from mmstream.wrong_arguments import PositiveInt, checked

ImageLength: TypeAlias = Callable[[ImageShape], int]
"""Says how many tokens an image of a shape takes, from 1 up."""


@checked()
def qwen_vl_length(patch_size: PositiveInt = 14, merge_size: PositiveInt = 2) -> ImageLength:
    """Count the tokens of an image for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    An image takes one token per square of merged patches. The rule is that of transformers'
    ``Qwen2VLProcessor.replace_image_token``: the product of ``image_grid_thw`` divided by
    ``merge_size`` squared.

    Args:
        patch_size: Side of a patch in pixels. 14 for Qwen2-VL and Qwen2.5-VL, 16 for Qwen3-VL.
        merge_size: How many patches on each side are merged into one token.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with ``ImageDecoder(resize=
        "max_pixels", multiple_of=patch_size * merge_size)``. It raises ConfigError for an image
        whose sides are not multiples.

    Examples:
        >>> length = qwen_vl_length()
        >>> length(ImageShape(476, 644, picture=(480, 640)))  # 17 x 23 squares of 28 pixels
        391
    """
    return partial(_merged_patches, side=patch_size * merge_size)


@checked()
def llava_next_length(patch_size: PositiveInt = 14) -> ImageLength:
    """Count the tokens of an image for Llava-NeXT.

    An image takes one token per patch of the whole picture as one tile. It takes one more per patch
    of its other tiles that is not padding, and one at the end of each row of these. The rule is
    ``LlavaNextProcessor._get_number_of_features`` of transformers, with the "default" features,
    which have no class token.

    Args:
        patch_size: Side of a patch in pixels.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=336, tiles=LlavaNextTiles())``.

    Examples:
        >>> length = llava_next_length()
        >>> shape = ImageShape(336, 336, picture=(480, 640), num_tiles=5, grid=(2, 2))
        >>> length(shape)  # 24 x 24 patches, and 36 rows of 48 patches and a mark
        2340
    """
    return partial(_unpadded_patches, patch_size=patch_size)


@checked()
def llava_onevision_length(patch_size: PositiveInt = 14, max_tiles: PositiveInt = 9) -> ImageLength:
    """Count the tokens of an image for LLaVA-OneVision.

    A picture that is alone in its sample takes tokens as for Llava-NeXT, see `llava_next_length`.
    Where its tiles have many more patches than `max_tiles` whole ones, the model shrinks them. Each
    of several pictures takes one token per patch of its tile, and one at the end. The rule is that
    of transformers' ``LlavaOnevisionProcessor.replace_image_token``.

    Args:
        patch_size: Side of a patch in pixels.
        max_tiles: The number in the model's ``vision_aspect_ratio``, "anyres_max_9".

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=384, tiles=LlavaOnevisionTiles())``.

    Examples:
        >>> length = llava_onevision_length()
        >>> shape = ImageShape(384, 384, picture=(480, 640), num_tiles=5, grid=(2, 2))
        >>> length(shape)  # 27 x 27 patches, and 40 rows of 54 patches and a mark
        2929
        >>> length(ImageShape(384, 384, picture=(480, 640)))  # beside another picture
        730
    """
    return partial(_shrunk_patches, patch_size=patch_size, max_tiles=max_tiles)


@checked()
def internvl_length(tile_length: PositiveInt = 256) -> ImageLength:
    """Count the tokens of an image for InternVL.

    Every tile takes the same number. The rule is that of transformers'
    ``InternVLProcessor.replace_image_token``, without its two marks around an image: put those into
    the chat template.

    Args:
        tile_length: Tokens per tile.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=448, tiles=InternVLTiles())``.

    Examples:
        >>> length = internvl_length()
        >>> length(ImageShape(448, 448, picture=(400, 800), num_tiles=3, grid=(1, 2)))
        768
    """
    return partial(_by_tile, tile_length=tile_length)


def _merged_patches(shape: ImageShape, side: int) -> int:
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"image_length: a picture of {shape.width}x{shape.height} is not made of squares of "
            f'{side} pixels: give ImageDecoder(resize="max_pixels", multiple_of={side})'
        )
    return shape.height // side * (shape.width // side)


def _unpadded_patches(shape: ImageShape, patch_size: int) -> int:
    """Count patches and marks at the ends of rows, without a limit."""
    side = shape.height // patch_size
    rows, columns = _unpadded_grid(shape, side)
    return side * side + rows * (columns + 1)


def _shrunk_patches(shape: ImageShape, patch_size: int, max_tiles: int) -> int:
    """Count patches and marks at the ends of rows, of which the model keeps a limited number."""
    side = shape.height // patch_size
    if shape.num_tiles == 1:
        return side * side + 1
    rows, columns = _unpadded_grid(shape, side)
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return side * side + rows * (columns + 1)


def _unpadded_grid(shape: ImageShape, side: int) -> tuple[int, int]:
    """Return the rows and columns of patches that are not padding, of tiles of `side` patches.

    Example: a picture of 480x640 pixels in a grid of 2x2 tiles of 336 pixels, with patches of 14. A
    tile has 24x24 patches, the grid 48x48. The picture is as wide as the grid, and fills 36 of its
    48 rows: 480 * 48 / 640. So it takes 24 * 24 + 36 * (48 + 1) = 2340 tokens of Llava-NeXT.
    """
    rows, columns = (count * side for count in shape.grid)
    height, width = shape.picture
    # Both sides lose the same number of padding patches, rounded down: hence // 2 * 2. The order of
    # operations and the seven digits are those of the model: they decide where a half is rounded.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def _by_tile(shape: ImageShape, tile_length: int) -> int:
    return shape.num_tiles * tile_length


# -- videos; with times between the frames, where a model wants them -------------------------------

OMNI_CHUNK_S = 2
"""Seconds of a video whose frames stand together in Qwen2.5-Omni's text, and then their sound."""
OMNI_POSITIONS_PER_S = 25
"""Positions of a second of Qwen2.5-Omni, and tokens of a second of sound."""
QWEN3_OMNI_POSITIONS_PER_S = 13
"""The same of Qwen3-Omni."""

_CLOCK_S = 1e-6
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_SMALL_NUMBERS = _WORDS.split()
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


VideoLength: TypeAlias = Callable[[VideoShape], int | MediaText]
"""Says how many tokens a video of a shape takes, from 1 up, or which text takes its place."""


@checked()
def qwen_vl_video_length(
    patch_size: PositiveInt = 14, merge_size: PositiveInt = 2, temporal_patch_size: PositiveInt = 2
) -> VideoLength:
    """Count the tokens of a video for Qwen2-VL, Qwen2.5-VL and the Qwen omni models.

    A video takes one token per square of merged patches and pair of frames. The rule is that of
    transformers' ``Qwen2_5_VLProcessor.replace_video_token``: the product of ``video_grid_thw``
    divided by ``merge_size`` squared. A single frame at the end counts as a pair.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``. It raises ConfigError for frames whose sides are
        not multiples of ``patch_size * merge_size``.

    Examples:
        >>> length = qwen_vl_video_length()
        >>> shape = VideoShape(
        ...     num_frames=4, height=224, width=392, picture=(270, 480),
        ...     times_s=(0.0, 0.5, 1.0, 1.5), fps=30.0, sampled_fps=2.0,
        ... )
        >>> length(shape)  # 2 pairs of 8 x 14 squares of 28 pixels
        224
    """
    return _merging(_merged_frames, patch_size, merge_size, temporal_patch_size)


@checked()
def qwen3_vl_video_length(
    patch_size: PositiveInt = 16,
    merge_size: PositiveInt = 2,
    temporal_patch_size: PositiveInt = 2,
    *,
    video_token: str = "<|video_pad|>",
    vision_start_token: str = "<|vision_start|>",
    vision_end_token: str = "<|vision_end|>",
) -> VideoLength:
    """Write the tokens of a video for Qwen3-VL, with the time of each pair of frames before it.

    The rule is that of transformers' ``Qwen3VLProcessor.replace_video_token``. The time of a pair
    is the mean of its frames, in seconds with one digit. It counts from the start of the span that
    is shown.

    On a constant frame rate, a frame's time is its number divided by the rate, as the processor
    has it. Otherwise it is the container's time, which the processor does not know.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.
        video_token: The ``video_token`` of the text decoder.
        vision_start_token: What stands before the tokens of each pair.
        vision_end_token: What stands behind them.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``. It raises ConfigError for frames whose sides are
        not multiples of ``patch_size * merge_size``.

    Examples:
        >>> length = qwen3_vl_video_length()
        >>> shape = VideoShape(
        ...     num_frames=2, height=64, width=96, picture=(60, 90), times_s=(0.0, 0.5), fps=30.0,
        ...     sampled_fps=2.0, indices=(0, 15),
        ... )
        >>> text = length(shape)  # one pair of 2 x 3 squares of 32 pixels
        >>> text.text, text.lengths
        ('<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>', (6,))
    """
    return _merging(
        _stamped,
        patch_size,
        merge_size,
        temporal_patch_size,
        marked=f"{vision_start_token}{video_token}{vision_end_token}",
    )


@checked()
def qwen_omni_video_length(
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
    `qwen_vl_video_length`.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.
        video_token: The ``video_token`` of the text decoder.
        audio_token: The ``audio_token`` of the text decoder.
        audio_start_token: What stands before the tokens of a video with sound.
        audio_end_token: What stands behind them.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with ``audio_length=`` and
        ``VideoDecoder.from_processor(processor, audio=mm.AudioDecoder.from_processor(processor))``.
        It raises ConfigError for frames whose sides are not multiples of
        ``patch_size * merge_size``, and without ``VideoDecoder(fps=)`` of 1 or more: the processor
        counts time by the rate that it is asked for, whatever was taken of a video.

    Examples:
        >>> from mmstream.decoding.media_shapes import AudioShape
        >>> length = qwen_omni_video_length()
        >>> shape = VideoShape(
        ...     num_frames=6, height=56, width=84, picture=(60, 90), fps=30.0, sampled_fps=2.0,
        ...     times_s=(0.0, 0.5, 1.0, 1.5, 2.0, 2.5), sound=AudioShape(48_000, 300, 16_000),
        ...     requested_fps=2.0,
        ... )
        >>> text = length(shape)  # three pairs of 2 x 3 squares, and 75 tokens of sound
        >>> text.lengths, text.audio_lengths
        ([12, 6], [50, 25])
    """
    return _merging(
        _with_sound,
        patch_size,
        merge_size,
        temporal_patch_size,
        tokens=(audio_start_token, video_token, audio_token, audio_end_token),
    )


@checked()
def qwen3_omni_video_length(
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
    without sound takes tokens as by `qwen_vl_video_length`.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.
        video_token: The ``video_token`` of the text decoder.
        audio_token: The ``audio_token`` of the text decoder.
        audio_start_token: What stands before the tokens of a video with sound.
        audio_end_token: What stands behind them.

    Returns:
        A function for ``TextDecoder(video_length=)``, as `qwen_omni_video_length` returns. Use it
        with ``audio_length=mm.qwen3_omni_audio_length()``.

    Examples:
        >>> from mmstream.decoding.media_shapes import AudioShape
        >>> length = qwen3_omni_video_length()
        >>> shape = VideoShape(
        ...     num_frames=4, height=64, width=96, picture=(60, 90), fps=30.0, sampled_fps=2.0,
        ...     times_s=(0.0, 0.5, 1.0, 1.5), sound=AudioShape(48_000, 300, 16_000),
        ...     requested_fps=2.0,
        ... )
        >>> text = length(shape)  # two pairs of 2 x 3 squares, and 39 tokens of sound
        >>> text.lengths, text.audio_lengths
        ([6, 6], [13, 26])
    """
    return _merging(
        _among_sound,
        patch_size,
        merge_size,
        temporal_patch_size,
        tokens=(audio_start_token, video_token, audio_token, audio_end_token),
    )


@checked()
def llava_onevision_video_length(patch_size: PositiveInt = 14) -> VideoLength:
    """Count the tokens of a video for LLaVA-OneVision.

    The patches of a frame are pooled two by two, and one token ends the video. The rule is that of
    transformers' ``LlavaOnevisionProcessor.replace_video_token``.

    Args:
        patch_size: Side of a patch of the vision tower in pixels.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``. It raises ConfigError for frames that are no
        squares.

    Examples:
        >>> length = llava_onevision_video_length()
        >>> shape = VideoShape(
        ...     num_frames=8, height=384, width=384, picture=(270, 480), times_s=(0.0,) * 8,
        ...     fps=30.0, sampled_fps=2.0,
        ... )
        >>> length(shape)  # 8 frames of 14 x 14, and one
        1569
    """
    return partial(_pooled_patches, patch_size=patch_size)


@checked()
def smolvlm_video_length(
    image_length: PositiveInt = 169,
    *,
    image_token: str = "<image>",
    fake_image_token: str = "<fake_token_around_image>",
    global_image_token: str = "<global-img>",
) -> VideoLength:
    """Write the tokens of a video for SmolVLM: an introduction, and the time of each frame.

    The rule is that of transformers' ``SmolVLMProcessor.replace_video_token``. Frames are images
    for the model. So the chat template must write `image_token` for a video, and rows have videos
    or images, not both, as with the processor.

    Args:
        image_length: Tokens of a frame, the ``image_seq_len`` of the processor.
        image_token: The token of an image. It is the ``video_token`` of the text decoder, too.
        fake_image_token: What stands around the tokens of each frame.
        global_image_token: What stands before them.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``.

    Examples:
        >>> shape = VideoShape(
        ...     num_frames=2, height=364, width=364, picture=(60, 90), times_s=(0.0, 61.0),
        ...     fps=30.0, sampled_fps=1.0, indices=(0, 1830), end_s=62.0,
        ... )
        >>> text = smolvlm_video_length()(shape)
        >>> text.text.splitlines()[0]
        'You are provided the following series of two frames from a 0:01:02 [H:MM:SS] video.'
        >>> text.text.splitlines()[-2]
        'Frame from 01:01:<fake_token_around_image><global-img><image><fake_token_around_image>'
    """
    marked = f"{fake_image_token}{global_image_token}{image_token}{fake_image_token}"
    return partial(_introduced, image_length=image_length, marked=marked)


def _introduced(shape: VideoShape, image_length: int, marked: str) -> MediaText:
    times = _times(shape)
    is_known = math.isfinite(shape.end_s)
    # A float of ten seconds may be a little below ten.
    duration_s = int((shape.end_s - shape.start_s if is_known else times[-1]) + _CLOCK_S)
    minutes, seconds = divmod(duration_s, 60)
    pieces = [
        f"You are provided the following series of {_in_words(len(times))} frames from a "
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02} [H:MM:SS] video.\n"
    ]
    pieces += [f"\nFrame from {int(time // 60):02}:{int(time % 60):02}:{marked}" for time in times]
    return MediaText("".join([*pieces, "\n\n"]), (image_length,) * len(times))


def _in_words(number: int) -> str:
    """Return a number below 1,000 in English words, as the package ``num2words`` has them."""
    if number >= 1000:
        raise ConfigError(f"smolvlm_video_length: {number} frames: give VideoDecoder(max_frames=)")
    hundreds, rest = divmod(number, 100)
    words = [f"{_SMALL_NUMBERS[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        words.append(_TENS[tens] + (f"-{_SMALL_NUMBERS[ones]}" if ones else ""))
    elif rest or not hundreds:
        words.append(_SMALL_NUMBERS[rest])
    return " and ".join(words)


def _merging(
    rule: Callable[..., int | MediaText],
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    **settings: Any,
) -> VideoLength:
    """Return a rule of tokens that stand for squares of merged patches, with its settings."""
    side = patch_size * merge_size
    return partial(rule, side=side, num_merged=temporal_patch_size, **settings)


def _merged_frames(shape: VideoShape, side: int, num_merged: int) -> int:
    return _num_groups(shape, num_merged) * _squares(shape, side)


def _with_sound(
    shape: VideoShape, side: int, num_merged: int, tokens: tuple[str, str, str, str]
) -> int | MediaText:
    num_groups, num_squares = _num_groups(shape, num_merged), _squares(shape, side)
    if shape.sound is None:
        return num_groups * num_squares
    start, video, audio, end = tokens
    # Below this rate the processor would cut its parts within the tokens of a frame.
    fps = _requested_fps(shape, least=num_merged / OMNI_CHUNK_S)
    seconds = num_merged / fps  # the order of products is the processor's
    positions = [group * seconds * OMNI_POSITIONS_PER_S for group in range(num_groups)]
    chunks = Counter(int(each // (OMNI_CHUNK_S * OMNI_POSITIONS_PER_S)) for each in positions)
    groups = list(chunks.values())
    sounds = _chunks(num_audio_tokens(shape.sound), OMNI_CHUNK_S * OMNI_POSITIONS_PER_S)
    pieces = [
        piece
        for chunk in range(max(len(groups), len(sounds)))
        for piece in (video * (chunk < len(groups)), audio * (chunk < len(sounds)))
    ]
    lengths = [number * num_squares for number in groups]
    return MediaText("".join([start, *pieces, end]), lengths, sounds)


def _among_sound(
    shape: VideoShape, side: int, num_merged: int, tokens: tuple[str, str, str, str]
) -> int | MediaText:
    num_groups, num_squares = _num_groups(shape, num_merged), _squares(shape, side)
    if shape.sound is None:
        return num_groups * num_squares
    start, video, audio, end = tokens
    num_sounds = num_qwen3_omni_tokens(shape.sound)
    seconds = num_merged / _requested_fps(shape)  # the order of products is the processor's
    # How many tokens of sound stand before each pair of frames, and before the end.
    before = [
        min(num_sounds, math.ceil(group * seconds * QWEN3_OMNI_POSITIONS_PER_S))
        for group in range(num_groups)
    ]
    sounds = np.diff([*before, num_sounds]).tolist()
    pieces = [video + audio * (number > 0) for number in sounds]
    text = "".join([start, *pieces, end])
    return MediaText(text, [num_squares] * num_groups, [number for number in sounds if number])


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


def _stamped(shape: VideoShape, side: int, num_merged: int, marked: str) -> MediaText:
    times = _times(shape)
    times += times[-1:] * (-len(times) % num_merged)
    num_squares = _squares(shape, side)
    texts = []
    for start in range(0, len(times), num_merged):
        # The sum and the division are those of the processor: they decide how a half is rounded.
        time = (times[start] + times[start + num_merged - 1]) / 2
        texts.append(f"<{time:.1f} seconds>{marked}")
    return MediaText("".join(texts), (num_squares,) * len(texts))


def _times(shape: VideoShape) -> list[float]:
    """Return the times of frames in seconds, from the start of the span."""
    times = [time - shape.start_s for time in shape.times_s]
    numbered = [index / shape.fps for index in shape.indices] if shape.fps > 0 else []
    is_constant = len(numbered) == len(times) and all(
        abs(time - number) < 0.5 / shape.fps for time, number in zip(times, numbered, strict=True)
    )
    return numbered if is_constant else times


def _pooled_patches(shape: VideoShape, patch_size: int) -> int:
    if shape.height != shape.width:
        raise ConfigError(
            f"video_length: frames of {shape.width}x{shape.height} are no squares: give "
            "VideoDecoder(size=384, resize=...), or VideoDecoder.from_processor(processor)"
        )
    side = -(-(shape.height // patch_size) // 2)
    return shape.num_frames * side * side + 1


def _num_groups(shape: VideoShape, num_merged: int) -> int:
    return -(-shape.num_frames // num_merged)


def _squares(shape: VideoShape, side: int) -> int:
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"video_length: frames of {shape.width}x{shape.height} are not made of squares of "
            f'{side} pixels: give VideoDecoder(resize="max_pixels", multiple_of={side})'
        )
    return shape.height // side * (shape.width // side)


# -- audio -----------------------------------------------------------------------------------------

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
