"""The decode stage: bytes of a sample become tensors, or a DecodeError with the address.

Between read and batch. `decode_sample` parses ``json``, and runs the decoders that a `Decode`
names:

    jpg, 0.jpg, 1.png ...  -> "image"                                  ImageDecoder (image)
    json messages, or txt  -> "input_ids", "attention_mask", "labels"  TextDecoder (text, chat)

Fields without a decoder stay bytes, compressed ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from mmstream.decoding.fields import image_fields
from mmstream.decoding.image import ImageDecoder
from mmstream.decoding.text import TextDecoder, decode_text
from mmstream.errors import DecodeError, where

__all__ = ["Decode", "ImageDecoder", "TextDecoder", "decode_sample", "image_fields"]

Sample = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Decode:
    """Which decoders a pipeline runs.

    Attributes:
        image: For all image fields of a sample; None leaves them bytes.
        text: For the messages or the text of a sample; None leaves them as they are.
    """

    image: ImageDecoder | None = None
    text: TextDecoder | None = None


def decode_sample(
    sample: Sample, decode: Decode | None, image_out: torch.Tensor | None = None
) -> Sample:
    """Decode one sample.

    Args:
        sample: As read from a shard: fields are bytes. It is not changed.
        decode: The decoders; None only parses ``json``.
        image_out: uint8 [H, W, 3], C-contiguous: the batch's row for the picture of a sample that
            has exactly one. Only with a decoder of fixed size.

    Returns:
        A new sample. ``json`` is parsed. With ``decode.image`` the image fields are replaced by
        ``image``: uint8 [3, H, W], a view of H, W, 3 memory (of ``image_out`` where it was used),
        or a list of such tensors, possibly empty, unless there is exactly one. With ``decode.text``
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
        decoded.update(_at(sample, name, partial(decode.text, decoded)))
        if "txt" in sample:
            decoded["txt"] = _at(sample, "txt", partial(decode_text, sample["txt"]))
    if decode.image is not None:
        decoded.update(image=_decode_images(sample, decode.image, image_out))
        for name in image_fields(sample):
            del decoded[name]
    return decoded


def _decode_images(
    sample: Sample, decoder: ImageDecoder, out: torch.Tensor | None
) -> torch.Tensor | list[torch.Tensor]:
    names = image_fields(sample)
    if out is not None and len(names) == 1:
        _at(sample, names[0], partial(decoder, sample[names[0]], out.numpy()))
        return out.permute(2, 0, 1)  # of the batch's memory, so that collate has nothing to copy
    images = [
        torch.from_numpy(_at(sample, name, partial(decoder, sample[name]))).permute(2, 0, 1)
        for name in names
    ]
    return images[0] if len(images) == 1 else images


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
            address = where(shard, lineage.index, key, name)
        raise DecodeError(f"{address}: {error}") from None
