"""Batches without padding, for people: the documents of each row, one after the other.

    samples.py -> packs.py -> templates/pack.html

A row is drawn as a bar of documents, with a table of them below it. Attention ends where a document
ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from mmstream.display.contents import array_of, token_counts, token_runs
from mmstream.display.html import page, render, thumbnail
from mmstream.display.text import count_text
from mmstream.types import IGNORED_LABEL, IntArray

MAX_ROWS = 8
"""Rows of a batch that are drawn."""
MAX_DOCUMENTS = 60
"""Documents of a row that are listed."""
MAX_IMAGES = 4
"""Images of a document that are shown."""

COLOURS = (
    "rgba(70, 130, 220, .35)",
    "rgba(240, 150, 50, .35)",
    "rgba(60, 170, 110, .35)",
    "rgba(190, 90, 190, .35)",
    "rgba(200, 80, 80, .35)",
)
"""Documents of a row, by turns."""


@dataclass(frozen=True)
class Document:
    """A document of a row.

    Attributes:
        key: Of its sample. None: it is padding.
        start: Its first token in the row.
        stop: The token after its last one.
        tokens: ``input_ids`` and ``labels``, int64 [L].
        positions: int64 [L], those of the text.
        images: Its images, and frames of its videos are none.
    """

    key: str | None
    start: int
    stop: int
    tokens: Mapping[str, IntArray] = field(repr=False)
    positions: IntArray = field(repr=False)
    images: Sequence[Any] = field(default=(), repr=False)

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.stop - self.start

    @property
    def num_label_tokens(self) -> int:
        """Tokens that the model learns."""
        return int((self.tokens["labels"] != IGNORED_LABEL).sum())


@dataclass(frozen=True)
class PackedRow:
    """A row of a batch.

    Attributes:
        number: Of the row in the global batch.
        documents: In their order, those of padding included.
        is_valid: False: nothing of it counts.
    """

    number: int
    documents: Sequence[Document]
    is_valid: bool

    @property
    def samples(self) -> list[Document]:
        """The documents that are not padding."""
        return [document for document in self.documents if document.key is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens, without those of padding."""
        return sum(document.num_tokens for document in self.samples)


def rows_of_pack(batch: Mapping[str, Any]) -> list[PackedRow]:
    """Return the rows of a batch without padding, with what each document holds.

    Args:
        batch: A batch of a pipeline with ``batching=``, on the host or a device.
    """
    ids = array_of(batch["input_ids"]).reshape(-1)
    labels = array_of(batch["labels"]).reshape(-1) if "labels" in batch else ids
    # [1, T], or [4, 1, T]: those of the text, of time, of height and of width.
    positions = array_of(batch["position_ids"]).reshape(-1, ids.size)[0]
    borders = array_of(batch["cu_seq_lens_q"]).tolist()
    owners = array_of(batch["document_row"]).tolist()
    images = _images_of_documents(batch)
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * (max(owners) + 1)
    documents: list[list[Document]] = [[] for _ in valid]
    for number, (row, key) in enumerate(zip(owners, _keys(batch), strict=True)):
        own = slice(borders[number], borders[number + 1])
        if own.start == own.stop:
            continue  # it only fills cu_seq_lens_q up to a fixed length
        start = documents[row][-1].stop if documents[row] else 0
        stop = start + own.stop - own.start
        tokens = {"input_ids": ids[own], "labels": labels[own]}
        documents[row].append(Document(key, start, stop, tokens, positions[own], images[number]))
    lineage = batch.get("__lineage__")
    return [
        PackedRow(row if lineage is None else lineage.order_row(row), of_row, is_valid)
        for row, (of_row, is_valid) in enumerate(zip(documents, valid, strict=True))
    ]


def _keys(batch: Mapping[str, Any]) -> list[str | None]:
    """Return the key of each document, in a mixture as SOURCE/KEY; None for padding."""
    keys = iter(batch["__key__"])  # of documents without padding
    if "__source__" in batch:
        keys = map("/".join, zip(batch["__source__"], keys, strict=True))
    samples = array_of(batch["document_sample"]).tolist()
    return [None if sample < 0 else next(keys) for sample in samples]


def _images_of_documents(batch: Mapping[str, Any]) -> dict[int, list[Any]]:
    """Return the images of each document by its number."""
    images: dict[int, list[Any]] = defaultdict(list)
    if batch.get("image_document") is not None and batch.get("image") is not None:
        numbers = array_of(batch["image_document"]).tolist()
        for number, image in zip(numbers, batch["image"], strict=False):
            images[number].append(image)
    return images


# -- as text --------------------------------------------------------------------------------------


def row_text(row: PackedRow) -> str:
    """Return what a row holds, in one line."""
    num_padding = sum(document.num_tokens for document in row.documents) - row.num_tokens
    padding = f", {num_padding:,} of padding" if num_padding else ""
    num_images = sum(len(document.images) for document in row.samples)
    return (
        f"row {row.number}: {count_text(len(row.samples), 'document')}, {row.num_tokens:,} tokens"
        f"{padding}, {sum(document.num_label_tokens for document in row.samples):,} learned, "
        f"{count_text(num_images, 'picture')}{'' if row.is_valid else ', not valid'}"
    )


def pack_text(batch: Mapping[str, Any]) -> str:
    """Return the rows of a batch without padding, one line each."""
    rows = rows_of_pack(batch)
    lines = [row_text(row) for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        lines.append(f"... {len(rows) - MAX_ROWS} more rows")
    return "\n".join(lines)


# -- as a page ------------------------------------------------------------------------------------


def pack_html(batch: Mapping[str, Any], tokenizer: Any = None) -> str:
    """Return the rows of a batch without padding as drawings, with a table of their documents.

    Args:
        batch: A batch of a pipeline with ``batching=``, on the host or a device.
        tokenizer: Shows the tokens of each document as text.
    """
    rows = rows_of_pack(batch)
    num_documents = sum(len(row.samples) for row in rows)
    lineage = batch.get("__lineage__")
    drawn = render(
        "pack.html",
        title=f"{count_text(len(rows), 'row')} of {count_text(num_documents, 'document')}",
        note="" if lineage is None else f"epoch {lineage.epoch}, step {lineage.step}",
        rows=[(row_text(row), row.documents) for row in rows[:MAX_ROWS]],
        num_more=len(rows) - MAX_ROWS,
        width=max([row.documents[-1].stop for row in rows if row.documents], default=1),
        max_documents=MAX_DOCUMENTS,
        colours=COLOURS,
        thumbnails=_thumbnails,
        tokenizer=tokenizer,
        token_counts=token_counts,
        token_runs=token_runs,
    )
    return page(drawn)


def _thumbnails(document: Document) -> Markup:
    """Return the first images of a document."""
    images = [thumbnail(image, 56, document.key or "") for image in document.images[:MAX_IMAGES]]
    num_more = len(document.images) - MAX_IMAGES
    return Markup(" ").join(images) + (f" and {num_more} more" if num_more > 0 else "")
