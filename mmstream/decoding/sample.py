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
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch

from mmstream.decoding.fields import image_fields
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.image.encoded import encode_or_decode
from mmstream.decoding.image.image_shape import ImageShape
from mmstream.decoding.sample_rng import sample_rng
from mmstream.decoding.text.decoder import TextDecoder, Tokens, decode_text
from mmstream.errors import ConfigError, DecodeError, where
from mmstream.types import Sample

__all__ = ["Decode", "TextTokens", "decode_sample", "decode_texts"]

T = TypeVar("T")

TextTokens: TypeAlias = tuple[Sample, Tokens | DecodeError | None]
"""A sample with ``json`` parsed, and the tokens of its text. None: not tokenized yet."""


@dataclass(frozen=True)
class Decode:
    """Which decoders a pipeline runs.

    Attributes:
        image: The decoder of all image fields of a sample. None: they stay bytes.
        text: The decoder of the messages or the text of a sample. None: they stay as they are.

    Raises:
        ConfigError: The text decoder's ``image_length`` is a function, and `image` is None.

    Examples:
        >>> decode = Decode(image=ImageDecoder(size=224))
    """

    image: ImageDecoder | None = None
    text: TextDecoder | None = None

    def __post_init__(self) -> None:
        if self.image is None and self.text is not None and self.text.needs_shapes:
            raise ConfigError("image_length is a function of the image: give Decode(image=) too")


def decode_sample(
    sample: Sample,
    decode: Decode | None,
    image_out: torch.Tensor | None = None,
    tokens: Tokens | DecodeError | None = None,
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
        arrays, and ``txt`` is a string.

    Raises:
        DecodeError: A field is damaged: ``shard[index] key.field: reason``.
        ConfigError: A random crop or flip is set and the sample has no lineage, or ``image_length``
            returned no number of tokens.
    """
    decoded = dict(sample)
    if isinstance(sample.get("json"), bytes):
        decoded["json"] = _with_address(sample, "json", partial(_parse_json, sample["json"]))
    if decode is None:
        return decoded
    if decode.text is not None:
        name = decode.text.source(decoded)
        tokenize = (
            partial(decode.text, decoded, _image_shapes(sample, decode))
            if tokens is None
            else partial(_tokens_or_raise, tokens)
        )
        decoded.update(_with_address(sample, name, tokenize))
        if "txt" in sample:
            decoded["txt"] = _with_address(sample, "txt", partial(decode_text, sample["txt"]))
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
    parsed = [_try_parse(sample) for sample in samples]
    if decode is None or decode.text is None:
        return [(sample, None) for sample in parsed]
    shapes = [_prepared_shapes(sample, decode) for sample in parsed]
    is_ready = [
        image_shapes is not None and not isinstance(sample.get("json"), bytes)
        for sample, image_shapes in zip(parsed, shapes, strict=True)
    ]
    ready_samples = list(compress(parsed, is_ready))
    ready_shapes = list(compress(shapes, is_ready))
    tokens = iter(decode.text.decode_all(ready_samples, ready_shapes))
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
    return [
        decoder.shape_of(
            _with_address(sample, name, partial(decoder.decode, sample[name], rng=rng)).picture
        )
        for name in image_fields(sample)
    ]


def _try_parse(sample: Sample) -> Sample:
    """Return a sample with ``json`` parsed, or the same sample where that is damaged."""
    data = sample.get("json")
    if not isinstance(data, bytes):
        return sample
    try:
        return {**sample, "json": _parse_json(data)}
    except DecodeError:
        return sample


def _tokens_or_raise(tokens: Tokens | DecodeError) -> Tokens:
    if isinstance(tokens, DecodeError):
        raise tokens
    return tokens


def _decode_images(
    sample: Sample, decoder: ImageDecoder, out: torch.Tensor | None
) -> dict[str, Any]:
    """Return the fields that replace a sample's image fields; see `decode_sample`."""
    names = image_fields(sample)
    rng = _image_rng(sample, decoder)
    if out is not None and len(names) == 1:
        _with_address(sample, names[0], partial(decoder, sample[names[0]], out.numpy(), rng))
        return {"image": out.permute(2, 0, 1)}  # in the batch's memory: collate need not copy
    if decoder.device != "cpu":
        images = [
            _with_address(sample, name, partial(encode_or_decode, sample[name], name, decoder, rng))
            for name in names
        ]
        return {"image": images[0] if len(images) == 1 else images}
    results = [
        _with_address(sample, name, partial(decoder.decode, sample[name], rng=rng))
        for name in names
    ]
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


def _parse_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError
        raise DecodeError(f"JSON: {error}") from None


def _with_address(sample: Sample, name: str, decode: Callable[[], T]) -> T:
    """Run one decoder. If it fails, put the field's address before the reason."""
    try:
        return decode()
    except DecodeError as error:
        key = str(sample.get("__key__", ""))
        lineage = sample.get("__lineage__")
        if lineage is None:
            address = ".".join(word for word in (key, name) if word)
        else:
            shard = str(sample.get("__url__", "")).rpartition("/")[2]
            if "__source__" in sample:
                shard = f"{sample['__source__']}/{shard}"
            address = where(shard, lineage.index, key, name)
        raise DecodeError(f"{address}: {error}") from None
