"""Models that take one picture or one recording with each row.

    one_picture.py, sound.py -> `require_one_each`

The message names the row, and says how to leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmstream.errors import ConfigError
from mmstream.types import Batch


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
