"""COCO's annotation files: pictures and annotations, joined on ``image_id`` -> one row per picture.

    {"images": [{"id", "file_name", ...}], "annotations": [{"image_id", "caption" | "bbox", ...}]}

Captions become ``{"image", "captions": [...]}``. Boxes become ``objects``, as they are, with the
name of their category. Pictures without annotations are rows too, and will be rejected or labelled
by their format. The whole file is in memory, as for every tool that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mmstream.converting.draft import RowError
from mmstream.converting.rows.records import BOM, NumberedRow
from mmstream.decoding.fields import decode_json
from mmstream.errors import ConfigError

MAX_COCO_BYTES = 4 << 30
"""A larger file is refused: it is in memory whole."""


class Coco(msgspec.Struct):
    """The parts of an annotation file that are used."""

    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: list[dict[str, Any]] = []


def parse_coco(path: Path) -> Coco | None:
    """Return the content of an annotation file. None: the file is something else."""
    if path.stat().st_size > MAX_COCO_BYTES:
        return None
    try:
        coco = decode_json(path.read_bytes().removeprefix(BOM), Coco)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_joined = all("image_id" in annotation for annotation in coco.annotations[:1])
    return coco if is_joined and all("id" in image for image in coco.images[:1]) else None


def iter_coco(coco: Coco, rows: str) -> Iterator[NumberedRow]:
    """Yield (number, row) of each picture, in the order of ``images``.

    Raises:
        ConfigError: Two pictures have one id, or an annotation is of none of them.
    """
    names = {category.get("id"): category.get("name") for category in coco.categories}
    annotations: dict[Any, list[dict[str, Any]]] = {}
    for image in coco.images:
        if image.get("id") in annotations:
            raise ConfigError(f"{rows}: two images have the id {image.get('id')!r}")
        annotations[image.get("id")] = []
    for annotation in coco.annotations:
        if annotation.get("image_id") not in annotations:
            raise ConfigError(
                f"{rows}: an annotation has image_id {annotation.get('image_id')!r}, which no "
                "image has; the file is damaged or was cut"
            )
        annotations[annotation["image_id"]].append(annotation)
    for number, image in enumerate(coco.images, 1):
        yield number, _row(image, annotations[image.get("id")], names)


def _row(
    image: dict[str, Any], annotations: list[dict[str, Any]], names: dict[Any, Any]
) -> dict[str, Any] | RowError:
    path = image.get("file_name")
    if not isinstance(path, str):
        return RowError("image without file_name")
    others = {key: value for key, value in image.items() if key not in ("id", "file_name")}
    row: dict[str, Any] = {"id": image.get("id"), "image": path, **others}
    captions = [each["caption"] for each in annotations if "caption" in each]
    objects = [_object(each, names) for each in annotations if "caption" not in each]
    if captions:
        row["captions"] = captions
    if objects:
        row["objects"] = objects
    return row


def _object(annotation: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in annotation.items() if key != "image_id"}
    name = names.get(annotation.get("category_id"))
    return {"category": name, **kept} if name is not None else kept
