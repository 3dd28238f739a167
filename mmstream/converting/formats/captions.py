"""Media files with captions, labels or nothing; text; documents. Part of step 2 of a conversion.

captions  {"image": "a.jpg", "text": "..."}
          {"file_name": "a.wav", "caption_1": "...", "caption_2": "..."}                    Clotho
          {"filepath": "val2014", "filename": "a.jpg", "sentences": [{"raw": "..."}]}       Karpathy
laion     {"URL": "https://host/a.jpg", "TEXT": "...", "WIDTH": 640, "sha256": "..."}
labels    {"image": "a.jpg", "label": 3, "label_name": "cat"}, {"image": "a.jpg"}
text      {"text": "..."}; with --format text also {"captions": ["...", "..."]}
obelics   {"images": ["https://host/a.jpg", null], "texts": [null, "..."], "metadata": "[...]"}
mmc4      {"text_list": ["...", "..."], "image_info": [{"raw_url": "...", "image_name": "...",
                                                        "matched_text_index": 1}]}

A document becomes one turn of the assistant, as ms-swift writes texts for pre-training: all of it
is trained. OBELICS says where its images are. MMC4 says which text an image belongs to; the image
then stands before this text, or after it where the caller wants that. An image that is null is
left out, and ``num_missing_images`` counts them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.formats.fields import (
    ParsedRow,
    all_media,
    captioned,
    expect,
    first_key,
    is_set,
    kind_by_name,
    make_draft,
    media_ref,
    text_of,
    texts_of,
)
from mmstream.errors import escaped

CAPTION_KEYS = ("captions", "caption", "text", "sentence", "transcript", "transcription", "enCap")
URL_KEYS = ("URL", "url")
ALT_KEYS = ("TEXT", "caption", "captions", "text", "alt", "top_caption")
LABEL_KEYS = ("label", "labels", "class_id", "cls", "fine_label")
LABEL_NAME_KEYS = ("label_name", "class_name", "class", "category")

LAION_FACTS = frozenset(
    (
        *("WIDTH", "HEIGHT", "width", "height", "original_width", "original_height", "LICENSE"),
        *("similarity", "SIMILARITY", "punsafe", "pwatermark", "NSFW", "AESTHETIC_SCORE"),
        *("aesthetic", "hash", "key", "uid", "SAMPLE_ID", "sha256", "face_bboxes", "LANGUAGE"),
        *("prob", "clip_b32_similarity_score", "clip_l14_similarity_score", "exif", "status"),
        "error_message",
    )
)
"""What LAION, Re-LAION, DataComp and cc2dataset say of an image."""

MEDIA_FACTS = frozenset(
    (
        *("width", "height", "duration", "duration_s", "fps", "num_frames", "sample_rate"),
        *("sampling_rate", "lang", "license", "license_id", "license_name", "license_url"),
        *("flickr_url", "coco_url", "date_captured", "url", "source", "dataset", "split"),
        *("language", "speaker", "speaker_id", "client_id", "gender", "age", "objects"),
    )
)
LABEL_FACTS = MEDIA_FACTS.union(LABEL_NAME_KEYS)
TEXT_FACTS = frozenset(("url", "timestamp", "meta"))
OBELICS_FACTS = frozenset(("metadata", "general_metadata", "url"))
MMC4_FACTS = frozenset(
    ("url", "image_info", "similarity_matrix", "could_have_url_duplicate", "scores")
)
_NUMBERED_CAPTION = re.compile(r"caption_?(\d{1,3})")
_SHA256 = re.compile("[0-9a-fA-F]{64}")


def has_caption(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has a key of captions."""
    return any(key in row for key in CAPTION_KEYS) or bool(numbered_captions(row))


def captions(row: ParsedRow) -> Draft:
    """Return the draft of one or more media files with captions: ``{"image", "text"}``.

    The captions are the first key of `CAPTION_KEYS` that the row has: a string or a list.
    """
    if is_karpathy(row):
        return _karpathy(row)
    refs = all_media(row)
    if not refs:
        raise RowError(
            "no media: expected a path in image, image_path, file_name or images; for captions "
            "alone, say --format text"
        )
    key = next((k for k in CAPTION_KEYS if row.get(k) is not None), None)
    if key is not None:
        texts = texts_of(row.take(key), key)
    elif numbered := numbered_captions(row):
        texts = tuple(text_of(row.take(k), k) for k in numbered)
    else:
        raise RowError("no text: expected text, caption or captions")
    return captioned(row, refs, texts)


def numbered_captions(row: Mapping[str, Any]) -> list[str]:
    """Return the keys ``caption_1``, ``caption_2``, ... of a row that have a text, in order."""
    numbers = {key: match for key in row if (match := _NUMBERED_CAPTION.fullmatch(str(key)))}
    return sorted((k for k in numbers if is_set(row[k])), key=lambda k: int(numbers[k][1]))


def is_karpathy(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is of Karpathy's files about the images of COCO and Flickr."""
    sentences = row.get("sentences")
    is_list = isinstance(sentences, list) and bool(sentences) and "filename" in row
    return is_list and all(isinstance(item, dict) and "raw" in item for item in row["sentences"])


def _karpathy(row: ParsedRow) -> Draft:
    row.facts |= {"sentids", "imgid", "cocoid"}
    path, folder = text_of(row.take("filename"), "filename"), row.take("filepath")
    if is_set(folder):
        path = f"{text_of(folder, 'filepath')}/{path}"
    texts = tuple(
        text_of(item["raw"], f"sentences[{i}]: raw") for i, item in enumerate(row.take("sentences"))
    )
    return captioned(row, [MediaRef("image", path)], texts)


def is_laion(row: Mapping[str, Any]) -> bool:
    """Tell whether the ``url`` of a row is that of an image, with its text beside it.

    Rows of web text have ``url`` and ``text`` too. An image's URL has capital letters as its key,
    or a caption beside it, or facts about the image, or the extension of one.
    """
    key = first_key(row, URL_KEYS)
    if key is None or not isinstance(row[key], str) or first_key(row, ALT_KEYS) is None:
        return False
    has_facts = not LAION_FACTS.isdisjoint(row)
    has_alt = any(alt in row for alt in ALT_KEYS if alt != "text")
    return key == "URL" or has_alt or has_facts or kind_by_name(row[key]) == "image"


def laion(row: ParsedRow) -> Draft:
    """Return the draft of an image by its URL: ``{"URL", "TEXT"}``.

    The image must have the ``sha256`` of the row, where there is one.
    """
    key, text_key = first_key(row, URL_KEYS), first_key(row, ALT_KEYS)
    if key is None or text_key is None:
        raise RowError("expected a URL in url or URL, and a text in text, TEXT or caption")
    texts = texts_of(row.take(text_key), text_key)
    sha256 = row["sha256"] if is_set(row.get("sha256")) else None
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise RowError(f"sha256: {escaped(repr(sha256), 80)} is not 64 hexadecimal digits")
    url = text_of(row.take(key), key)
    return captioned(row, [MediaRef("image", url, sha256=sha256 and sha256.lower())], texts)


def labels(row: ParsedRow) -> Draft:
    """Return the draft of media files with the number of a class, or with nothing.

    The number becomes ``KEY.cls``. Names of classes stay in the ``json``.
    """
    refs = all_media(row)
    if not refs:
        raise RowError("no media: expected a path in image, image_path, file_name or images")
    key = first_key(row, LABEL_KEYS)
    if key is None:
        return make_draft(row, {}, refs)
    value = row[key]
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)  # from a table
    if not isinstance(value, int) or isinstance(value, bool):
        row.facts |= {key}
        return make_draft(row, {}, refs)
    row.take(key)
    return make_draft(row, {}, refs, fields={"cls": str(value).encode()})


def text(row: ParsedRow) -> Draft:
    """Return the draft of plain text: ``{"text": "..."}``, or captions without their media.

    The text goes to ``KEY.txt`` only, the other keys to ``KEY.json``. Where the captions are a
    list, the ``json`` has all of them.
    """
    key = "text" if row.get("text") is not None else first_key(row, CAPTION_KEYS) or "text"
    value = expect(row.take(key), str, "text") if key == "text" else row.take(key)
    texts = texts_of(value, key)
    content = {"captions": list(texts)} if isinstance(value, list) else {}
    return make_draft(row, content, (), texts)


def is_obelics(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has two parallel lists, one of them null where the other is not."""
    images, texts = row.get("images"), row.get("texts")
    return (
        isinstance(images, list)
        and isinstance(texts, list)
        and len(images) == len(texts)
        and any(text is None or isinstance(text, str) for text in texts)
    )


def obelics(row: ParsedRow) -> Draft:
    """Return the draft of a document of OBELICS."""
    images = expect(row.take("images"), list, "images")
    texts = expect(row.take("texts"), list, "texts")
    if len(images) != len(texts):
        raise RowError(f"{len(images)} images but {len(texts)} texts; expected parallel lists")
    segments: list[MediaRef | str] = []
    num_missing = 0
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        if is_set(image) and is_set(text):
            raise RowError(f"both images[{i}] and texts[{i}] are set; expected one of them")
        if is_set(image):
            segments.append(media_ref(image, "image", f"images[{i}]"))
        elif is_set(text):
            segments.append(expect(text, str, f"texts[{i}]"))
        else:
            num_missing += 1
    return _document(row, segments, num_missing)


def mmc4(row: ParsedRow, from_files: bool = False, images_after: bool = False) -> Draft:
    """Return the draft of a document of MMC4.

    Args:
        row: The parsed row.
        from_files: Read the images by ``image_name`` in the media root, not by their URLs.
        images_after: Put each image after the text that it matches, not before it.
    """
    texts = [
        expect(text, str, f"text_list[{i}]")
        for i, text in enumerate(expect(row.take("text_list"), list, "text_list"))
    ]
    images_of: list[list[MediaRef]] = [[] for _ in texts]
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
            images_of[index].append(media_ref(path, "image", name))
    segments: list[MediaRef | str] = []
    for text, images in zip(texts, images_of, strict=True):
        segments += [text, *images] if images_after else [*images, text]
    return _document(row, segments, num_missing)


def _document(row: ParsedRow, segments: list[MediaRef | str], num_missing: int) -> Draft:
    """Return the draft of a document, from its images and texts in order."""
    refs: list[MediaRef] = []
    content: list[dict[str, Any]] = []
    for segment in segments:
        if isinstance(segment, MediaRef):
            content.append({"type": "image", "field": len(refs)})
            refs.append(segment)
        elif segment.strip():
            content.append({"type": "text", "text": segment})
    if len(content) == len(refs):
        raise RowError("a document without text")
    main: dict[str, Any] = {"messages": [{"role": "assistant", "content": content}]}
    if num_missing:
        main["num_missing_images"] = num_missing
    return make_draft(row, main, refs)
