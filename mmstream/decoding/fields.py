"""Which fields of a sample are images, and in which order: what decode and text agree on."""

from __future__ import annotations

from collections.abc import Iterable

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif"})


def image_fields(sample: Iterable[str]) -> list[str]:
    """List the fields that hold images, in the order the messages count them.

    Returns:
        Names whose last extension is that of an image: first those without a number (``jpg``), then
        by the number in front (``2.png`` before ``10.jpg``), then others (``mask.png``) by name.
    """
    names = [n for n in sample if n.rpartition(".")[2] in IMAGE_EXTENSIONS and n[:2] != "__"]
    return sorted(names, key=_image_rank)


def _image_rank(name: str) -> tuple[int, int, str]:
    number = name.rpartition(".")[0]
    if not number:
        return (0, 0, name)
    return (1, int(number), name) if number.isdecimal() else (2, 0, name)
