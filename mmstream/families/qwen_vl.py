"""Qwen-VL: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and GLM-4V, which takes pictures as they do.

Images and videos of any size become lines of patches, of which squares of merged ones take a token
each. Positions have three dimensions: time, height and width. Those of GLM are by its own rule.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media_shapes import MediaText, VideoShape
from mmstream.decoding.text.placeholders import ImageLength, VideoLength
from mmstream.errors import ConfigError
from mmstream.families.family import (
    Blank,
    DocumentMedia,
    Family,
    Inputs,
    Medium,
    Pictures,
    Tensor,
    TokenCount,
    Videos,
    import_torchvision,
)
from mmstream.settings import NonNegativeInt, PositiveInt, checked
from mmstream.types import IntArray

# -- tokens of images and videos -------------------------------------------------------------------


@checked()
def image_length(patch_size: PositiveInt = 14, merge_size: PositiveInt = 2) -> ImageLength:
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
        >>> length = image_length()
        >>> length(ImageShape(476, 644, picture=(480, 640)))  # 17 x 23 squares of 28 pixels
        391
    """
    return partial(_merged_patches, side=patch_size * merge_size)


def _merged_patches(shape: ImageShape, side: int) -> int:
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"image_length: a picture of {shape.width}x{shape.height} is not made of squares of "
            f'{side} pixels: give ImageDecoder(resize="max_pixels", multiple_of={side})'
        )
    return shape.height // side * (shape.width // side)


@checked()
def video_length(
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
        >>> length = video_length()
        >>> shape = VideoShape(
        ...     num_frames=4, height=224, width=392, picture=(270, 480),
        ...     times_s=(0.0, 0.5, 1.0, 1.5), fps=30.0, sampled_fps=2.0,
        ... )
        >>> length(shape)  # 2 pairs of 8 x 14 squares of 28 pixels
        224
    """
    return merging(_merged_frames, patch_size, merge_size, temporal_patch_size)


@checked()
def qwen3_video_length(
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
        vision_end_token: What stands after them.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``. It raises ConfigError for frames whose sides are
        not multiples of ``patch_size * merge_size``.

    Examples:
        >>> length = qwen3_video_length()
        >>> shape = VideoShape(
        ...     num_frames=2, height=64, width=96, picture=(60, 90), times_s=(0.0, 0.5), fps=30.0,
        ...     sampled_fps=2.0, indices=(0, 15),
        ... )
        >>> text = length(shape)  # one pair of 2 x 3 squares of 32 pixels
        >>> text.text, text.lengths
        ('<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>', (6,))
    """
    return merging(
        _stamped,
        patch_size,
        merge_size,
        temporal_patch_size,
        marked=f"{vision_start_token}{video_token}{vision_end_token}",
    )


def merging(
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
    return num_groups(shape, num_merged) * num_squares(shape, side)


def _stamped(shape: VideoShape, side: int, num_merged: int, marked: str) -> MediaText:
    times = frame_times(shape)
    times += times[-1:] * (-len(times) % num_merged)
    length = num_squares(shape, side)
    texts = []
    for start in range(0, len(times), num_merged):
        # The sum and the division are those of the processor: they decide how a half is rounded.
        time = (times[start] + times[start + num_merged - 1]) / 2
        texts.append(f"<{time:.1f} seconds>{marked}")
    return MediaText("".join(texts), (length,) * len(texts))


def frame_times(shape: VideoShape) -> list[float]:
    """Return the times of frames in seconds, from the start of the span."""
    times = [time - shape.start_s for time in shape.times_s]
    numbered = [index / shape.fps for index in shape.indices] if shape.fps > 0 else []
    is_constant = len(numbered) == len(times) and all(
        abs(time - number) < 0.5 / shape.fps for time, number in zip(times, numbered, strict=True)
    )
    return numbered if is_constant else times


def num_groups(shape: VideoShape, num_merged: int) -> int:
    """Return how many groups of merged frames a video has."""
    return -(-shape.num_frames // num_merged)


def num_squares(shape: VideoShape, side: int) -> int:
    """Return how many squares of merged patches a frame has.

    Raises:
        ConfigError: It is not made of such squares.
    """
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"video_length: frames of {shape.width}x{shape.height} are not made of squares of "
            f'{side} pixels: give VideoDecoder(resize="max_pixels", multiple_of={side})'
        )
    return shape.height // side * (shape.width // side)


# -- positions: in workers, from sizes -------------------------------------------------------------
#
# Workers compute them from the sizes of pictures and videos, so the device never waits for the
# tokens. Text has the same number in all three rows. A picture begins where the text before it
# ends, and the text after it continues after its longer side.


class _Grid(NamedTuple):
    """The tokens of a picture, or of a video: groups of frames, and squares down and across."""

    num_groups: int
    height: int
    width: int
    interval: Any = 1
    """What the time grows by from group to group."""

    @property
    def num_tokens(self) -> int:
        return self.num_groups * self.height * self.width


@checked()
@dataclass(frozen=True)
class QwenVLPositions:
    """The rule of the positions of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, for ``mm.Flat(positions=)``.

    It gives what ``get_rope_index`` of `transformers` gives for each document by itself.

    Attributes:
        image_token_id: The token in whose place a picture's vectors come.
        video_token_id: The same for videos.
        patch_size: Side of a patch in pixels.
        merge_size: How many patches on each side are merged into one token.
        temporal_patch_size: How many frames are merged.
        tokens_per_second: What the time of a video grows by in a second. None: by 1 for each group
            of frames.
        has_split_videos: Whether each group of frames stands by itself, after its time, as
            Qwen3-VL has it.

    Raises:
        ConfigError: Of `from_config`: the model is of another family.

    Examples:
        >>> from transformers import Qwen2VLConfig
        >>> positions = QwenVLPositions.from_config(Qwen2VLConfig())
        >>> mm.Flat(positions=positions).positions.patch_size
        14
    """

    image_token_id: NonNegativeInt
    video_token_id: NonNegativeInt
    patch_size: PositiveInt
    merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    tokens_per_second: PositiveInt | None = None
    has_split_videos: bool = False

    @classmethod
    @checked(cure="QwenVLPositions: the config does not state its sizes; give them yourself")
    def from_config(cls, config: Any) -> QwenVLPositions:
        """Return the rule of a model, from its config of `transformers`.

        Raises:
            ConfigError: The model is of another family.
        """
        family = getattr(config, "model_type", None)
        if family not in FAMILIES:
            raise ConfigError(
                f"QwenVLPositions: {family or type(config).__name__} is none of "
                f"{', '.join(FAMILIES)}: leave positions= out; model_inputs computes those of "
                "other models"
            )
        vision = config.vision_config
        return cls(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            tokens_per_second=vision.tokens_per_second if family == "qwen2_5_vl" else None,
            has_split_videos=family.startswith("qwen3"),
        )

    def __call__(self, input_ids: IntArray, media: DocumentMedia) -> IntArray:
        """Return the positions of a document of L tokens, int64 [3, L]: time, height, width.

        Args:
            input_ids: int64 [L].
            media: The sizes of its pictures and videos.

        Raises:
            ConfigError: The document has other tokens of media than these take.

        Examples:
            A token of text, a picture of 2 x 3 tokens and one more of text:

            >>> rule = QwenVLPositions(image_token_id=7, video_token_id=8, patch_size=14)
            >>> media = DocumentMedia(images=[(56, 84)], videos=[], fps=[])
            >>> rule(np.array([1, 7, 7, 7, 7, 7, 7, 2]), media).tolist()
            [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
        """
        grids = {1: deque(self._pictures(media)), 2: deque(self._videos(media))}
        positions = np.empty((3, len(input_ids)), np.int64)
        position = 0
        for kind, start, stop in self._runs(input_ids):
            if not kind:
                positions[:, start:stop] = np.arange(position, position + stop - start)
                position += stop - start
                continue
            while start < stop:
                grid = grids[kind].popleft() if grids[kind] else None
                if grid is None or grid.num_tokens > stop - start:
                    raise self._mismatch(media)
                positions[:, start : start + grid.num_tokens] = _of_grid(grid) + position
                position += max(grid.height, grid.width)
                start += grid.num_tokens
        if grids[1] or grids[2]:
            raise self._mismatch(media)
        return positions

    def _runs(self, ids: IntArray) -> Iterator[tuple[int, int, int]]:
        """Yield runs of text (0), pictures (1) and videos (2): kind, start and stop."""
        kinds = (ids == self.image_token_id) + 2 * (ids == self.video_token_id)
        borders = np.flatnonzero(np.diff(kinds)) + 1
        starts = [0, *borders.tolist()]
        yield from zip(kinds[starts].tolist(), starts, [*starts[1:], len(ids)], strict=True)

    def _pictures(self, media: DocumentMedia) -> Iterator[_Grid]:
        side = self.patch_size * self.merge_size
        for height, width in media.images:
            yield _Grid(1, height // side, width // side)

    def _videos(self, media: DocumentMedia) -> Iterator[_Grid]:
        side = self.patch_size * self.merge_size
        for number, (num_frames, height, width) in enumerate(media.videos):
            num_groups = -(-num_frames // self.temporal_patch_size)
            grid = _Grid(num_groups, height // side, width // side)
            if self.has_split_videos:
                yield from [grid._replace(num_groups=1)] * num_groups
            elif self.tokens_per_second is None:
                yield grid
            else:  # in float32, as the model multiplies
                seconds = np.float32(self.temporal_patch_size / media.fps[number])
                yield grid._replace(interval=np.float32(self.tokens_per_second) * seconds)

    def _mismatch(self, media: DocumentMedia) -> ConfigError:
        return ConfigError(
            f"QwenVLPositions: a text has other tokens of media than its {len(media.images)} "
            f"pictures and {len(media.videos)} videos take: give TextDecoder(image_length="
            f"mm.families.qwen_vl.image_length(patch_size={self.patch_size}, "
            f"merge_size={self.merge_size})), and "
            "video_length= by the rule of the same model"
        )


def _of_grid(grid: _Grid) -> IntArray:
    """Return the positions of the tokens of a grid from 0, int64 [3, num_tokens]."""
    num_groups, height, width, interval = grid
    times = np.arange(num_groups) if interval == 1 else _scaled(num_groups, interval)
    return np.stack(
        (
            np.repeat(times, height * width),
            np.tile(np.repeat(np.arange(height), width), num_groups),
            np.tile(np.arange(width), num_groups * height),
        )
    )


def _scaled(num_groups: int, interval: np.float32) -> IntArray:
    return (np.arange(num_groups, dtype=np.float32) * interval).astype(np.int64)


# -- positions: by the rule of the model itself ----------------------------------------------------
#
# In a flat batch these models need a fourth row before the three, the positions in the text, by
# which they tell documents apart. With three rows, documents see each other. With one row, pictures
# are read as lines of text.

_RULE_ARGUMENTS = {
    "second_per_grid_ts": "second_per_grid_ts",
    "second_per_grids": "video_second_per_grid",
    "image_grid_thw": "image_grid_thw",
    "video_grid_thw": "video_grid_thw",
}
"""Arguments of the models' rules, and the fields of the inputs that they are."""

_checked: WeakSet[Any] = WeakSet()
"""Models whose positions were compared with their own rule. It holds no model."""


def needs_mrope(config: Any) -> bool:
    """Tell whether the text of a model has positions of several dimensions, by its config."""
    if hasattr(config, "vision_config") and config.model_type.startswith("qwen"):
        return True  # their default configs do not say so
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return "mrope_section" in parameters


def rule_of(model: Any, config: Any) -> Any:
    """Return the method with the rule: of the model, or of its class with the config.

    Raises:
        ConfigError: There is none.
    """
    for module in model.modules() if model is not None else ():
        if hasattr(module, "get_rope_index"):
            return module.get_rope_index
    import_torchvision()
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        kind: Any = mapping.get(type(config), None)
        if hasattr(kind, "get_rope_index"):
            shell = kind.__new__(kind)  # without weights: the rule reads the config only
            merge = config.vision_config.spatial_merge_size
            shell.__dict__.update(config=config, spatial_merge_size=merge)
            return shell.get_rope_index
    raise ConfigError(
        f"model_inputs: {config.model_type} has no get_rope_index: give the model itself, or "
        "positions of four rows by mm.Flat(positions=)"
    )


@dataclass(frozen=True)
class Mrope(Family):
    """Models whose positions have several dimensions. The base is one of text alone."""

    def rule_positions(
        self,
        ids: Tensor,
        mask: Tensor,
        kinds: Tensor,
        media_inputs: Inputs,
        model: Any,
        config: Any,
    ) -> Tensor:
        """Return the positions of padded documents by the model's own rule, int64 [3, B, T].

        Args:
            ids: int64 [B, T].
            mask: bool [B, T], tokens that are not padding.
            kinds: int64 [B, T], the ``mm_token_type_ids``.
            media_inputs: The media as the model takes them.
            model: The model; None where only its config is known.
            config: The model's config.
        """
        rule = rule_of(model, config)
        parameters = inspect.signature(rule).parameters
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long()}
        arguments |= {
            name: media_inputs[field]
            for name, field in _RULE_ARGUMENTS.items()
            if name in parameters and field in media_inputs
        }
        if "mm_token_type_ids" in parameters:
            arguments["mm_token_type_ids"] = kinds
        if "audio_seqlens" in parameters and "feature_attention_mask" in media_inputs:
            arguments["audio_seqlens"] = media_inputs["feature_attention_mask"].sum(-1)
        positions: Tensor = rule(**arguments)[0]
        return positions

    def flat_positions(
        self, text: Inputs, media_inputs: Inputs, model: Any, config: Any, *, sees: bool
    ) -> Tensor:
        """Return the positions of a flat batch, int64 [4, B, T]: of text, time, height and width.

        Each document is counted from 0, as the model counts one that stands alone. They are float32
        where the rule gives parts of positions. Four rows that the batch has are compared with the
        model's own rule, once a model: a rule that was made from another config of the same family
        would give wrong places or times in silence.

        Raises:
            ConfigError: ``position_ids`` have three rows, or those of another model. Or the model
                has no rule.
        """
        positions = text["position_ids"]
        if positions.ndim == 3 and len(positions) == 4:
            if sees and model is not None and model not in _checked:
                self._check_positions(text, media_inputs, model, config)
                _checked.add(model)
            return positions
        if positions.ndim == 3:
            raise ConfigError(
                f"model_inputs: position_ids have {len(positions)} rows; {config.model_type} tells "
                "documents apart by four: text, time, height and width; or give one, [1, T]"
            )
        if not media_inputs:
            return positions.expand(4, *positions.shape)
        return self._flat_by_rule(text, positions, media_inputs, model, config)

    def _check_positions(self, text: Inputs, media_inputs: Inputs, model: Any, config: Any) -> None:
        import torch

        positions, documents = text["position_ids"], text["document_ids"]
        expected = self._flat_by_rule(text, positions[0], media_inputs, model, config)
        has_media = torch.isin(documents, documents[media_inputs["mm_token_type_ids"] > 0])
        if not positions[:, has_media].equal(expected[:, has_media]):
            raise ConfigError(
                f"model_inputs: the positions of the batch are not those of this "
                f"{config.model_type}: give mm.Flat(positions="
                "mm.families.qwen_vl.QwenVLPositions.from_config(model.config)), or leave "
                "positions= out"
            )

    def _flat_by_rule(
        self, text: Inputs, positions: Tensor, media_inputs: Inputs, model: Any, config: Any
    ) -> Tensor:
        """Return the positions of a flat batch with media: each document is a padded row."""
        import torch

        lengths = text["cu_seq_lens_q"].long().diff()
        counted = torch.arange(int(lengths.max()), device=positions.device)
        mask = counted < lengths[:, None]
        ids, kinds = (torch.zeros_like(mask, dtype=torch.int64) for _ in range(2))
        ids[mask] = text["input_ids"].flatten()
        if "mm_token_type_ids" in media_inputs:
            kinds[mask] = media_inputs["mm_token_type_ids"].flatten()
        padded = self.rule_positions(ids, mask, kinds, media_inputs, model, config)
        rows = padded[:, mask].view(3, *positions.shape)
        if not rows.equal(rows.round()):  # Qwen3-Omni counts parts of positions
            return torch.cat((positions[None].to(rows.dtype), rows))
        return torch.cat((positions[None], rows.to(positions.dtype)))


# -- the family ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QwenVL(Mrope):
    """Images and videos as lines of patches.

    Attributes:
        seconds_name: The argument with the seconds of a group of frames, if the model takes one.
        video_length: The function that makes the rule for the tokens of videos.
    """

    takes: tuple[str, ...] = ("image", "video")
    seconds_name: str = ""
    video_length: Callable[..., VideoLength] = video_length

    def inputs(self, media: dict[str, Medium], ids: Tensor, config: Any) -> Inputs:
        """Return the media, and which tokens they are: newer models are told, older ones look."""
        inputs = super().inputs(media, ids, config)
        if inputs.keys() & {"image_grid_thw", "video_grid_thw"}:
            kinds = (ids == config.image_token_id).long()
            inputs["mm_token_type_ids"] = kinds + 2 * (ids == config.video_token_id).long()
        return inputs

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return one line per patch, [num_patches, channels * frames * P * P], and the grids."""
        frames = [tile[None] for tile in pictures.tiles]
        lines, grids = patch_lines(frames, config, "pictures", "ImageDecoder")
        return {"pixel_values": lines, "image_grid_thw": grids}

    def video_inputs(self, videos: Videos, config: Any) -> Inputs:
        """Return lines and grids. Frames are merged in pairs, and the last one is repeated."""
        lines, grids = patch_lines(videos.frames, config, "videos", "VideoDecoder")
        inputs = {"pixel_values_videos": lines, "video_grid_thw": grids}
        if self.seconds_name:
            group = config.vision_config.temporal_patch_size
            seconds = group / self.frames_per_second(videos, config)
            inputs[self.seconds_name] = seconds.float().to(lines.device)
        return inputs

    def frames_per_second(self, videos: Videos, config: Any) -> Tensor:
        """Return the rates by which the model counts time, float64 [num_videos]."""
        return videos.fps

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the number of squares of merged patches."""
        vision = config.vision_config
        patch, merge = vision.patch_size, vision.spatial_merge_size
        if kind == "image":
            name, shapes = "image_length", [(1, *tile.shape[-2:]) for tile in medium.tiles]
        else:
            group = vision.temporal_patch_size
            name = self.video_length.__name__
            shapes = [(-(-len(frames) // group), *frames.shape[-2:]) for frames in medium.frames]
        number = sum(
            groups * (height * width // (patch * merge) ** 2) for groups, height, width in shapes
        )
        setting = f"mm.families.qwen_vl.{name}(patch_size={patch}, merge_size={merge})"
        return TokenCount(number, setting)

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of one token."""
        side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        return Blank.picture(config, 1, side, side)


def patch_lines(
    videos: Sequence[Tensor], config: Any, media: str, decoder: str
) -> tuple[Tensor, Tensor]:
    """Cut videos into patches. Frames are merged in groups; the last one is repeated to fill one.

    Args:
        videos: Floating [F, 3, H, W] each. A picture is a video of one frame.
        config: The model's config.
        media: What they are called in messages, such as "pictures".
        decoder: The decoder that messages name.

    Returns:
        The lines, [num_patches, channels * frames * P * P], and the grid of each video, int64
        [num_videos, 3]: its groups of frames, and patches down and across.

    Raises:
        ConfigError: A side is not a multiple of the side of a token.
    """
    import torch

    vision = config.vision_config
    patch, merge, group = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    side = patch * merge
    lines, grids = [], []
    for frames in videos:
        height, width = frames.shape[-2:]
        if height % side or width % side:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes {media} whose sides are multiples of "
                f'{side}, not {width}x{height}: {decoder}(resize="max_pixels", '
                f"multiple_of={side})"
            )
        filled = _filled(frames, group)
        lines.append(_lines(filled, patch, merge, group))
        grids.append((len(filled) // group, height // patch, width // patch))
    return torch.cat(lines), torch.tensor(grids, device=lines[0].device)


def _filled(frames: Tensor, group: int) -> Tensor:
    """Repeat the last frame up to a multiple of `group`. Nothing is copied for a picture."""
    num_missing = -len(frames) % group
    if len(frames) == 1:
        return frames.expand(1 + num_missing, -1, -1, -1)
    return frames if not num_missing else frames[[*range(len(frames)), *[-1] * num_missing]]


def _lines(frames: Tensor, patch: int, merge: int, group: int) -> Tensor:
    """Cut frames, [F, C, H, W], into lines. The patches that merge into one token are neighbours.

    For example, two frames of 4 x 4 patches that merge 2 x 2 give 16 lines: first the four patches
    of the upper left token, each with the pixels of both frames.
    """
    count, channels, height, width = frames.shape
    blocks = frames.reshape(
        *(count // group, group, channels),
        *(height // patch // merge, merge, patch, width // patch // merge, merge, patch),
    )
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # tokens, patches of a token, pixels
    return blocks.reshape(count // group * height * width // patch**2, -1)


QWEN3_VL = QwenVL(video_length=qwen3_video_length)

GLM_V = QwenVL(takes=("image",))
"""GLM-4V and GLM-4.6V. Videos are refused: their tokens are those of pictures."""

FAMILIES: dict[str, QwenVL] = {
    "qwen2_vl": QwenVL(),
    "qwen2_5_vl": QwenVL(seconds_name="second_per_grid_ts"),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_VL,
    "qwen3_5_moe": QWEN3_VL,
}
