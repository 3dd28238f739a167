"""One sample: its bytes become tensors, or a DecodeError that names the field.

Place in the flow: between read and batch. `stage.py` first calls `decode_texts` for a whole step,
and then `decode_sample` for each row. Both parse ``json`` and run the decoders of a `Decode`:

    jpg, 0.jpg, 1.png      -> "image"                                  image=ImageDecoder
                              with tiles also "image_tiles", "image_size"
    mp4, 0.webm, 0.wav     -> "video", "audio" and more, see `media`   video=, audio=
    json messages, or txt  -> "input_ids", "attention_mask", "labels"  text=TextDecoder
    mask.png, cls, npy     -> a field of the same name                 {"mask.png": ..., "cls": int}

Fields without a decoder stay bytes, compressed ones too.

The number of an image's tokens may depend on the picture's shape. That shape is read from the
header, and so are the frames of a video. So all texts of a step are tokenized in one call, before
any picture is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mmstream.decoding.address import address, addressed, with_address
from mmstream.decoding.by_field import IMAGE, EarlyPictures, early_picture, picture_rng
from mmstream.decoding.decode import Decode
from mmstream.decoding.fields import (
    decode_text,
    image_fields,
    own_names,
    parse_json,
)
from mmstream.decoding.image.decoder import Decoded, ImageDecoder
from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media import (
    MediaPlans,
    audio_decoders,
    decode_media,
    media_shapes,
    plan_media,
    video_decoders,
)
from mmstream.decoding.media_shapes import MediaShapes
from mmstream.decoding.sample_rng import seed_generators
from mmstream.decoding.text.decoder import DecodedText, TextDecoder
from mmstream.decoding.text.placeholders import LOSS_FIELD, TextLoss
from mmstream.errors import DecodeError, SampleError, escaped
from mmstream.types import Sample

IMAGE_FIELDS = ("image", "image_tiles", "image_size")
TEXT_FIELDS = ("input_ids", "attention_mask", "labels", "label_weights")
"""Fields that a decoder makes. Its samples cannot hold files of these names."""

TextTokens: TypeAlias = tuple[Sample, DecodedText | SampleError | None]
"""A sample with ``json`` parsed, and the tokens of its text. None: not tokenized yet."""

_JSON = {"json": parse_json}
"""What is parsed without a `Decode`."""


class RowMemory(NamedTuple):
    """Where decoders write a sample: into the memory of its batch."""

    pictures: Mapping[str, torch.Tensor]
    """By field: uint8 [H, W, 3], of a mask [H, W], C-contiguous. Only for decoders of fixed size
    (`Decode.shapes`). ``image`` is used for a sample that has exactly one such picture. Of a baked
    field: uint8 [num_bytes]."""
    videos: dict[str, torch.Tensor]
    """By file: uint8 [F, H, W, 3]. Used where the video has this shape."""


_NO_MEMORY = RowMemory({}, {})


NO_PICTURES: Mapping[str, Any] = {}


_NO_SHAPES = MediaShapes()


class MeasuredSample(NamedTuple):
    """What is known of a sample before a pixel of it is decoded."""

    text: DecodedText | None
    """The tokens of its text. None: nothing decodes texts."""
    shapes: MediaShapes
    """The shapes of the pictures, videos and recordings that belong to its text."""


class BegunSample(NamedTuple):
    """A sample of which all but the media is decoded."""

    sample: Sample
    """With ``json`` parsed."""
    decoded: Sample
    """Its results so far."""
    plans: MediaPlans


def decode_sample(
    sample: Sample,
    decode: Decode | None,
    out: RowMemory = _NO_MEMORY,
    tokens: DecodedText | SampleError | None = None,
    plans: MediaPlans | None = None,
    early: EarlyPictures = NO_PICTURES,
) -> Sample:
    """Decode one sample.

    Args:
        sample: A sample as read from a shard: its fields are bytes. It is not changed.
        decode: The decoders. None: only ``json`` is parsed.
        out: Where to write pictures and videos.
        tokens: The tokens of the sample's text, from `decode_texts`. None: it is tokenized now.
        plans: What `plan_media` has planned for this very sample. None: it is planned now.
        early: What became of pictures that were decoded into `out` already.

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
    return finish_sample(begin_sample(sample, decode, tokens, plans), decode, out, early)


def begin_sample(
    sample: Sample,
    decode: Decode | None,
    tokens: DecodedText | SampleError | None = None,
    plans: MediaPlans | None = None,
) -> BegunSample:
    """Decode the text and the values of a sample, and what functions of the user take.

    Arguments and errors are those of `decode_sample`.
    """
    if decode is not None and decode.stored is not None:
        return BegunSample(sample, {}, {})
    sample = parse_fields(sample, decode)
    decoded = dict(sample)
    if decode is None:
        return BegunSample(sample, decoded, {})
    _require_own_names(sample, decode)
    if decode.has_media and plans is None:
        plans = plan_media(sample, decode, audio=needs_shapes(decode, "audio"))
    if decode.text is not None:
        decoded.update(_decode_text(sample, decode, tokens, plans))
    if decode.plan.values:
        decode.plan.decode_values(sample, decoded)
    return BegunSample(sample, decoded, plans or {})


def finish_sample(
    begun: BegunSample,
    decode: Decode | None,
    out: RowMemory = _NO_MEMORY,
    early: EarlyPictures = NO_PICTURES,
) -> Sample:
    """Decode the media of a sample. Arguments, results and errors are those of `decode_sample`.

    It calls classes of the user (`Decode.has_user_media`), and no other functions of theirs.
    """
    sample, decoded, plans = begun
    if decode is None:
        return decoded
    if decode.stored is not None:
        return decode.stored.decode(sample, out.pictures)
    _decode_pictures(sample, decoded, decode, out.pictures, early)
    if decode.has_media:
        decode_media(sample, decoded, decode, plans, out.videos)
    return decoded


def measure_sample(
    sample: Sample,
    decode: Decode,
    tokens: DecodedText | SampleError | None = None,
    plans: MediaPlans | None = None,
) -> MeasuredSample:
    """Return the tokens of a sample, and the shapes of its media, without decoding a pixel.

    A picture whose header does not tell its shape is decoded. Such pictures are rare.

    Args:
        sample: As `decode_sample` takes it, with a lineage.
        decode: The decoders.
        tokens: The tokens of the sample's text, from `decode_texts`. None: it is tokenized now.
        plans: What `plan_media` has planned for this very sample. None: it is planned now.

    Raises:
        SampleError, ConfigError: As `decode_sample`, where it fails before it decodes a medium.
    """
    sample = parse_fields(sample, decode)
    _require_own_names(sample, decode)
    if decode.has_media and (plans is None or not needs_shapes(decode, "audio")):
        plans = plan_media(sample, decode)
    images: list[ImageShape] = []
    if decode.image is not None:
        names = free_images(sample, decode)
        _check_own_names(sample, names)
        shape = decode.image.output_shape
        if shape is not None:
            images = [ImageShape(*shape, shape)] * len(names)
        elif names:
            images = _shapes_of(sample, decode, decode.image, names)
    shapes = MediaShapes(images)
    if decode.has_media:
        shapes = media_shapes(sample, decode, plans or {}, images, audio=True)
    text = None if decode.text is None else _tokens_of(sample, decode, tokens, plans)
    return MeasuredSample(text, shapes)


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
        """Return the tokens of a sample's text; errors as of `measure_sample`."""
        return measure_sample(sample, self.decode).text


def _require_own_names(sample: Sample, decode: Decode) -> None:
    """Raise a DecodeError if a sample has a field that a decoder would replace."""
    names = [
        *(TEXT_FIELDS if decode.text is not None else ()),
        *(IMAGE_FIELDS if decode.image is not None else ()),
        *(_media_names(decode) if decode.has_media else ()),
    ]
    for name in names:
        if name in sample:
            raise DecodeError(
                f"{address(sample, name)}: the decoder makes a field of this name; rename this "
                "file in the tar, or what a function of Pipeline(before=) adds"
            )


def _decode_pictures(
    sample: Sample,
    decoded: Sample,
    decode: Decode,
    out: Mapping[str, torch.Tensor],
    early: EarlyPictures,
) -> None:
    """Decode all pictures, boxes and points of a sample into `decoded`."""
    single: Decoded | None = None
    if decode.image is not None:
        names = free_images(sample, decode)
        _check_own_names(sample, names)
        single = early_picture(early, IMAGE)
        if decode.has_user_media:
            seed_generators(sample, f"decode {IMAGE}")
        if single is None:
            images, single = _decode_images(sample, names, decode.image, out.get(IMAGE))
        else:
            images = {IMAGE: out[IMAGE].permute(2, 0, 1)}
        for name in names:
            del decoded[name]
        decoded.update(images)
    if decode.plan.pictures or decode.plan.coordinates:
        decode.plan.decode_pictures(sample, decoded, out, single, early)


def parse_fields(sample: Sample, decode: Decode | None) -> Sample:
    """Return a sample with its fields of JSON parsed, or the same sample where there are none.

    Raises:
        DecodeError: The JSON is damaged or too long.
    """
    for name, parse in (_JSON if decode is None else decode.plan.parsers).items():
        data = sample.get(name)
        if isinstance(data, bytes):
            if decode is not None and name in decode.plan.user_fields:
                seed_generators(sample, f"field {name}")
            sample = {**sample, name: with_address(sample, name, partial(parse, data))}
    return sample


def decode_texts(
    samples: Sequence[Sample],
    decode: Decode | None,
    plans: Sequence[MediaPlans] | None = None,
) -> list[TextTokens]:
    """Parse ``json`` and tokenize the texts of many samples in one call of the tokenizer.

    Args:
        samples: Samples as read from shards. They are not changed.
        decode: The decoders. None: only ``json`` is parsed.
        plans: What `plan_media` has planned for each sample. Needed where videos or recordings are
            decoded.

    Returns:
        One entry per sample: the sample and the tokens that `decode_sample` takes. With these it
        gives the same result, or the same error, as without. A sample with damaged ``json`` is
        returned unchanged. A text whose length depends on a picture with an odd header has no
        tokens yet.
    """
    parsed = [_try_parse(sample, decode) for sample in samples]
    if decode is None or decode.text is None:
        return [(sample, None) for sample in parsed]
    shapes = [
        _prepared_shapes(sample, decode, media_plans)
        for sample, media_plans in zip(parsed, plans or [{}] * len(parsed), strict=True)
    ]
    is_ready = [
        media is not None and not isinstance(sample.get("json"), bytes)
        for sample, media in zip(parsed, shapes, strict=True)
    ]
    ready_samples = list(compress(parsed, is_ready))
    ready_shapes = list(compress(shapes, is_ready))
    texts = [_text_sample(sample, decode) for sample in ready_samples]
    tokens = iter(decode.text.decode_all(texts, ready_shapes, media=decode.media))
    return [
        (sample, next(tokens) if ready else None)
        for sample, ready in zip(parsed, is_ready, strict=True)
    ]


def _prepared_shapes(sample: Sample, decode: Decode, plans: MediaPlans) -> MediaShapes | None:
    """Return the shapes of the sample's media, where its text needs them.

    Returns:
        The shapes of images from their headers, and those of other media from their plans. None
        where a header does not tell.
    """
    if not decode.needed_shapes:
        return _NO_SHAPES
    images = _image_shapes_of_headers(sample, decode)
    return None if images is None else _with_media(sample, decode, images, plans)


def _image_shapes_of_headers(sample: Sample, decode: Decode) -> list[ImageShape] | None:
    """Return the shapes of the sample's images where its text needs them, else an empty list.

    None: a header does not tell.
    """
    if decode.image is None or not needs_shapes(decode, "image"):
        return []
    return _shapes_of_headers(sample, decode, decode.image, free_images(sample, decode))


def _image_shapes(sample: Sample, decode: Decode) -> list[ImageShape]:
    """Return the shapes of the sample's images. Where headers do not tell, decode the pictures.

    Such pictures are decoded a second time later. They are rare.

    Raises:
        DecodeError: A picture cannot be decoded.
    """
    if decode.image is None or not needs_shapes(decode, "image"):
        return []
    return _shapes_of(sample, decode, decode.image, free_images(sample, decode))


def _shapes_of_headers(
    sample: Sample, decode: Decode, decoder: ImageDecoder, names: Sequence[str]
) -> list[ImageShape] | None:
    """Return the shapes of all images of a sample. None: a header does not tell."""
    if decode.has_user_media:
        seed_generators(sample, f"plan {IMAGE}")
    decoder = decoder.of_sample(len(names))
    shapes = [decoder.prepared_shape(sample[name]) for name in names]
    return None if None in shapes else [shape for shape in shapes if shape is not None]


def _shapes_of(
    sample: Sample, decode: Decode, decoder: ImageDecoder, names: Sequence[str]
) -> list[ImageShape]:
    """Return the shapes of all images of a sample; as `_image_shapes`."""
    shapes = _shapes_of_headers(sample, decode, decoder, names)
    if shapes is not None:
        return shapes
    decoder = decoder.of_sample(len(names))
    rng = picture_rng(sample, IMAGE) if decoder.is_random else None
    limits = decoder.start_limits()
    return [
        decoder.shape_of(
            with_address(
                sample, name, partial(decoder.decode, sample[name], rng=rng, limits=limits)
            ).picture
        )
        for name in names
    ]


def _with_media(
    sample: Sample, decode: Decode, images: Sequence[ImageShape], plans: MediaPlans
) -> MediaShapes:
    """Add the shapes of the sample's videos and recordings, where its text needs them."""
    needs_audio = needs_shapes(decode, "audio")
    if not needs_audio and not needs_shapes(decode, "video"):
        return MediaShapes(images)
    return media_shapes(sample, decode, plans, images, audio=needs_audio)


def needs_shapes(decode: Decode, kind: str) -> bool:
    """Tell whether the tokens of a text depend on the shapes of its media of a kind."""
    return kind in decode.needed_shapes


def free_images(sample: Sample, decode: Decode) -> list[str]:
    """Return the image fields that no decoder by field takes, in order."""
    taken = decode.plan.picture_sources
    names = image_fields(sample)
    return [name for name in names if name not in taken] if taken else names


def _text_sample(sample: Sample, decode: Decode) -> Sample:
    """Return a sample without the media that do not belong to its text."""
    taken = decode.plan.picture_sources | decode.plan.media_sources
    return {name: sample[name] for name in sample if name not in taken} if taken else sample


def _check_own_names(sample: Sample, names: Sequence[str]) -> None:
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


def _try_parse(sample: Sample, decode: Decode | None) -> Sample:
    """Return a sample with its JSON parsed, or the same sample where that is damaged."""
    try:
        return parse_fields(sample, decode)
    except SampleError:
        return sample


def _media_names(decode: Decode) -> list[str]:
    """Return the fields that decoders of videos and recordings make, also in a batch."""
    names = [
        f"{field}{ending}"
        for field in video_decoders(decode)
        for ending in ("", "_row", "_frames", "_pts_s", "_fps", "_requested_fps")
    ]
    names += [
        f"{field}{ending}"
        for field, decoder in audio_decoders(decode).items()
        for features in (("",) if decoder.features is None else ("", "_features"))
        for ending in (features, "_row", f"{features}_length", "_video")
    ]
    by_field = {*decode.plan.videos, *decode.plan.recordings}
    return [name for name in dict.fromkeys(names) if name not in by_field]


def _decode_text(
    sample: Sample,
    decode: Decode,
    tokens: DecodedText | SampleError | None,
    plans: MediaPlans | None,
) -> dict[str, Any]:
    """Return the fields that the text decoder makes; see `decode_sample`."""
    decoder = decode.text
    assert decoder is not None
    name = decoder.source(sample)
    text = _tokens_of(sample, decode, tokens, plans)
    decoded: dict[str, Any] = dict(text.tokens)
    if text.num_dropped_parts or text.num_tokens > decoder.max_length:
        decoded[LOSS_FIELD] = _text_loss(address(sample, name), text, decoder.max_length)
    for field in ("txt",) if name == "txt" else ("txt", name):
        value = sample.get(field)
        if isinstance(value, bytes):
            read_text = partial(decode_text, value, decoder.max_bytes)
            decoded[field] = with_address(sample, field, read_text)
    return decoded


def _tokens_of(
    sample: Sample,
    decode: Decode,
    tokens: DecodedText | SampleError | None,
    plans: MediaPlans | None,
) -> DecodedText:
    """Return the tokens of a sample's text; arguments and errors as those of `decode_sample`."""
    decoder = decode.text
    assert decoder is not None
    if tokens is None:
        shapes = _with_media(sample, decode, _image_shapes(sample, decode), plans or {})
        texts = [_text_sample(sample, decode)]
        tokens = decoder.decode_all(texts, [shapes], media=decode.media)[0]
    if isinstance(tokens, SampleError):
        raise addressed(sample, decoder.source(sample), tokens)
    return tokens


def _text_loss(address: str, text: DecodedText, max_length: int) -> TextLoss:
    """Say what a text has lost."""
    is_cut = text.num_tokens > max_length
    losses = []
    if is_cut:
        losses.append(f"text of {text.num_tokens:,} tokens cut to max_length={max_length:,}")
    if text.num_dropped_parts:
        parts = "part" if text.num_dropped_parts == 1 else "parts"
        losses.append(
            f"{text.num_dropped_parts} {parts} of the conversation dropped, which nothing decodes "
            "or the chat template does not write"
        )
    return TextLoss(f"{address}: {', '.join(losses)}", is_cut, text.num_dropped_parts)


def _decode_images(
    sample: Sample, names: Sequence[str], decoder: ImageDecoder, out: torch.Tensor | None
) -> tuple[dict[str, Any], Decoded | None]:
    """Return the fields that replace a sample's image fields; see `decode_sample`.

    The limits of memory and time hold for all images of the sample together.

    Args:
        sample: The sample.
        names: Its image fields.
        decoder: Their decoder.
        out: The row of the batch, for one image.

    Returns:
        The fields, and the result of one image.
    """
    decoder = decoder.of_sample(len(names))
    rng = picture_rng(sample, IMAGE) if decoder.is_random else None
    if out is not None and len(names) == 1:
        decode = partial(decoder.decode, sample[names[0]], out.numpy(), rng)
        single = with_address(sample, names[0], decode)
        # In the batch's memory: collate need not copy.
        return {IMAGE: out.permute(2, 0, 1)}, single
    limits = decoder.start_limits()
    if len(names) > 1 and decoder.output_shape is not None:
        check = partial(limits.check_results, len(names), *decoder.output_shape)
        with_address(sample, "", check)
    results: list[Decoded] = []
    for name in names:
        decode = partial(decoder.decode, sample[name], rng=rng, limits=limits)
        result = with_address(sample, name, decode)
        limits = limits.holding(result.pixels.nbytes)
        results.append(result)
    if decoder.tiles is None:
        tensors = [torch.from_numpy(result.pixels).permute(2, 0, 1) for result in results]
        if len(tensors) == 1:
            return {IMAGE: tensors[0]}, results[0]
        return {IMAGE: tensors}, None
    return {
        IMAGE: [
            tile
            for result in results
            for tile in torch.from_numpy(result.pixels).permute(0, 3, 1, 2)
        ],
        "image_tiles": np.array([len(result.pixels) for result in results], dtype=np.int64),
        "image_size": np.array([result.picture for result in results], np.int64).reshape(-1, 2),
    }, None
