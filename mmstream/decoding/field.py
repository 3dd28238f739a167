"""What decodes one field of a sample: the protocol, and what all fields share.

Place in the flow: `Decode` turns its settings into a table of these, one for each field of the
batch, and `sample.py` runs the table on each sample:

    `ValueField`               here: numbers, texts, arrays, functions of the user
    `PictureField`             `pictures.py`: pictures, masks, tiles
    `VideoField` `AudioField`  `media.py`: videos with their tracks, recordings
    `Follower`                 `followers.py`: boxes, points and times, which follow the others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mmstream.decoding.fields import (
    address,
    audio_fields,
    call_user,
    field_names,
    image_fields,
    video_fields,
    with_address,
)
from mmstream.decoding.image.geometry import Plan
from mmstream.decoding.media_shapes import Span
from mmstream.decoding.sample_rng import is_user_function, sample_rng, seed_generators
from mmstream.errors import ConfigError, DecodeError
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.types import Sample

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
"""The kinds of media, and the fields of what ``Decode(image=, video=, audio=)`` decode."""

_FILES_OF = {IMAGE: image_fields, VIDEO: video_fields, AUDIO: audio_fields}


class FieldPlan(NamedTuple):
    """What is known of the files of a field before they are decoded."""

    files: tuple[str, ...]
    """The encoded files, in order."""
    details: tuple[Any, ...]
    """What the decoder has planned of each."""
    rng: np.random.Generator | None = None
    """For draws that need more than a header."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the uint8 arrays that each file is decoded into. (): they have no memory of the batch, or
    all rows have the same."""


class FieldResult(NamedTuple):
    """What a field makes of a sample."""

    files: tuple[str, ...]
    """What the results take the place of."""
    fields: dict[str, Any]
    geometry: Plan | None = None
    """How the one picture was resized, cropped and flipped. None: it is no single picture."""
    spans: tuple[Span, ...] = ()
    """What was taken of each file, in seconds."""
    recordings: Mapping[str, Any] | None = None
    """Decoded sounds by file, which are joined across fields. None: it decodes none."""


@dataclass(frozen=True)
class Field:
    """One field of the batch, and the decoder of its files."""

    name: str
    decoder: Any
    sources: tuple[str, ...] = ()
    """The first of these files that a sample has is decoded. (): all files of its kind."""
    taken: frozenset[str] = frozenset()
    """Files that other fields take."""
    kind: ClassVar[str] = ""
    """Of medium."""
    encoded: ClassVar[tuple[type, ...]] = (bytes, LazyBytes)
    """The types of a file that is not decoded yet."""

    @cached_property
    def is_user(self) -> bool:
        """Whether a function or class of the user decodes it, which may draw at random."""
        return is_user_function(self.decoder)

    def seed(self, sample: Sample, stage: str) -> None:
        """Seed the generators of this process for a decoder of the user."""
        if self.is_user:
            seed_generators(sample, f"{stage} {self.name}")

    def rng(self, sample: Sample) -> np.random.Generator | None:
        """Return the generator of the field's draws. None: its decoder draws nothing.

        The sample's transforms have other streams.

        Raises:
            ConfigError: The sample has no lineage.
        """
        if not self.decoder.is_random:
            return None
        if "__lineage__" not in sample:
            what = "crop or flip" if self.kind == IMAGE else "part or crop"
            raise ConfigError(f"a random {what} needs the lineage that samples of a Pipeline have")
        return sample_rng(
            sample, self.kind if self.name == self.kind else f"{self.kind} {self.name}"
        )

    def source(self, sample: Sample) -> str:
        """Return the file of a field that has one.

        Raises:
            DecodeError: The sample has none of them.
        """
        for name in self.sources:
            if name in sample:
                return name
        names = " or ".join(self.sources)
        raise DecodeError(f"{address(sample, '')}: no field {names}; it has {field_names(sample)}")

    def files(self, sample: Sample) -> tuple[str, ...]:
        """Return the encoded files of a field, in order; errors as of `source`.

        A function before decoding may have decoded others already.
        """
        names: Sequence[str] = (self.source(sample),) if self.sources else self.free_files(sample)
        return tuple(name for name in names if isinstance(sample[name], self.encoded))

    def free_files(self, sample: Sample) -> list[str]:
        """Return the files of this kind that no other field takes."""
        return [name for name in _FILES_OF[self.kind](sample) if name not in self.taken]

    def left_as_is(self, sample: Sample) -> FieldResult:
        """Return the value that a function before decoding has made."""
        source = self.source(sample)
        return FieldResult((source,), {self.name: sample[source]})


class ValueField(Field):
    """A number, a text, an array, or what a function of the user makes of a file."""

    def decode(self, sample: Sample) -> FieldResult:
        """Decode the file of a sample.

        Raises:
            DecodeError: It is missing or damaged.
        """
        if not self.files(sample):
            return self.left_as_is(sample)
        source = self.source(sample)
        self.seed(sample, "field")
        value = with_address(sample, source, partial(call_user, self.decoder, sample[source]))
        return FieldResult((source,), {self.name: value})
