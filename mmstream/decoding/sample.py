"""One sample: its bytes become tensors, or a DecodeError that names the field.

Place in the flow: between read and batch. `stage.py` first calls `decode_texts` for a whole step,
and then `decode_sample` for each row. Both parse ``json`` and run the decoders of a `Decode`:

    jpg, 0.jpg, 1.png      -> "image"                                  ImageDecoder
                              with tiles also "image_tiles", "image_size"
    json messages, or txt  -> "input_ids", "attention_mask", "labels"  TextDecoder

Fields without a decoder stay bytes, compressed ones too.

The number of an image's tokens may depend on the picture's shape. That shape is read from the
header. So all texts of a step are tokenized in one call, before any picture is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from mmstream.decoding.fields import MAX_TEXT_BYTES, decode_text, image_fields, parse_json
from mmstream.decoding.image.decoder import Decoded, ImageDecoder
from mmstream.decoding.image.encoded import EncodedImage, encode_or_decode
from mmstream.decoding.image.image_shape import ImageShape
from mmstream.decoding.sample_rng import sample_rng
from mmstream.decoding.text.decoder import DecodedText, TextDecoder
from mmstream.errors import ConfigError, DecodeError, TimeoutError, where
from mmstream.types import Sample

__all__ = ["Decode", "TextTokens", "decode_sample", "decode_texts"]

T = TypeVar("T")

IMAGE_FIELDS = ("image",)
TEXT_FIELDS = ("input_ids", "attention_mask", "labels")
"""Fields that a decoder makes. Its samples cannot hold files of these names. The tar's reader
refuses ``image_tiles`` and ``image_size`` from the start."""

TextTokens: TypeAlias = tuple[Sample, DecodedText | DecodeError | None]
"""A sample with ``json`` parsed, and the tokens of its text. None: not tokenized yet."""

LOSS_FIELD = "__text_loss__"
"""The field of a decoded sample in which its `TextLoss` travels to the lineage of the batch."""


class TextLoss(NamedTuple):
    """What a text has lost on its way to the model."""

    reason: str
    """``shard[index] key.field: `` and what was lost."""
    is_cut: bool
    """Whether `max_length` has cut its end."""
    num_dropped_parts: int
    """Parts of the conversation that nothing decodes, and that were dropped."""


@dataclass(frozen=True)
class Decode:
    """Which decoders a pipeline runs.

    Attributes:
        image: The decoder of all image fields of a sample. None: they stay bytes.
        text: The decoder of the messages or the text of a sample. None: they stay as they are.
        max_json_bytes: The most bytes of a ``json`` field, from 1 up. A longer one makes its sample
            bad.

    Raises:
        ConfigError: The text decoder's ``image_length`` is a function, and `image` is None. Or
            `max_json_bytes` is no number from 1 up.

    Examples:
        >>> decode = Decode(image=ImageDecoder(size=224))
    """

    image: ImageDecoder | None = None
    text: TextDecoder | None = None
    max_json_bytes: int = MAX_TEXT_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.max_json_bytes, int) or self.max_json_bytes < 1:
            raise ConfigError(f"max_json_bytes={self.max_json_bytes!r}: give a number from 1 up")
        if self.image is None and self.text is not None and self.text.needs_shapes:
            raise ConfigError("image_length is a function of the image: give Decode(image=) too")

    @property
    def media(self) -> frozenset[str]:
        """The kinds of media that these decoders decode."""
        return frozenset() if self.image is None else frozenset({"image"})


def decode_sample(
    sample: Sample,
    decode: Decode | None,
    image_out: torch.Tensor | None = None,
    tokens: DecodedText | DecodeError | None = None,
) -> Sample:
    """Decode one sample.

    Args:
        sample: A sample as read from a shard: its fields are bytes. It is not changed.
        decode: The decoders. None: only ``json`` is parsed.
        image_out: Where to write the picture of a sample that has exactly one: the batch's row,
            uint8 [H, W, 3], C-contiguous. Only with a decoder of fixed size.
        tokens: The tokens of the sample's text, from `decode_texts`. None: it is tokenized now.

    Returns:
        A new sample with ``json`` parsed.

        With ``decode.image``, ``image`` replaces the image fields. It is uint8 [3, H, W], a view of
        H, W, 3 memory (``image_out`` where that was used). A sample without exactly one image has a
        list of such tensors, which may be empty. An `EncodedImage` takes the place of a tensor
        where the GPU will decode the picture.

        With tiles, ``image`` is the list of all tiles. ``image_tiles``, int64 [num_pictures], says
        how many tiles a picture has. ``image_size``, int64 [num_pictures, 2], is its own height and
        width.

        With ``decode.text``, there are ``input_ids``, ``attention_mask`` and ``labels``, int64 [T]
        arrays, and ``txt`` is a string. ``__text_loss__`` is a `TextLoss`, where the text was cut
        or has lost parts.

    Raises:
        DecodeError: A field is damaged, or has a name that a decoder of `decode` makes:
            ``shard[index] key.field: reason``.
        ConfigError: A random crop or flip is set and the sample has no lineage, or ``image_length``
            returned no number of tokens.
    """
    decoded = dict(sample)
    if isinstance(sample.get("json"), bytes):
        parse = partial(parse_json, sample["json"], _max_json_bytes(decode))
        decoded["json"] = _with_address(sample, "json", parse)
    if decode is None:
        return decoded
    _require_absent(sample, TEXT_FIELDS if decode.text is not None else ())
    _require_absent(sample, IMAGE_FIELDS if decode.image is not None else ())
    if decode.text is not None:
        name = decode.text.source(decoded)
        if tokens is None:
            shapes = _image_shapes(sample, decode)
            tokens = decode.text.decode_all([decoded], [shapes], media=decode.media)[0]
        text = _with_address(sample, name, partial(_text_or_raise, tokens))
        decoded.update(text.tokens)
        if text.num_dropped_parts or text.num_tokens > decode.text.max_length:
            decoded[LOSS_FIELD] = _text_loss(_address(sample, name), text, decode.text.max_length)
        if "txt" in sample:
            read_text = partial(decode_text, sample["txt"], decode.text.max_bytes)
            decoded["txt"] = _with_address(sample, "txt", read_text)
    if decode.image is not None:
        decoded.update(_decode_images(sample, decode.image, image_out))
        for name in image_fields(sample):
            del decoded[name]
    return decoded


def decode_texts(samples: Sequence[Sample], decode: Decode | None) -> list[TextTokens]:
    """Parse ``json`` and tokenize the texts of many samples in one call of the tokenizer.

    Args:
        samples: Samples as read from shards. They are not changed.
        decode: The decoders. None: only ``json`` is parsed.

    Returns:
        One entry per sample: the sample and the tokens that `decode_sample` takes. With these it
        gives the same result, or the same error, as without. A sample with damaged ``json`` is
        returned unchanged. A text whose length depends on a picture with an odd header has no
        tokens yet.
    """
    max_json_bytes = _max_json_bytes(decode)
    parsed = [_try_parse(sample, max_json_bytes) for sample in samples]
    if decode is None or decode.text is None:
        return [(sample, None) for sample in parsed]
    shapes = [_prepared_shapes(sample, decode) for sample in parsed]
    is_ready = [
        image_shapes is not None and not isinstance(sample.get("json"), bytes)
        for sample, image_shapes in zip(parsed, shapes, strict=True)
    ]
    ready_samples = list(compress(parsed, is_ready))
    ready_shapes = list(compress(shapes, is_ready))
    tokens = iter(decode.text.decode_all(ready_samples, ready_shapes, media=decode.media))
    return [
        (sample, next(tokens) if ready else None)
        for sample, ready in zip(parsed, is_ready, strict=True)
    ]


def _prepared_shapes(sample: Sample, decode: Decode) -> list[ImageShape] | None:
    """Read the shapes of the sample's images from their headers, where its text needs them.

    Returns:
        One shape per image, or an empty list where the text needs none. None where a header does
        not tell.
    """
    if decode.image is None or decode.text is None or not decode.text.needs_shapes:
        return []
    shapes = [decode.image.prepared_shape(sample[name]) for name in image_fields(sample)]
    return None if None in shapes else [shape for shape in shapes if shape is not None]


def _image_shapes(sample: Sample, decode: Decode) -> list[ImageShape]:
    """Return the shapes as `_prepared_shapes`. Where headers do not tell, decode the pictures.

    Such pictures are decoded a second time later. They are rare.

    Raises:
        DecodeError: A picture cannot be decoded.
    """
    shapes = _prepared_shapes(sample, decode)
    decoder = decode.image
    if shapes is not None or decoder is None:
        return shapes or []
    rng = _image_rng(sample, decoder)
    limits = decoder.start_limits()
    return [
        decoder.shape_of(
            _with_address(
                sample, name, partial(decoder.decode, sample[name], rng=rng, limits=limits)
            ).picture
        )
        for name in image_fields(sample)
    ]


def _require_absent(sample: Sample, names: Sequence[str]) -> None:
    """Raise a DecodeError if a sample has a field that a decoder would replace."""
    for name in names:
        if name in sample:
            raise DecodeError(
                f"{_address(sample, name)}: the decoder makes a field of this name; rename this "
                "file in the tar"
            )


def _max_json_bytes(decode: Decode | None) -> int:
    return MAX_TEXT_BYTES if decode is None else decode.max_json_bytes


def _try_parse(sample: Sample, max_bytes: int) -> Sample:
    """Return a sample with ``json`` parsed, or the same sample where that is damaged."""
    data = sample.get("json")
    if not isinstance(data, bytes):
        return sample
    try:
        return {**sample, "json": parse_json(data, max_bytes)}
    except DecodeError:
        return sample


def _text_or_raise(text: DecodedText | DecodeError) -> DecodedText:
    if isinstance(text, DecodeError):
        raise text
    return text


def _text_loss(address: str, text: DecodedText, max_length: int) -> TextLoss:
    """Say what a text has lost."""
    is_cut = text.num_tokens > max_length
    losses = []
    if is_cut:
        losses.append(f"text of {text.num_tokens:,} tokens cut to max_length={max_length:,}")
    if text.num_dropped_parts:
        parts = "part" if text.num_dropped_parts == 1 else "parts"
        losses.append(f"{text.num_dropped_parts} {parts} that nothing decodes dropped")
    return TextLoss(f"{address}: {', '.join(losses)}", is_cut, text.num_dropped_parts)


def _decode_images(
    sample: Sample, decoder: ImageDecoder, out: torch.Tensor | None
) -> dict[str, Any]:
    """Return the fields that replace a sample's image fields; see `decode_sample`.

    The limits of memory and time hold for all images of the sample together.
    """
    names = image_fields(sample)
    rng = _image_rng(sample, decoder)
    if out is not None and len(names) == 1:
        _with_address(sample, names[0], partial(decoder, sample[names[0]], out.numpy(), rng))
        return {"image": out.permute(2, 0, 1)}  # in the batch's memory: collate need not copy
    limits = decoder.start_limits()
    if len(names) > 1 and decoder.output_shape is not None:
        check = partial(limits.check_results, len(names), *decoder.output_shape)
        _with_address(sample, "", check)
    if decoder.device != "cpu":
        images: list[EncodedImage | torch.Tensor] = []
        for name in names:
            image = _with_address(
                sample, name, partial(encode_or_decode, sample[name], name, decoder, rng, limits)
            )
            height, width = (
                image.plan.view.shape if isinstance(image, EncodedImage) else image.shape[-2:]
            )
            limits = limits.holding(height * width * 3)
            images.append(image)
        return {"image": images[0] if len(images) == 1 else images}
    results: list[Decoded] = []
    for name in names:
        decode = partial(decoder.decode, sample[name], rng=rng, limits=limits)
        result = _with_address(sample, name, decode)
        limits = limits.holding(result.pixels.nbytes)
        results.append(result)
    if decoder.tiles is None:
        tensors = [torch.from_numpy(result.pixels).permute(2, 0, 1) for result in results]
        return {"image": tensors[0] if len(tensors) == 1 else tensors}
    return {
        "image": [
            tile
            for result in results
            for tile in torch.from_numpy(result.pixels).permute(0, 3, 1, 2)
        ],
        "image_tiles": np.array([len(result.pixels) for result in results], dtype=np.int64),
        "image_size": np.array([result.picture for result in results], np.int64).reshape(-1, 2),
    }


def _image_rng(sample: Sample, decoder: ImageDecoder) -> np.random.Generator | None:
    """Return the generator of a sample's pictures. Its transforms have other streams."""
    if not decoder.is_random:
        return None
    if "__lineage__" not in sample:
        raise ConfigError("a random crop or flip needs the lineage that samples of a Pipeline have")
    return sample_rng(sample, "image")


def _with_address(sample: Sample, name: str, decode: Callable[[], T]) -> T:
    """Run one decoder. If it fails, put the field's address before the reason."""
    try:
        return decode()
    except DecodeError as error:
        kind = TimeoutError if isinstance(error, TimeoutError) else DecodeError
        raise kind(f"{_address(sample, name)}: {error}") from None


def _address(sample: Sample, name: str) -> str:
    """Return the address of a field, as far as it is known."""
    key = str(sample.get("__key__", ""))
    lineage = sample.get("__lineage__")
    if lineage is None:
        return ".".join(word for word in (key, name) if word)
    shard = str(sample.get("__url__", "")).rpartition("/")[2]
    if "__source__" in sample:
        shard = f"{sample['__source__']}/{shard}"
    return where(shard, lineage.index, key, name)
