"""The pictures of a step become one tensor, without a copy where they lie in one buffer.

collate.collate -> `are_pictures` -> `join_pictures`, `stack_pictures`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmstream.batching.values import as_list, is_alike, join_rows
from mmstream.types import Batch


def are_pictures(value: Any) -> bool:
    """Tell whether a value is what ``image`` may be: a picture, several, or none."""
    return all(isinstance(image, torch.Tensor) for image in as_list(value))


def join_pictures(values: Sequence[Any]) -> Batch:
    """Return ``image``, and ``image_row`` where not every row has one image of one shape."""
    images_of_rows = list(map(as_list, values))
    images = [image for row in images_of_rows for image in row]
    joined = stack_pictures(images)
    if isinstance(joined, torch.Tensor) and all(len(row) == 1 for row in images_of_rows):
        return {"image": joined}
    counts = torch.tensor([len(row) for row in images_of_rows])
    # Example: rows with 2, 0 and 1 images give [0, 0, 2].
    return {"image": joined, "image_row": torch.repeat_interleave(counts)}


def stack_pictures(images: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return images of one shape as one tensor, without a copy where they are rows of one buffer.

    Images of several shapes stay a list.
    """
    if not images or any(not is_alike(image, images[0]) for image in images):
        return images
    rows = join_rows(images)
    joined = torch.stack(images) if rows is None else rows
    return joined.contiguous(memory_format=torch.channels_last) if joined.ndim == 4 else joined
