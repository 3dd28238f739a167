"""Documents of texts and images in their order. Part of step 2 of a conversion.

    {"images": ["https://host/a.jpg", null], "texts": [null, "..."], "metadata": "[...]"}    OBELICS
    {"text_list": ["...", "..."], "image_info": [{"raw_url": "...", "image_name": "...",
                                                  "matched_text_index": 1}]}                 MMC4

A document becomes one turn of the assistant, as ms-swift writes texts for pre-training: all of it
is trained. OBELICS says where its images are. MMC4 says which text an image belongs to; the image
then stands before this text, or behind it where the caller wants that. An image that is null is
left out, and ``num_missing_images`` counts them.
"""

from __future__ import annotations

from typing import Any

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.formats.fields import expect, is_set, make_draft, media_ref

OBELICS_FACTS = ("metadata", "general_metadata", "url")
MMC4_FACTS = ("url", "image_info", "similarity_matrix", "could_have_url_duplicate", "scores")


def is_obelics(row: dict[str, Any]) -> bool:
    """Tell whether a row has two parallel lists, one of them null where the other is not."""
    images, texts = row.get("images"), row.get("texts")
    if not isinstance(images, list) or not isinstance(texts, list) or len(images) != len(texts):
        return False
    return any(text is None or isinstance(text, str) for text in texts)


def obelics(row: dict[str, Any]) -> Draft:
    """Return the draft of a document of OBELICS."""
    images = expect(row.get("images"), list, "images")
    texts = expect(row.get("texts"), list, "texts")
    if len(images) != len(texts):
        raise RowError(f"{len(images)} images but {len(texts)} texts; expected parallel lists")
    parts: list[MediaRef | str] = []
    num_missing = 0
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        if is_set(image) and is_set(text):
            raise RowError(f"both images[{i}] and texts[{i}] are set; expected one of them")
        if is_set(image):
            parts.append(media_ref(image, "image", f"images[{i}]"))
        elif is_set(text):
            parts.append(expect(text, str, f"texts[{i}]"))
        else:
            num_missing += 1
    return _document(row, parts, num_missing, {"images", "texts"}, OBELICS_FACTS)


def mmc4(row: dict[str, Any], from_files: bool = False, images_after: bool = False) -> Draft:
    """Return the draft of a document of MMC4.

    Args:
        row: The parsed row.
        from_files: Read the images by ``image_name`` in the media root, not by their URLs.
        images_after: Put each image behind the text that it matches, not before it.
    """
    texts = [
        expect(text, str, f"text_list[{i}]")
        for i, text in enumerate(expect(row.get("text_list"), list, "text_list"))
    ]
    images_of: dict[int, list[MediaRef]] = {}
    num_missing = 0
    for i, image in enumerate(expect(row.get("image_info"), list, "image_info")):
        name = f"image_info[{i}]"
        index = expect(image, dict, name).get("matched_text_index")
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(texts):
            raise RowError(f"{name}: matched_text_index is not that of a text")
        keys = ("image_name", "raw_url") if from_files else ("raw_url", "image_name")
        path = next((image[key] for key in keys if image.get(key)), None)
        if path is None:
            num_missing += 1
        else:
            images_of.setdefault(index, []).append(media_ref(path, "image", name))
    parts: list[MediaRef | str] = []
    for i, text in enumerate(texts):
        images = images_of.get(i, [])
        parts += [text, *images] if images_after else [*images, text]
    return _document(row, parts, num_missing, {"text_list"}, MMC4_FACTS)


def _document(
    row: dict[str, Any],
    parts: list[MediaRef | str],
    num_missing: int,
    used: set[str],
    kept: tuple[str, ...],
) -> Draft:
    """Return the draft of a document, from its images and texts."""
    refs = [part for part in parts if isinstance(part, MediaRef)]
    content: list[dict[str, Any]] = []
    num_images = 0
    for part in parts:
        if isinstance(part, MediaRef):
            content.append({"type": "image", "field": num_images})
            num_images += 1
        elif part.strip():
            content.append({"type": "text", "text": part})
    if not any(part["type"] == "text" for part in content):
        raise RowError("a document without text")
    main: dict[str, Any] = {"messages": [{"role": "assistant", "content": content}]}
    if num_missing:
        main["num_missing_images"] = num_missing
    return make_draft(row, main, refs, used, kept=kept)
