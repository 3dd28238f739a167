"""Images in text: each placeholder becomes as many tokens as a vision tower makes of an image.

Part of the decode stage, called by `decoding.text` when it is told an ``image_length``. A
chat template writes one token for an image (Llava ``<image>``, Qwen-VL ``<|image_pad|>`` between
two marks); the model wants one for each vector that it puts in their place. So tokens and pictures
of a sample must agree to the last one, and what does not agree is refused here, where it is one bad
sample, and not in the model, where it is a run that stops or, worse, learns from the wrong picture.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.fields import image_fields
from mmstream.decoding.image.image_shape import ImageShape
from mmstream.decoding.text.image_lengths import ImageLength
from mmstream.errors import ConfigError, DecodeError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Placeholders:
    """What a text decoder does about images.

    Attributes:
        token: Stands for an image, as the chat template writes it.
        token_id: Its id.
        length: Tokens that an image takes, or the function of its shape that says so.
        max_length: Tokens of a text, at most.
    """

    token: str
    token_id: int
    length: int | ImageLength
    max_length: int

    def put_before(self, text: str, sample: dict[str, Any]) -> str:
        """Return plain text with all the sample's images before it, unless it shows some."""
        return text if self.token in text else self.token * len(image_fields(sample)) + text

    def expand(
        self,
        sample: dict[str, Any],
        text: str,
        ids: Ids,
        labels: Ids,
        *,
        shapes: Sequence[ImageShape] | None,
        keep: int,
    ) -> tuple[Ids, Ids]:
        """Repeat each image's token, and cut the text behind the last image.

        An image is never cut: a sample whose images do not all fit is refused, since its pictures
        are in the batch anyway, and dropping some with the text about them would change what it
        says.

        Args:
            sample: Its fields say which images there are.
            text: Of which the ids are.
            ids: int64 [T]. May already be cut to `max_length`.
            labels: int64 [T].
            shapes: Of the sample's images, in order, where the length depends on them.
            keep: Tokens at the end, such as that of the end of text, that survive a cut.

        Returns:
            Ids and labels, int64 [at most max_length]. Labels of image tokens are -100.

        Raises:
            DecodeError: The text shows more or fewer images than there are, or one does not fit.
            ConfigError: The function has no shapes to work on, or returned no number of tokens.
        """
        num_images, num_placeholders = len(image_fields(sample)), text.count(self.token)
        if num_placeholders != num_images:
            raise DecodeError(f"{num_placeholders} {self.token} in the text, {num_images} images")
        lengths = self._lengths(num_images, shapes)
        is_image = ids == self.token_id
        repeats = np.ones_like(ids)
        repeats[is_image] = lengths[: np.count_nonzero(is_image)]  # the others are cut off already
        room, end = self.max_length - keep, len(ids) - keep
        num_whole = int(np.count_nonzero(np.cumsum(repeats)[is_image] <= room))
        if num_whole < num_images:
            raise DecodeError(
                f"max_length={self.max_length} ends before image {num_whole + 1} of {num_images} "
                f"does, which takes {lengths[num_whole]} tokens"
            )
        places = np.arange(len(ids)).repeat(repeats)
        places = np.append(places[places < end][:room], np.arange(end, len(ids)))
        return ids[places], np.where(is_image, -100, labels)[places]

    def _lengths(self, num_images: int, shapes: Sequence[ImageShape] | None) -> list[int]:
        if isinstance(self.length, int):
            return [self.length] * num_images
        shapes = shapes or ()
        if len(shapes) != num_images:
            raise ConfigError(
                f"image_length is a function: the text of {num_images} images needs the "
                f"prepared_shape of each, not {len(shapes)}"
            )
        return [_checked(self.length(shape), self.length, shape) for shape in shapes]


def make_placeholders(
    core: Any, token: str, length: int | ImageLength | None, max_length: int
) -> Placeholders | None:
    """Return what a text decoder of these settings does about images; without a length, nothing.

    Args:
        core: A tokenizer of `tokenizers`.
        token: Stands for an image, as the chat template writes it.
        length: Tokens that an image takes, or a function.
        max_length: Tokens of a text.

    Raises:
        ConfigError: The length is neither a number from 1 up nor a function, or the token none of
            those that are never split.
    """
    if length is None:
        return None
    is_number = isinstance(length, int) and not isinstance(length, bool)
    if not (length >= 1 if is_number else callable(length)):  # type: ignore[operator]
        raise ConfigError(f"image_length={length!r}: give a number from 1 up, or a function")
    for token_id, added in core.get_added_tokens_decoder().items():
        if added.content == token:
            return Placeholders(token, int(token_id), length, max_length)
    raise ConfigError(f"image_token={token!r}: not an added or special token of the tokenizer")


def check_fields(messages: list[dict[str, Any]], fields: list[str]) -> None:
    """Check that the messages show the sample's images in the order in which they are decoded.

    Args:
        messages: As `check_messages` returns them. Image parts without a ``field`` take the next.
        fields: The sample's image fields, in order.

    Raises:
        DecodeError: Parts name other fields, or in another order.
    """
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part for part in parts if part["type"] == "image"]
    for i, (part, field) in enumerate(zip(images, fields, strict=False)):
        if isinstance(part.get("field"), str) and part["field"] != field:
            raise DecodeError(f"image {i + 1} of the messages is {part['field']}, not {field}")


def _checked(length: Any, function: ImageLength, shape: ImageShape) -> int:
    """Return what a function said, if it is a number of tokens."""
    try:
        number = 0 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        number = 0
    if number < 1:
        named = function.func if isinstance(function, partial) else function
        name = getattr(named, "__name__", type(named).__name__)
        raise ConfigError(
            f"image_length: {name} returned {length!r} for {shape}: give a whole number from 1 up"
        )
    return number
