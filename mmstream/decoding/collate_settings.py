"""`CollateSettings`: what batches depend on beside the values of samples.

Place in the flow: `Decode.collate_settings` says it of the decoders, and batches are made by it. A
bake writes it to the manifest, so that batches of the baked dataset are the same.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec

MAX_SIDE = 1 << 48

Side = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIDE)]
"""Of an array."""

TokenId = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]

MAX_PADDED_LENGTH = 1 << 22

PaddedLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_PADDED_LENGTH)]
"""Tokens of a row. A manifest may come from a stranger, and each batch takes the memory."""


EmptyAudio: TypeAlias = tuple[tuple[Side, ...], Literal["int16", "float32"]]
"""Shape and type of a field in a batch without a recording."""


class CollateSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What batches depend on beside the values of samples: settings of the pipeline's decoders."""

    pad_token_id: TokenId | None = None
    """None: the pipeline had no text decoder."""
    pad_to: PaddedLength | None = None
    padding_side: Literal["left", "right"] = "right"
    counted_media: tuple[str, ...] = ("audio", "image", "video")
    picture_names: tuple[str, ...] = ()
    """Fields of pictures with colours, which a model wants normalized."""
    list_fields: tuple[str, ...] = ()
    picture_fields: tuple[str, ...] = ()
    video_fields: dict[str, tuple[Side, ...] | None] = {}
    """Shape of each field in a batch without a video; None where it is a list."""
    audio_fields: dict[str, EmptyAudio] = {}

    def __post_init__(self) -> None:
        recordings = (shape for shape, _ in self.audio_fields.values())
        for shape in (*self.video_fields.values(), *recordings):
            if shape is not None and (0 not in shape[:1] or math.prod(shape[1:]) > MAX_SIDE):
                raise ValueError(f"a field without media has the shape {shape}")
