"""The decode stage: bytes of a sample become tensors, or a DecodeError with the address.

Between read and batch. `decode_sample` parses ``json``, and runs the decoders that a `Decode`
names:

    jpg, 0.jpg, 1.png ...  -> "image"                                  ImageDecoder (image)
                              with tiles also "image_tiles", "image_size"
    json messages, or txt  -> "input_ids", "attention_mask", "labels"  TextDecoder (text, chat)

Fields without a decoder stay bytes, compressed ones too. Where the text shows images by as many
tokens as their pictures' shapes demand, those are read from the headers: the texts of a step become
tokens in one call, before any picture is decoded.
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
"""A sample with ``json`` parsed, and its text as tokens."""


@dataclass(frozen=True)
class Decode:
    """Which decoders a pipeline runs.

    Attributes:
        image: For all image fields of a sample; None leaves them bytes.
        text: For the messages or the text of a sample; None leaves them as they are.
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
        sample: As read from a shard: fields are bytes. It is not changed.
        decode: The decoders; None only parses ``json``.
        image_out: uint8 [H, W, 3], C-contiguous: the batch's row for the picture of a sample that
            has exactly one. Only with a decoder of fixed size.
        tokens: What the sample's text has become already; see `decode_texts`.

    Returns:
        A new sample. ``json`` is parsed. With ``decode.image`` the image fields are replaced by
        ``image``: uint8 [3, H, W], a view of H, W, 3 memory (of ``image_out`` where it was used),
        or a list of such tensors, possibly empty, unless there is exactly one. A decoder with tiles
        makes several of each picture: ``image_tiles``, int64 [num_pictures], says how many, and
        ``image_size``, int64 [num_pictures, 2], its own height and width. One that is left to the
        GPU is an `EncodedImage` in the place of a tensor. With ``decode.text``
        there are ``input_ids``, ``attention_mask`` and ``labels``, int64 [T] arrays, and ``txt`` is
        a string.

    Raises:
        DecodeError: ``shard[index] key.field: reason``.
    """
    decoded = dict(sample)
    if isinstance(sample.get("json"), bytes):
        decoded["json"] = _at(sample, "json", partial(_parse_json, sample["json"]))
    if decode is None:
        return decoded
    if decode.text is not None:
        name = decode.text.source(decoded)
        tokenize = (
            partial(decode.text, decoded, _image_shapes(sample, decode))
            if tokens is None
            else partial(_given, tokens)
        )
        decoded.update(_at(sample, name, tokenize))
        if "txt" in sample:
            decoded["txt"] = _at(sample, "txt", partial(decode_text, sample["txt"]))
    if decode.image is not None:
        decoded.update(_decode_images(sample, decode.image, image_out))
        for name in image_fields(sample):
            del decoded[name]
    return decoded


def decode_texts(samples: Sequence[Sample], decode: Decode | None) -> list[TextTokens]:
    """Parse ``json`` and tokenize the texts of many samples in one call of the tokenizer.

    Returns:
        Of each sample what `decode_sample` takes in its place, and its tokens: the result is the
        same, the error of a bad one included. A sample whose ``json`` is damaged is as it was; one
        whose text depends on a picture of an odd header has no tokens yet.
    """
    parsed = [_try_parse(sample) for sample in samples]
    if decode is None or decode.text is None:
        return [(sample, None) for sample in parsed]
    shapes = [_prepared_shapes(sample, decode) for sample in parsed]
    whole = [
        of_images is not None and not isinstance(sample.get("json"), bytes)
        for sample, of_images in zip(parsed, shapes, strict=True)
    ]
    ready, known = list(compress(parsed, whole)), list(compress(shapes, whole))
    found = iter(decode.text.decode_all(ready, known))
    return [
        (sample, next(found) if good else None) for sample, good in zip(parsed, whole, strict=True)
    ]


def _prepared_shapes(sample: Sample, decode: Decode) -> list[ImageShape] | None:
    """Read from the headers what the sample's images will be, where its text depends on that.

    Returns:
        None where a header does not tell.
    """
    if decode.image is None or decode.text is None or not decode.text.needs_shapes:
        return []
    found = [decode.image.prepared_shape(sample[name]) for name in image_fields(sample)]
    return None if None in found else [shape for shape in found if shape is not None]


def _image_shapes(sample: Sample, decode: Decode) -> list[ImageShape]:
    """Do the same; where the headers do not tell, decode the pictures once more than it takes.

    Raises:
        DecodeError: One cannot be decoded.
    """
    shapes, decoder = _prepared_shapes(sample, decode), decode.image
    if shapes is not None or decoder is None:
        return shapes or []
    decode_one = partial(decoder.decode, rng=_rng(sample, decoder))
    return [
        decoder.shape_of(_at(sample, name, partial(decode_one, sample[name])).picture)
        for name in image_fields(sample)
    ]


def _try_parse(sample: Sample) -> Sample:
    data = sample.get("json")
    if not isinstance(data, bytes):
        return sample
    try:
        return {**sample, "json": _parse_json(data)}
    except DecodeError:
        return sample


def _given(tokens: Tokens | DecodeError) -> Tokens:
    if isinstance(tokens, DecodeError):
        raise tokens
    return tokens


def _decode_images(
    sample: Sample, decoder: ImageDecoder, out: torch.Tensor | None
) -> dict[str, Any]:
    names, rng = image_fields(sample), _rng(sample, decoder)
    if out is not None and len(names) == 1:
        _at(sample, names[0], partial(decoder, sample[names[0]], out.numpy(), rng))
        return {"image": out.permute(2, 0, 1)}  # of the batch's memory: collate need not copy
    if decoder.device != "cpu":
        left = [
            _at(sample, name, partial(encode_or_decode, sample[name], name, decoder, rng))
            for name in names
        ]
        return {"image": left[0] if len(left) == 1 else left}
    found = [_at(sample, name, partial(decoder.decode, sample[name], rng=rng)) for name in names]
    if decoder.tiles is None:
        images = [torch.from_numpy(one.pixels).permute(2, 0, 1) for one in found]
        return {"image": images[0] if len(images) == 1 else images}
    return {
        "image": [
            tile for one in found for tile in torch.from_numpy(one.pixels).permute(0, 3, 1, 2)
        ],
        "image_tiles": np.array([len(one.pixels) for one in found], dtype=np.int64),
        "image_size": np.array([one.picture for one in found], dtype=np.int64).reshape(-1, 2),
    }


def _rng(sample: Sample, decoder: ImageDecoder) -> np.random.Generator | None:
    """Return the generator of a sample's pictures, a stream apart from that of its transforms."""
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


def _at(sample: Sample, name: str, decode: Callable[[], T]) -> T:
    """Run one decoder, putting the field's address before its reason."""
    try:
        return decode()
    except DecodeError as error:
        key = str(sample.get("__key__", ""))
        lineage = sample.get("__lineage__")
        if lineage is None:
            address = ".".join(part for part in (key, name) if part)
        else:
            shard = str(sample.get("__url__", "")).rpartition("/")[2]
            if "__source__" in sample:
                shard = f"{sample['__source__']}/{shard}"
            address = where(shard, lineage.index, key, name)
        raise DecodeError(f"{address}: {error}") from None
