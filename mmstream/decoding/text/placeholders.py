"""Images in text: each placeholder becomes as many tokens as the model makes vectors of the image.

Place in the flow: `TextDecoder` calls it when it has an ``image_length``.

A chat template writes one token per image (Llava ``<image>``, Qwen-VL ``<|image_pad|>`` between two
marks). The model needs one token per vector, because it replaces these tokens by the vectors. So
the tokens and the images of a sample must agree exactly. A sample that does not agree is refused
here, as one bad sample. In the model, it would stop the run or learn from the wrong picture.
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
from mmstream.types import IGNORED_LABEL

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Placeholders:
    """How a text decoder treats images.

    Attributes:
        token: The token that stands for an image, as the chat template writes it.
        token_id: Its id.
        length: How many tokens an image takes, or a function from the image's shape to it.
        max_length: The most tokens of a text.
    """

    token: str
    token_id: int
    length: int | ImageLength
    max_length: int

    def put_before(self, text: str, sample: dict[str, Any]) -> str:
        """Put a placeholder per image before plain text, unless the text has placeholders."""
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
        """Repeat each image's token.

        Only text after the last image may be cut later. An image never is: a sample whose images do
        not all fit is refused. Its pictures are in the batch anyway, and without the text about
        them the sample would say something else.

        Args:
            sample: The sample. Its fields say how many images there are.
            text: The text that was tokenized.
            ids: int64 [T], the ids of `text`.
            labels: int64 [T].
            shapes: The shapes of the sample's images, in order. Needed where `length` is a
                function.
            keep: How many tokens at the end survive a cut, such as that for the end of text.

        Returns:
            Ids and labels, int64 [T + the added tokens]. Labels of image tokens are -100.

        Raises:
            DecodeError: The text has more or fewer placeholders than the sample has images, or an
                image does not fit.
            ConfigError: A shape is missing, or the function returned no number of tokens.
        """
        num_images = len(image_fields(sample))
        num_placeholders = text.count(self.token)
        if num_placeholders != num_images:
            raise DecodeError(f"{num_placeholders} {self.token} in the text, {num_images} images")
        lengths = self._lengths(num_images, shapes)
        is_image = ids == self.token_id
        num_tokens = int(np.count_nonzero(is_image))
        if num_tokens != num_images:  # a tokenizer may change the text before it looks for tokens
            raise DecodeError(f"{num_tokens} tokens {self.token} of the text, {num_images} images")
        repeats = np.ones_like(ids)
        repeats[is_image] = lengths
        room = self.max_length - keep
        num_whole = int(np.count_nonzero(np.cumsum(repeats)[is_image] <= room))
        if num_whole < num_images:
            raise DecodeError(
                f"max_length={self.max_length} ends before image {num_whole + 1} of {num_images} "
                f"does, which takes {lengths[num_whole]} tokens"
            )
        return ids.repeat(repeats), np.where(is_image, IGNORED_LABEL, labels).repeat(repeats)

    def _lengths(self, num_images: int, shapes: Sequence[ImageShape] | None) -> list[int]:
        if isinstance(self.length, int):
            return [self.length] * num_images
        shapes = shapes or ()
        if len(shapes) != num_images:
            raise ConfigError(
                f"image_length is a function: the text of {num_images} images needs the "
                f"prepared_shape of each, not {len(shapes)}"
            )
        return [_checked_length(self.length(shape), self.length, shape) for shape in shapes]


def make_placeholders(
    core: Any, token: str, length: int | ImageLength | None, max_length: int
) -> Placeholders | None:
    """Return how a text decoder of these settings treats images.

    Args:
        core: A tokenizer of the library `tokenizers`.
        token: The token that stands for an image, as the chat template writes it.
        length: How many tokens an image takes, or a function. None: images do not concern the text.
        max_length: The most tokens of a text.

    Returns:
        The placeholders. None where `length` is None.

    Raises:
        ConfigError: The length is neither a number from 1 up nor a function. Or the tokenizer would
            split the token.
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
        messages: As `check_messages` returns them. An image without a ``field`` is the next one.
        fields: The names of the sample's image fields, in order.

    Raises:
        DecodeError: The messages name other fields, or the same ones in another order.
    """
    contents = [message["content"] for message in messages]
    items = [item for content in contents if isinstance(content, list) for item in content]
    images = [item for item in items if item["type"] == "image"]
    for i, (image, field) in enumerate(zip(images, fields, strict=False)):
        if isinstance(image.get("field"), str) and image["field"] != field:
            raise DecodeError(f"image {i + 1} of the messages is {image['field']}, not {field}")


def _checked_length(length: Any, function: ImageLength, shape: ImageShape) -> int:
    """Return what a function of image length returned, if it is a number of tokens."""
    try:
        number = 0 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        number = 0
    if number < 1:
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ConfigError(
            f"image_length: {name} returned {length!r} for {shape}: give a whole number from 1 up"
        )
    return number
