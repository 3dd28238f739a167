"""One sample: its bytes become tensors, or a DecodeError that names the field.

Place in the flow: between read and batch. `step.py` takes all samples of a step through one pass
after another; `decode_sample` takes one through all of them. They run the table of a `Decode`:

    jpg, 0.jpg, 1.png      -> "image"                                  image=ImageDecoder
                              with tiles also "image_tiles", "image_size"
    mp4, 0.webm, 0.wav     -> "video", "audio" and more: `field.py`   video=, audio=
    json messages, or txt  -> "input_ids", "attention_mask", "labels"  text=TextDecoder
    mask.png, cls, npy     -> a field of the same name                 {"mask.png": ..., "cls": int}

Fields without a decoder stay bytes, compressed ones too.

The number of an image's tokens may depend on the picture's shape. That shape is read from the
header, and so are the frames of a video. So all texts of a step are tokenized in one call, before
any picture is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from mmstream.decoding.decode import Decode
from mmstream.decoding.field import (
    AUDIO,
    IMAGE,
    VIDEO,
    FieldPlan,
    FieldResult,
    PictureField,
    check_image_names,
    joined_recordings,
    media_shapes,
)
from mmstream.decoding.followers import geometry_of
from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media_shapes import MediaShapes, Span
from mmstream.decoding.text.decoder import DecodedText, TextDecoder
from mmstream.decoding.text.placeholders import LOSS_FIELD, TextLoss
from mmstream.errors import DecodeError, SampleError
from mmstream.media.fields import (
    address,
    addressed,
    decode_text,
    frame_names,
    list_of_frame,
    with_address,
)
from mmstream.media.types import Shape
from mmstream.types import Sample

RowMemory: TypeAlias = Mapping[str, Sequence[torch.Tensor]]
"""Where decoders write a sample: into the memory of its batch. By field, one tensor a file, uint8
and C-contiguous: [H, W, 3] of a picture, [H, W] of a mask, [F, H, W, 3] of a video, [num_bytes] of
a baked field."""

NO_MEMORY: RowMemory = {}

PLAIN = Decode()
"""Parses ``json``, and nothing else."""


class MeasuredSample(NamedTuple):
    """What is known of a sample before a pixel of it is decoded."""

    text: DecodedText | None
    """The tokens of its text. None: nothing decodes texts."""
    shapes: MediaShapes
    """The shapes of the pictures, videos and recordings that belong to its text."""


class SampleDecoding:
    """A sample on its way through the passes of a step.

    Each method does what is left to do before it. Its errors are those of `decode_sample`, and win
    in this order: JSON, plans of media, names, text, values, pictures, media.

    Args:
        sample: As read from a shard: its fields are bytes. It is not changed.
        decode: The decoders. None: only ``json`` is parsed.

    Attributes:
        sample: With ``json`` parsed, once it is planned.
        plans: Of its fields, as far as they are planned.
        tokens: Of its text, or why it has none. None: it is not tokenized yet.
        early_fields: Those whose pictures are decoded before the rest.
    """

    def __init__(self, sample: Sample, decode: Decode | None) -> None:
        self.sample = sample
        self.plans: dict[str, FieldPlan] = {}
        self.tokens: DecodedText | SampleError | None = None
        self.early_fields: list[PictureField] = []
        self._decode = decode or PLAIN
        self._results: dict[str, FieldResult | SampleError] = {}
        self._is_planned = False
        self._decoded: Sample | None = None
        self._is_finished = False

    # -- pass 1: headers -------------------------------------------------------------------------

    def plan(self, *, all_shapes: bool = False) -> None:
        """Parse ``json``, and plan videos, and recordings where a text counts them.

        Args:
            all_shapes: Plan all recordings and tracks.
        """
        if self._is_planned:
            return
        self.sample = parse_fields(self.sample, self._decode)
        sounds = all_shapes or AUDIO in self._decode.needed_shapes
        for field in self._decode.table.media:
            plan = field.plan(self.sample, sounds=sounds)
            if plan is not None:
                self.plans[field.name] = plan
        self._is_planned = True

    def plan_pictures(self) -> None:
        """Plan the pictures of `early_fields`. Why one is bad is told when its turn comes."""
        if isinstance(self.tokens, SampleError):
            return
        for field in self._decode.table.pictures:
            if not field.is_early:
                continue
            try:
                plan = field.plan(self.sample)
            except SampleError as error:
                self._results[field.name] = error
                continue
            if plan is not None:
                self.plans[field.name] = plan
                self.early_fields.append(field)

    def shapes(self, *, decodes: bool) -> MediaShapes | None:
        """Return the shapes of the media that its text counts. None: a header does not tell.

        Args:
            decodes: Decode pictures whose headers do not tell.
        """
        kinds = self._decode.needed_shapes
        images = self._image_shapes(decodes=decodes) if IMAGE in kinds else []
        return None if images is None else media_shapes(self.plans, images, kinds)

    def _image_shapes(self, *, decodes: bool) -> list[ImageShape] | None:
        pictures = self._decode.table.free_pictures
        if pictures is None:
            return []
        files = pictures.files(self.sample)
        size: Shape | None = pictures.decoder.output_shape
        if size is None or IMAGE in self._decode.needed_shapes:
            return pictures.shapes(self.sample, files, decodes=decodes)
        return [ImageShape(*size, size)] * len(files)

    def measured(self) -> MeasuredSample:
        """Return the tokens and the shapes of its media, without decoding a pixel.

        A picture whose header does not tell its shape is decoded. Such pictures are rare.
        """
        self.plan(all_shapes=True)
        _refuse_made_names(self.sample, self._decode)
        pictures = self._decode.table.free_pictures
        check_image_names(self.sample, () if pictures is None else pictures.files(self.sample))
        images = self._image_shapes(decodes=True)
        assert images is not None
        shapes = media_shapes(self.plans, images, (VIDEO, AUDIO))
        return MeasuredSample(None if self._decode.text is None else self._text(), shapes)

    def _text(self) -> DecodedText:
        """Return the tokens of its text."""
        decode = self._decode
        assert decode.text is not None
        if self.tokens is None:
            texts, shapes = [self.text_sample()], [self.shapes(decodes=True)]
            self.tokens = decode.text.decode_all(texts, shapes, media=decode.media)[0]
        if isinstance(self.tokens, SampleError):
            raise addressed(self.sample, decode.text.source(self.sample), self.tokens)
        return self.tokens

    def text_sample(self) -> Sample:
        """Return the sample without the media that do not belong to its text."""
        taken = self._decode.table.files_without_text
        if not taken:
            return self.sample
        return {
            name: value
            for name, value in self.sample.items()
            if name not in taken and list_of_frame(name) not in taken
        }

    # -- pass 2: pictures that are decoded before the rest ----------------------------------------

    def decode_picture(self, field: PictureField, out: RowMemory) -> None:
        """Decode a picture that `plan_pictures` has planned. Why it is bad is told in its turn."""
        try:
            result = field.decode(self.sample, self.plans[field.name], out[field.name])
        except SampleError as error:
            self._results[field.name] = error
        else:
            self._results[field.name] = result

    # -- pass 3: all else -------------------------------------------------------------------------

    def begin(self) -> None:
        """Decode the text and the values, and what functions of the user take."""
        if self._decoded is not None:
            return
        self.plan()
        decode, sample = self._decode, self.sample
        decoded = dict(sample)
        if decode.stored is None:
            _refuse_made_names(sample, decode)
            if decode.text is not None:
                decoded.update(_text_fields(sample, decode.text, self._text()))
            for field in decode.table.values:
                _put(decoded, field.decode(sample))
        self._decoded = decoded

    @property
    def has_media_left(self) -> bool:
        """Whether media are left to decode, and not only short Python."""
        if self._is_finished or self._decode.stored is not None:
            return False
        table = self._decode.table
        return bool(table.media) or len(self._results) < len(table.pictures)

    def finish(self, out: RowMemory = NO_MEMORY) -> Sample:
        """Decode the media that are left, and return all results; arguments as `decode_sample`.

        It calls classes of the user (`FieldTable.has_user_media`), and no other functions of
        theirs.
        """
        self.begin()
        assert self._decoded is not None
        if self._is_finished:
            return self._decoded
        if self._decode.stored is not None:
            self._decoded = self._decode.stored.decode(self.sample, out)
        else:
            self._decode_pictures(self._decoded, out)
            self._decode_media(self._decoded, out)
        self._is_finished = True
        return self._decoded

    def _decode_pictures(self, decoded: Sample, out: RowMemory) -> None:
        table, sample = self._decode.table, self.sample
        done: dict[str, FieldResult] = {}
        for field in table.pictures:
            result = self._results.get(field.name)
            if isinstance(result, SampleError):
                raise result
            if result is None:
                plan, memory = self.plans.get(field.name), out.get(field.name, ())
                geometry = None
                if field.leader and field.files(sample):
                    geometry = with_address(sample, field.name, geometry_of, field.leader, done)
                result = field.decode(sample, plan, memory, geometry)
            done[field.name] = result
            _put(decoded, result)
        for follower in table.coordinates:
            decoded |= follower.on_picture(sample, decoded, done)

    def _decode_media(self, decoded: Sample, out: RowMemory) -> None:
        table, sample = self._decode.table, self.sample
        if not table.media:
            return
        done = {
            field.name: field.decode(sample, self.plans.get(field.name), out.get(field.name, ()))
            for field in table.media
        }
        for result in done.values():
            _put(decoded, result)
        spans: dict[str, Sequence[Span]] = {name: result.spans for name, result in done.items()}
        asked = spans if table.times else None
        decoded |= joined_recordings(done, table.media, table.sounds, asked)
        for follower in table.times:
            decoded |= follower.in_span(sample, decoded, spans)


def decode_sample(
    sample: Sample,
    decode: Decode | None,
    out: RowMemory = NO_MEMORY,
    tokens: DecodedText | SampleError | None = None,
) -> Sample:
    """Decode one sample.

    Args:
        sample: A sample as read from a shard: its fields are bytes. It is not changed.
        decode: The decoders. None: only ``json`` is parsed.
        out: Where to write pictures and videos.
        tokens: The tokens of the sample's text. None: it is tokenized now.

    Returns:
        A new sample with ``json`` parsed.

        With ``decode.image``, ``image`` replaces the image fields. It is uint8 [3, H, W], a view of
        H, W, 3 memory (that of `out` where it was used). A sample without exactly one image has a
        list of such tensors, which may be empty.

        With tiles, ``image`` is the list of all tiles. ``image_tiles``, int64 [num_pictures], says
        how many tiles a picture has. ``image_size``, int64 [num_pictures, 2], is its own height and
        width.

        With ``decode.text``, there are ``input_ids``, ``attention_mask`` and ``labels``, int64 [T]
        arrays, and ``txt`` is a string. ``__text_loss__`` is a `TextLoss`, where the text was cut
        or has lost parts.

        With ``decode.video``, ``video`` replaces the video fields: uint8 [F, 3, H, W], a view of
        F, H, W, 3 memory, or a list of such where a sample has not exactly one. ``video_pts_s``,
        float64 [F], is the time of each frame in its file. ``video_fps`` is how many frames of a
        second of each video were taken. ``video_requested_fps`` is how many the decoder was asked
        for, and 0 where it was asked otherwise. With ``decode.audio`` or tracks, ``audio`` is [T]
        or [C, T], or a list of such. `collate` names the companions.

        With ``decode.fields``, each field of it has its result under its own name; see `Decode`.

    Raises:
        DecodeError: A field is damaged, is missing, or has a name that a decoder of `decode` makes:
            ``shard[index] key.field: reason``.
        SkipSample, SampleError: A function of the user has raised it.
        ConfigError: A random crop or flip is set and the sample has no lineage, or ``image_length``
            returned no number of tokens.
    """
    decoding = SampleDecoding(sample, decode)
    decoding.tokens = tokens
    return decoding.finish(out)


class WholeText(NamedTuple):
    """Counts the tokens of texts with those of their media, without decoding a pixel."""

    decode: Decode

    @property
    def decoder(self) -> TextDecoder:
        """The decoder of texts."""
        assert self.decode.text is not None
        return self.decode.text

    @property
    def counted_media(self) -> frozenset[str]:
        """The kinds of media that have tokens in the text."""
        return self.decoder.counted_media

    def tokens_of(self, sample: Sample) -> DecodedText | None:
        """Return the tokens of a sample's text; errors as of `SampleDecoding.measured`."""
        return SampleDecoding(sample, self.decode).measured().text


def tokenize(decodings: Sequence[SampleDecoding], decode: Decode) -> None:
    """Tokenize the texts of many planned samples in one call of the tokenizer.

    A text whose length depends on a picture with an odd header gets no tokens yet.
    """
    if decode.text is None:
        return
    ready, shapes = [], []
    for decoding in decodings:
        media = decoding.shapes(decodes=False)
        if media is not None:
            ready.append(decoding)
            shapes.append(media)
    texts = [decoding.text_sample() for decoding in ready]
    tokens = decode.text.decode_all(texts, shapes, media=decode.media)
    for decoding, of_text in zip(ready, tokens, strict=True):
        decoding.tokens = of_text


def parse_fields(sample: Sample, decode: Decode) -> Sample:
    """Return a sample with its fields of JSON parsed, or the same sample where there are none.

    Raises:
        DecodeError: The JSON is damaged or too long.
    """
    for name, field in decode.table.parsers.items():
        data = sample.get(name)
        if isinstance(data, bytes):
            field.seed(sample, "field")
            sample = {**sample, name: with_address(sample, name, field.decoder, data)}
    return sample


def _put(decoded: Sample, result: FieldResult) -> None:
    """Put the results of a field in the place of its files."""
    for file in result.files:
        for name in (file, *frame_names(decoded, file)):
            decoded.pop(name, None)
    decoded.update(result.fields)


def _refuse_made_names(sample: Sample, decode: Decode) -> None:
    """Raise a DecodeError if a sample has a field that a decoder would replace."""
    if decode.made_names.keys().isdisjoint(sample):
        return
    name = next(name for name in decode.made_names if name in sample)
    raise DecodeError(
        f"{address(sample, name)}: the decoder makes a field of this name; rename this file in the "
        "tar, or what a function of Pipeline(before=) adds"
    )


def _text_fields(sample: Sample, decoder: TextDecoder, text: DecodedText) -> dict[str, Any]:
    """Return the fields that the text decoder makes; see `decode_sample`."""
    name = decoder.source(sample)
    fields: dict[str, Any] = dict(text.tokens)
    if text.num_dropped_parts or text.num_tokens > decoder.max_length:
        fields[LOSS_FIELD] = _text_loss(address(sample, name), text, decoder.max_length)
    for field in ("txt",) if name == "txt" else ("txt", name):
        value = sample.get(field)
        if isinstance(value, bytes):
            fields[field] = with_address(sample, field, decode_text, value, decoder.max_bytes)
    return fields


def _text_loss(address: str, text: DecodedText, max_length: int) -> TextLoss:
    """Say what a text has lost."""
    is_cut = text.num_tokens > max_length
    losses = []
    if is_cut:
        losses.append(f"text of {text.num_tokens:,} tokens cut to max_length={max_length:,}")
    if text.num_dropped_parts:
        noun = "part" if text.num_dropped_parts == 1 else "parts"
        losses.append(
            f"{text.num_dropped_parts} {noun} of the conversation dropped, which nothing decodes "
            "or the chat template does not write"
        )
    return TextLoss(f"{address}: {', '.join(losses)}", is_cut, text.num_dropped_parts)
