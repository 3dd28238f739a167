"""What decodes one field of a sample: the protocol, and what all fields share.

Place in the flow: `Decode` turns its settings into a table of these, one for each field of the
batch, and `sample.py` runs the table on each sample:

    `ValueField`               here: numbers, texts, arrays, functions of the user
    `PictureField`             here: pictures, masks, tiles
    `VideoField` `AudioField`  `media.py`: videos with their tracks, recordings
    `Follower`                 `followers.py`: boxes, points and times, which follow the others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from mmstream.decoding.image.decoder import Decoded
from mmstream.decoding.image.geometry import ImageShape, Plan
from mmstream.decoding.media_shapes import Span
from mmstream.decoding.sample_rng import is_user_function, sample_rng, seed_generators
from mmstream.errors import ConfigError, DecodeError, escaped
from mmstream.media.fields import (
    FIELDS_OF,
    address,
    call_user,
    field_names,
    own_names,
    with_address,
)
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.types import Sample

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
"""The kinds of media, and the fields of what ``Decode(image=, video=, audio=)`` decode."""


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
        return [name for name in FIELDS_OF[self.kind](sample) if name not in self.taken]

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


# -- pictures, masks and tiles ---------------------------------------------------------------------
#
# A picture of a fixed shape is decoded before the rest of its sample, into the memory of its batch
# (`PictureField.is_early`). A decoder in C fills the caches of its core with pixels, and the Python
# after it runs several times slower than Python in one piece. So a step is planned, decoded and
# finished in three passes, with little Python between two pictures.
#
# All other pictures are decoded with their sample: those of any size, several of a sample, those
# that share the geometry of another, and what a decoder of the user makes.


@dataclass(frozen=True)
class PictureField(Field):
    """The picture of a name, or all pictures of a sample that have no field of their own."""

    leader: str = ""
    """The field whose geometry it shares. "": it has its own."""
    shape: tuple[int, ...] | None = None
    """Of each picture as decoded: uint8 [H, W, 3], of a mask [H, W]. None: they differ."""
    kind: ClassVar[str] = IMAGE
    encoded: ClassVar[tuple[type, ...]] = (bytes, memoryview, LazyBytes)

    @property
    def is_early(self) -> bool:
        """Whether it is decoded before the rest of its sample."""
        return self.shape is not None and not self.leader and not self.is_user

    def plan(self, sample: Sample) -> FieldPlan | None:
        """Plan the one picture of a sample. None: there is none, or there are several.

        Raises:
            DecodeError: It is missing, or exceeds a limit.
        """
        files = self.files(sample)
        if len(files) != 1:
            return None
        rng = self.rng(sample)
        plan = partial(self.decoder.plan_picture, sample[files[0]], rng)
        return FieldPlan(files, (with_address(sample, files[0], plan),), rng)

    def decode(
        self,
        sample: Sample,
        plan: FieldPlan | None,
        out: Sequence[torch.Tensor],
        geometry: Plan | None = None,
    ) -> FieldResult:
        """Decode the pictures of a sample. The limits of memory and time hold for all together.

        Args:
            sample: With a lineage, where the decoder draws.
            plan: What `plan` returned. None: they are planned now.
            out: The row of the batch, for one picture. Empty: it has new memory.
            geometry: That of `leader`.

        Raises:
            DecodeError: One is missing or damaged, or has another size than that of `leader`. Or
                there are several with names of their own.
        """
        files = self.files(sample) if plan is None else plan.files
        if self.sources and not files:
            return self.left_as_is(sample)
        if not self.sources:
            check_own_names(sample, files)
        self.seed(sample, "field" if self.sources else "decode")
        decoder = self.decoder.of_sample(len(files))
        memory = out[0] if out and len(files) == 1 else None
        pixels = None if memory is None else memory.numpy()
        limits = decoder.start_limits()
        if len(files) > 1 and decoder.output_shape is not None:
            check = partial(limits.check_results, len(files), *decoder.output_shape)
            with_address(sample, "", check)
        if plan is not None:
            call = partial(decoder.decode_planned, sample[files[0]], *plan.details)
            results = [with_address(sample, files[0], partial(call, pixels, plan.rng, limits))]
        else:
            rng = self.rng(sample) if geometry is None else None
            results = []
            for file in files:
                call = partial(decoder.decode, sample[file], pixels, rng, geometry, limits)
                results.append(with_address(sample, file, call))
                limits = limits.holding(results[-1].pixels.nbytes)
        single = None
        if len(results) == 1 and decoder.tiles is None:
            single = Plan(results[0].picture, results[0].view)
        return FieldResult(files, self._fields(results, memory), single)

    def _fields(self, results: Sequence[Decoded], memory: torch.Tensor | None) -> dict[str, Any]:
        if self.decoder.tiles is not None:
            tiles = [torch.from_numpy(each.pixels).permute(0, 3, 1, 2) for each in results]
            sizes = np.array([each.picture for each in results], np.int64)
            return {
                IMAGE: [tile for of_picture in tiles for tile in of_picture],
                "image_tiles": np.array([len(each) for each in tiles], np.int64),
                "image_size": sizes.reshape(-1, 2),
            }
        # Collate need not copy what lies in the batch's memory.
        tensors = (
            [torch.from_numpy(each.pixels) for each in results] if memory is None else [memory]
        )
        if not self.decoder.mask:
            tensors = [tensor.permute(2, 0, 1) for tensor in tensors]
        return {self.name: tensors[0] if len(tensors) == 1 else tensors}

    def shapes(
        self, sample: Sample, files: Sequence[str], *, decodes: bool
    ) -> list[ImageShape] | None:
        """Return the shapes that the pictures of a sample will have, from their headers.

        Args:
            sample: The sample.
            files: What `files` returned for it.
            decodes: Where a header does not tell, decode the pictures. That is rare, and they are
                decoded a second time later.

        Returns:
            None: a header does not tell.

        Raises:
            DecodeError: A picture cannot be decoded.
        """
        self.seed(sample, "plan")
        decoder = self.decoder.of_sample(len(files))
        shapes = [decoder.prepared_shape(sample[file]) for file in files]
        if None not in shapes:
            return shapes
        if not decodes:
            return None
        rng, limits = self.rng(sample), decoder.start_limits()
        calls = [partial(decoder.decode, sample[file], None, rng, None, limits) for file in files]
        decoded = [with_address(sample, *each) for each in zip(files, calls, strict=True)]
        return [decoder.shape_of(each.picture) for each in decoded]


def check_own_names(sample: Sample, names: Sequence[str]) -> None:
    """Refuse several pictures of which some have names, such as ``input.jpg`` and ``target.png``.

    They mean different things, and ``image`` would not tell which is which. Messages may name them:
    then their order says it.

    Raises:
        DecodeError: Says what to write.
    """
    named = own_names(names) if len(names) > 1 else []
    if not named or set(named) <= _fields_of_messages(sample):
        return
    shown = ", ".join(f'"{escaped(name, 60)}": mm.ImageDecoder(...)' for name in names[:4])
    raise DecodeError(
        f"{address(sample, '')}: image= takes the pictures of a sample for a list, and "
        f"{' and '.join(escaped(name, 60) for name in named[:4])} have names of their own: decode "
        f"them by field, mm.Decode({{{shown}}}), or leave some out in Pipeline(before=)"
    )


def _fields_of_messages(sample: Sample) -> set[str]:
    """Return the fields that the parts of a sample's messages name."""
    row = sample.get("json")
    messages = row.get("messages") if isinstance(row, dict) else None
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict)
    ]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {str(part.get("field")) for part in parts if isinstance(part, dict)}
