"""Images in text: each placeholder becomes as many tokens as a vision tower makes of an image.

Part of the decode stage, called by `mmstream.decoding.text` when it is told an ``image_length``. A
chat template writes one token for an image (Llava ``<image>``, Qwen-VL ``<|image_pad|>`` between
two marks); the model wants one for each vector that it puts in their place. So tokens and pictures
of a sample must agree to the last one, and what does not agree is refused here, where it is one bad
sample, and not in the model, where it is a run that stops or, worse, learns from the wrong picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmstream.errors import ConfigError, DecodeError

Ids = NDArray[np.int64]


def placeholder_id(core: Any, token: str) -> int:
    """Return the id of the token that stands for an image.

    Args:
        core: A tokenizer of `tokenizers`.
        token: As the chat template writes it.

    Raises:
        ConfigError: It is none of the tokens that are never split.
    """
    for token_id, added in core.get_added_tokens_decoder().items():
        if added.content == token:
            return int(token_id)
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


def expand_images(
    ids: Ids,
    labels: Ids,
    *,
    token_id: int,
    length: int,
    num_images: int,
    max_length: int,
    keep: int,
) -> tuple[Ids, Ids]:
    """Repeat each image's token, and cut the text behind the last image.

    An image is never cut: a sample whose images do not all fit is refused, since its pictures are
    in the batch anyway, and dropping some with the text about them would change what it says.

    Args:
        ids: int64 [T]. May already be cut to `max_length`.
        labels: int64 [T].
        token_id: Of the image's token.
        length: Tokens an image.
        num_images: Images of the sample; `ids` hold as many, except for those that were cut off.
        max_length: Tokens of the result, at most.
        keep: Tokens at the end, such as that of the end of text, that survive a cut.

    Returns:
        Ids and labels, int64 [at most max_length]. Labels of image tokens are -100.

    Raises:
        DecodeError: An image does not fit.
    """
    is_image = ids == token_id
    repeats = np.where(is_image, length, 1)
    room, end = max_length - keep, len(ids) - keep
    num_whole = int(np.count_nonzero(np.cumsum(repeats)[is_image] <= room))
    if num_whole < num_images:
        raise DecodeError(
            f"max_length={max_length} ends before image {num_whole + 1} of {num_images} does"
        )
    places = np.arange(len(ids)).repeat(repeats)
    places = np.append(places[places < end][:room], np.arange(end, len(ids)))
    return ids[places], np.where(is_image, -100, labels)[places]
