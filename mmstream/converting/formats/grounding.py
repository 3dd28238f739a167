"""Boxes of ms-swift's grounding rows -> content parts. Part of step 2 of a conversion.

    {"messages": [{"role": "user", "content": "<image>Find <ref-object>"},
                  {"role": "assistant", "content": "<bbox>"}],
     "images": ["a.jpg"], "objects": {"ref": ["a cat"], "bbox": [[10, 20, 110, 220]]}}

``<ref-object>`` is replaced by the next text of ``ref``. ``<bbox>`` becomes a part, because each
model writes boxes in another way:

    {"type": "bbox", "bbox": [10, 20, 110, 220], "unit": "pixels", "field": "0.jpg"}

A point has two coordinates. The unit is "pixels" of the original image, or "fraction" of its sides,
as ``bbox_type`` says ("real" or "norm1").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mmstream.converting.draft import MediaRef, RowError
from mmstream.converting.formats.fields import expect, number_of, text_of

__all__ = ["fill_boxes", "is_grounding"]

UNITS = {None: "pixels", "": "pixels", "real": "pixels", "norm1": "fraction"}
_TOKEN = re.compile("<ref-object>|<bbox>")


def is_grounding(objects: Any) -> bool:
    """Tell whether the ``objects`` of a row are those of ms-swift."""
    return isinstance(objects, dict) and "bbox" in objects


def fill_boxes(
    messages: list[dict[str, Any]], objects: dict[str, Any], refs: Sequence[MediaRef]
) -> None:
    """Replace the tokens in the texts of messages, in place.

    Raises:
        RowError: There are fewer or more tokens than texts or boxes, or a box is none.
    """
    names = list(expect(objects.get("ref") or [], list, "objects: ref"))
    boxes = list(_boxes(objects, [i for i, ref in enumerate(refs) if ref.kind == "image"]))
    num_tokens = {"<ref-object>": 0, "<bbox>": 0}
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] != "text" or _TOKEN.search(part["text"]) is None:
                parts.append(part)
                continue
            text, end = "", 0
            for match in _TOKEN.finditer(part["text"]):
                text += part["text"][end : match.start()]
                end = match.end()
                number = num_tokens[match[0]]
                num_tokens[match[0]] += 1
                if match[0] == "<ref-object>" and number < len(names):
                    text += text_of(names[number], f"objects: ref[{number}]")
                elif match[0] == "<bbox>" and number < len(boxes):
                    parts += [{"type": "text", "text": text}] if text else []
                    parts.append(boxes[number])
                    text = ""
            text += part["text"][end:]
            parts += [{"type": "text", "text": text}] if text else []
        message["content"] = parts
    for token, values in (("<ref-object>", names), ("<bbox>", boxes)):
        # All boxes may be facts beside the text, but some of them are a mistake.
        if num_tokens[token] and num_tokens[token] != len(values):
            raise RowError(
                f"{num_tokens[token]} {token} tokens but {len(values)} of them in objects"
            )


def _boxes(objects: dict[str, Any], images: list[int]) -> Iterator[dict[str, Any]]:
    bbox_type = objects.get("bbox_type")
    if not isinstance(bbox_type, str | None) or bbox_type not in UNITS:
        raise RowError(f"objects: bbox_type {str(bbox_type)[:40]!r} is neither real nor norm1")
    image_ids = expect(objects.get("image_id") or [], list, "objects: image_id")
    for i, value in enumerate(expect(objects["bbox"], list, "objects: bbox")):
        name = f"objects: bbox[{i}]"
        box = [number_of(number, name) for number in expect(value, list, name)]
        if len(box) not in (2, 4):
            raise RowError(f"{name}: expected 2 or 4 numbers, found {len(box)}")
        if len(box) == 4:  # as ms-swift does: the corners in any order
            (left, right), (top, bottom) = sorted(box[::2]), sorted(box[1::2])
            box = [left, top, right, bottom]
        image_id = image_ids[i] if i < len(image_ids) else 0
        is_index = isinstance(image_id, int) and not isinstance(image_id, bool)
        if not is_index or not 0 <= image_id < len(images):
            raise RowError(f"{name}: of image {str(image_id)[:20]}, the row has {len(images)}")
        yield {
            "type": "bbox",
            "bbox": [int(number) if number.is_integer() else number for number in box],
            "unit": UNITS[bbox_type],
            "field": images[image_id],
        }
