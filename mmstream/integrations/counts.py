"""Counts that a model needs: of tokens that stand for media, and of media in a row.

    families.py, videos.py, sound.py -> `check_count`
    arguments.py, sound.py -> `require_one_each`

The model itself would compare numbers of other things, and name no setting and no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmstream.errors import ConfigError
from mmstream.types import Batch


def check_count(ids: Tensor, config: Any, kind: str, media: str, number: int, length: str) -> None:
    """Check that a text has as many tokens of a kind as the model makes vectors.

    Args:
        ids: int64 [B, T].
        config: The model's config. Its ``<kind>_token_id`` is the token.
        kind: "image", "video" or "audio".
        media: What the batch has of it, for the message, such as "pictures".
        number: How many vectors the model makes.
        length: The ``<kind>_length`` of a `TextDecoder` that counts so.

    Raises:
        ConfigError: Says which length the model needs.
    """
    token_id = getattr(config, f"{kind}_token_id")
    num_tokens = int((ids == token_id).sum())
    if num_tokens == number:
        return
    token = "" if num_tokens else f", and {kind}_token= of the token with the id {token_id}"
    raise ConfigError(
        f"model_inputs: {config.model_type} takes {number:,} {kind} tokens for the {media} of this "
        f"batch, the text has {num_tokens:,}: TextDecoder({kind}_length={length}){token}"
    )


def require_one_each(batch: Batch, counts: Sequence[int], family: str, medium: str) -> None:
    """Refuse a batch in which a row has no medium of a kind, or more than one.

    Args:
        batch: Names the row in the message, if it has keys.
        counts: How many each row has.
        family: The model's.
        medium: "picture" or "audio".

    Raises:
        ConfigError: Names the first such row.
    """
    for row, count in enumerate(counts):
        if count != 1:
            key = batch["__key__"][row] if "__key__" in batch else f"row {row}"
            raise ConfigError(
                f"model_inputs: {family} takes one {medium} a row, {key} has {count}: leave such "
                "samples out with a transform that raises mm.SkipSample"
            )
