"""The tokens of a text that stand for media, against the vectors that a model makes of these.

    families.py, videos.py, sound.py -> `check_count`

The model itself would compare numbers of other things, and name no setting.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmstream.errors import ConfigError


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
