"""Which fields of a sample are images, and in which order.

Place in the flow: decoding and tokenizing both ask here, so that pictures and placeholders agree.
"""

from __future__ import annotations

from collections.abc import Iterable

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "avif"})


def image_fields(sample: Iterable[str]) -> list[str]:
    """List the fields that hold images, in the order in which messages count them.

    Args:
        sample: A sample, or the names of its fields.

    Returns:
        The names whose last extension is that of an image. First come names without a number
        (``jpg``), then names by their number (``2.png`` before ``10.jpg``), then others by name
        (``mask.png``).

    Examples:
        >>> image_fields(["json", "10.jpg", "mask.png", "2.png"])
        ['2.png', '10.jpg', 'mask.png']
    """
    names = [
        name
        for name in sample
        if name.rpartition(".")[2] in IMAGE_EXTENSIONS and not name.startswith("__")
    ]
    return sorted(names, key=_image_rank)


def _image_rank(name: str) -> tuple[int, int, str]:
    """Return the sort key of an image field."""
    number = name.rpartition(".")[0]
    if not number:
        return (0, 0, name)
    return (1, int(number), name) if number.isdecimal() else (2, 0, name)
