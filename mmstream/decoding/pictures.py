"""Pictures of one shape, which are decoded before the rest of their samples.

Place in the flow: the decode stage works on a step in three passes, each over all rows:

    plan     `plan_pictures` reads the headers, checks the limits, and draws crops and flips
    decode   `decode_picture` fills the memory of the batch; nearly all of it is work in C
    finish   `decode_sample` does all else, and takes the pictures as they are

A decoder in C fills the caches of its core with pixels, and the Python after it runs several times
slower than Python in one piece. With three passes there is little Python between two pictures.

All other pictures are decoded with their sample: those of any size, several of a sample, those that
share the geometry of another, and what a decoder of the user makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.address import addressed
from mmstream.decoding.by_field import IMAGE, picture_rng
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import Decoded, ImageDecoder, PicturePlan
from mmstream.decoding.sample import free_images
from mmstream.decoding.sample_rng import is_user_function
from mmstream.errors import DecodeError, SampleError
from mmstream.types import Sample


class PlannedPicture(NamedTuple):
    """A picture that is not decoded yet."""

    sample: Sample
    file: str
    """The field of the sample that holds the encoded picture."""
    decoder: ImageDecoder
    rng: np.random.Generator | None
    plan: PicturePlan | None
    """None: the result is planned after decoding."""


def early_decoders(decode: Decode | None) -> dict[str, ImageDecoder]:
    """Return the decoders of pictures that may be decoded before their samples, by field."""
    if decode is None or decode.stored is not None:
        return {}
    decoders = dict(decode.plan.pictures)
    if decode.image is not None:
        decoders[IMAGE] = decode.image
    return {
        name: decoders[name]
        for name in decode.shapes
        if name not in decode.plan.leaders and not is_user_function(decoders[name])
    }


def plan_pictures(
    sample: Sample, decode: Decode, decoders: Mapping[str, ImageDecoder]
) -> dict[str, PlannedPicture | SampleError]:
    """Plan the pictures of a sample that are decoded before the rest of it.

    Args:
        sample: Parsed, with a lineage.
        decode: Its decoders.
        decoders: Those that `early_decoders` returned.

    Returns:
        By field, the plan of a picture, or why it is bad. Empty for a sample with damaged JSON,
        which is bad, or may be left out by a function of the user.
    """
    if any(isinstance(sample.get(name), bytes) for name in decode.plan.parsers):
        return {}
    planned: dict[str, PlannedPicture | SampleError] = {}
    for name, decoder in decoders.items():
        file = _only_file(sample, name, decode)
        data = None if file is None else sample[file]
        if file is None or not isinstance(data, bytes | memoryview):
            continue
        rng = picture_rng(sample, name) if decoder.is_random else None
        try:
            plan = decoder.plan_picture(data, rng)
        except DecodeError as error:
            planned[name] = addressed(sample, file, error)
        else:
            planned[name] = PlannedPicture(sample, file, decoder, rng, plan)
    return planned


def _only_file(sample: Sample, name: str, decode: Decode) -> str | None:
    """Return the file that a field is decoded from. None: there is none, or there are several."""
    if name == IMAGE and decode.image is not None:
        files = free_images(sample, decode)
        return files[0] if len(files) == 1 else None
    sources = decode.plan.sources.get(name, (name,))
    return next((file for file in sources if file in sample), None)


def decode_picture(picture: PlannedPicture, out: NDArray[np.uint8]) -> Decoded | SampleError:
    """Decode a picture into its row of the batch. Return why it is bad, if it is.

    Args:
        picture: From `plan_pictures`.
        out: uint8 [H, W, 3], of a mask [H, W].
    """
    sample, file, decoder, rng, plan = picture
    try:
        return decoder.decode_planned(sample[file], plan, out, rng)
    except DecodeError as error:
        return addressed(sample, file, error)
