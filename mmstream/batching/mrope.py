"""The positions of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: time, height and width of each token.

flat.py -> `QwenVLPositions`

Workers compute them from the sizes of pictures and videos, so the device never waits for the
tokens. Text has the same number in all three. A picture begins where the text before it ends, and
the text behind goes on after its longer side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mmstream.batching.batching import DocumentMedia
from mmstream.errors import ConfigError
from mmstream.types import IntArray
from mmstream.wrong_arguments import NonNegativeInt, PositiveInt, checked

_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


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
        has_split_videos: Whether each group of frames stands by itself, behind its time, as
            Qwen3-VL has it.

    Raises:
        ConfigError: Of `from_config`: the model is of another family.

    Examples:
        >>> from transformers import Qwen2VLConfig
        >>> positions = mm.QwenVLPositions.from_config(Qwen2VLConfig())
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
        if family not in _FAMILIES:
            raise ConfigError(
                f"QwenVLPositions: {family or type(config).__name__} is none of "
                f"{', '.join(_FAMILIES)}: leave positions= out; model_inputs computes those of "
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
            f"mm.qwen_vl_length(patch_size={self.patch_size}, merge_size={self.merge_size})), and "
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
