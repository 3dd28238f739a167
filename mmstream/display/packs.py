"""Batches without padding, for people: the documents of each row, one behind the other.

    notebook.py -> packs.py -> markup.py

A row is drawn as a bar of documents. Below it are its labels, its media and its positions, at the
same scale. Attention ends where a document ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.display.markup import QUIET, Pixels, count_text, html_text, page, picture, png, table
from mmstream.display.tokens import MIN_REPEATS, tokens_html
from mmstream.errors import escaped
from mmstream.types import IGNORED_LABEL, IntArray

MAX_ROWS = 8
"""Rows of a batch that are drawn."""
MAX_DOCUMENTS = 60
"""Documents of a row that are listed."""
MAX_PICTURES = 4
"""Pictures of a document that are shown."""
NUM_COLUMNS = 960
"""Width of a drawing in pixels."""

COLOURS = ((70, 130, 220), (240, 150, 50), (60, 170, 110), (190, 90, 190), (200, 80, 80))
"""Documents of a drawing, by turns."""
LEARNED = (0, 160, 80, 255)
MASKED = (128, 128, 128, 70)
MEDIA = (40, 90, 200, 255)
POSITION = (128, 128, 128, 255)
PADDING = (128, 128, 128, 140)
HATCHED = "repeating-linear-gradient(45deg,rgba(128,128,128,.35) 0 4px,transparent 4px 8px)"


@dataclass(frozen=True)
class Document:
    """A document of a row.

    Attributes:
        number: Among all documents of the batch, those of padding included.
        key: Of its sample. None: it is padding.
        start: Its first token in the row.
        ids: int64 [L].
        labels: int64 [L].
        positions: int64 [L], those of the text.
        pictures: Its pictures, and frames of its videos are none.
    """

    number: int
    key: str | None
    start: int
    ids: IntArray = field(repr=False)
    labels: IntArray = field(repr=False)
    positions: IntArray = field(repr=False)
    pictures: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.ids)

    @property
    def num_label_tokens(self) -> int:
        """Tokens that the model learns."""
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def stop(self) -> int:
        """The token behind its last one, in the row."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class PackedRow:
    """A row of a batch.

    Attributes:
        number: Of the row in the global batch.
        documents: In their order, those of padding included.
        is_valid: False: nothing of it counts.
        width: Tokens from one end of a drawing to the other, the same for all rows.
    """

    number: int
    documents: tuple[Document, ...]
    is_valid: bool
    width: int

    @property
    def num_tokens(self) -> int:
        """Tokens, without those of padding."""
        return sum(document.num_tokens for document in self.documents if document.key is not None)


def rows_of_pack(batch: Mapping[str, Any]) -> list[PackedRow]:
    """Return the rows of a batch without padding, with what each document holds.

    Args:
        batch: A batch of a pipeline with ``batching=``, on the host or a device.
    """
    ids = _array(batch["input_ids"]).reshape(-1)
    labels = _array(batch["labels"]).reshape(-1) if "labels" in batch else ids
    # [1, T], or [4, 1, T]: those of the text, of time, of height and of width.
    positions = _array(batch["position_ids"]).reshape(-1, ids.size)[0]
    borders = _array(batch["cu_seq_lens_q"]).tolist()
    owners = _array(batch["document_row"]).tolist()
    pictures = _pictures_of_documents(batch)
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * (max(owners) + 1)
    documents: list[list[Document]] = [[] for _ in valid]
    for number, (row, key) in enumerate(zip(owners, _keys(batch), strict=True)):
        tokens = slice(borders[number], borders[number + 1])
        if tokens.start == tokens.stop:
            continue  # it only fills cu_seq_lens_q up to a fixed length
        start = documents[row][-1].stop if documents[row] else 0
        content = ids[tokens], labels[tokens], positions[tokens]
        documents[row].append(
            Document(number, key, start, *content, tuple(pictures.get(number, ())))
        )
    numbers = _row_numbers(batch, len(valid))
    width = max([row[-1].stop for row in documents if row], default=1)
    return [
        PackedRow(number, tuple(row), is_valid, width)
        for number, row, is_valid in zip(numbers, documents, valid, strict=True)
    ]


def _array(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _keys(batch: Mapping[str, Any]) -> list[str | None]:
    """Return the key of each document, in a mixture as SOURCE/KEY; None for padding."""
    keys = iter(batch["__key__"])  # of documents without padding
    if "__source__" in batch:
        keys = map("/".join, zip(batch["__source__"], keys, strict=True))
    samples = _array(batch["document_sample"]).tolist()
    return [None if sample < 0 else next(keys) for sample in samples]


def _pictures_of_documents(batch: Mapping[str, Any]) -> dict[int, list[Any]]:
    """Return the pictures of each document that has some, by its number."""
    numbers = batch.get("image_document")
    images = batch.get("image")
    pictures: dict[int, list[Any]] = {}
    if numbers is not None and images is not None:
        for number, image in zip(_array(numbers).tolist(), images, strict=False):
            pictures.setdefault(number, []).append(image)
    return pictures


def _row_numbers(batch: Mapping[str, Any], num_rows: int) -> list[int]:
    """Return the number of each row in the global batch."""
    lineage = batch.get("__lineage__")
    return [row if lineage is None else lineage.order_row(row) for row in range(num_rows)]


# -- as text --------------------------------------------------------------------------------------


def row_text(row: PackedRow) -> str:
    """Return what a row holds, in one line."""
    documents = [document for document in row.documents if document.key is not None]
    num_padding = sum(document.num_tokens for document in row.documents) - row.num_tokens
    padding = f", {num_padding:,} of padding" if num_padding else ""
    num_pictures = sum(len(document.pictures) for document in documents)
    num_documents = count_text(len(documents), "document")
    return (
        f"row {row.number}: {num_documents}, {row.num_tokens:,} tokens"
        f"{padding}, {sum(document.num_label_tokens for document in documents):,} learned, "
        f"{count_text(num_pictures, 'picture')}{'' if row.is_valid else ', not valid'}"
    )


def document_text(document: Document) -> str:
    """Return what a document holds, in one line."""
    key = "padding" if document.key is None else escaped(document.key, 60)
    positions = "no positions"
    if document.num_tokens:
        positions = f"positions {document.positions[0]}-{document.positions[-1]}"
    pictures = f", {count_text(len(document.pictures), 'picture')}" if document.pictures else ""
    return (
        f"{document.start}-{document.stop - 1} {key}: {document.num_tokens:,} tokens, "
        f"{document.num_label_tokens:,} learned{pictures}, {positions}"
    )


def pack_text(batch: Mapping[str, Any]) -> str:
    """Return the rows of a batch without padding, one line each."""
    rows = rows_of_pack(batch)
    lines = [row_text(row) for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        lines.append(f"... {len(rows) - MAX_ROWS} more rows")
    return "\n".join(lines)


def _sample_of(document: Document) -> dict[str, Any]:
    """Return the fields that show tokens as text."""
    return {"input_ids": document.ids, "labels": document.labels}


# -- as a page ------------------------------------------------------------------------------------


def pack_html(batch: Mapping[str, Any], tokenizer: Any = None) -> str:
    """Return the rows of a batch without padding as drawings, with a table of their documents.

    Args:
        batch: A batch of a pipeline with ``batching=``, on the host or a device.
        tokenizer: Shows the tokens of each document as text.
    """
    rows = rows_of_pack(batch)
    num_documents = sum(document.key is not None for row in rows for document in row.documents)
    lineage = batch.get("__lineage__")
    position = f"epoch {lineage.epoch}, step {lineage.step}" if lineage is not None else ""
    head = (
        f"<b>{count_text(len(rows), 'row')} of {count_text(num_documents, 'document')}</b> "
        f'<span style="{QUIET}">{position}</span>{_legend()}'
    )
    parts = [_row_html(row, tokenizer) for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        parts.append(f'<div style="{QUIET}">... {len(rows) - MAX_ROWS} more rows</div>')
    return page(head, *parts)


def _legend() -> str:
    named = {"learned": LEARNED, "masked": MASKED, "media": MEDIA}
    chips = "".join(f"{_chip(colour)} {name} &nbsp; " for name, colour in named.items())
    return (
        f'<div style="{QUIET};font-size:11px">From top to bottom: documents (attention ends at '
        f"their borders), tokens ({chips}), positions, which begin at 0 in each document. Hatched "
        "is padding. What is empty is room that is left.</div>"
    )


def _chip(colour: tuple[int, ...]) -> str:
    return (
        '<span style="display:inline-block;width:10px;height:10px;border-radius:2px;'
        f'background:{_css(colour)}"></span>'
    )


def _css(colour: tuple[int, ...]) -> str:
    *channels, alpha = colour if len(colour) == 4 else (*colour, 255)
    return f"rgba({','.join(map(str, channels))},{alpha / 255:.2f})"


def _row_html(row: PackedRow, tokenizer: Any) -> str:
    style = "border-top:1px solid rgba(128,128,128,.35);padding:10px 0"
    listed = row.documents[:MAX_DOCUMENTS]
    num_more = len(row.documents) - len(listed)
    more = f'<div style="{QUIET}">... {num_more} more documents</div>' if num_more else ""
    tokens = ""
    if tokenizer is not None:
        tokens = "".join(
            f"<div><b>{html_text(document.key, 60)}</b></div>"
            f"{tokens_html(tokenizer, _sample_of(document))}"
            for document in listed
            if document.key is not None
        )
    return (
        f'<div style="{style}"><div>{html_text(row_text(row), 300)}</div>'
        f'<div style="overflow-x:auto">{_segments(row)}{_strip(_token_kinds(row), "tokens")}'
        f"{_strip(_sawtooth(row), 'positions')}</div>"
        f"{_document_table(listed)}{more}{tokens}</div>"
    )


def _segments(row: PackedRow) -> str:
    """Return the bar of documents: each as wide as its share of the tokens."""
    segments = []
    for number, document in enumerate(row.documents):
        share = 100 * document.num_tokens / row.width
        is_padding = document.key is None
        background = HATCHED if is_padding else _css((*COLOURS[number % len(COLOURS)], 90))
        name = html_text(document.key, 40) if share > 6 and not is_padding else ""
        title = html_text(document_text(document), 300)
        segments.append(
            f'<div title="{title}" style="width:{share:.4f}%;background:{background};'
            "box-sizing:border-box;border-right:1px solid;overflow:hidden;white-space:nowrap;"
            f'font-size:11px;padding:2px 0">{name or "&nbsp;"}</div>'
        )
    style = f"display:flex;width:{NUM_COLUMNS}px;margin-top:4px;outline:1px dashed"
    return f'<div style="{style} rgba(128,128,128,.5)">{"".join(segments)}</div>'


def _strip(pixels: Pixels, label: str) -> str:
    return f'<div style="width:{NUM_COLUMNS}px;line-height:0">{png(pixels, label)}</div>'


def _columns(row: PackedRow) -> IntArray:
    """Return where the first token of each column of a drawing is; one more for the end."""
    return np.arange(NUM_COLUMNS + 1) * row.width // NUM_COLUMNS


def _token_kinds(row: PackedRow) -> Pixels:
    """Return a strip with the kind of the tokens of each column, uint8 [12, NUM_COLUMNS, 4].

    A column of several tokens has the colour of the rarest kind that it holds: learned tokens go
    before those of media, and these before masked ones. So no learned token is hidden.
    """
    colours = np.zeros((row.width, 4), np.uint8)
    ranks = np.zeros(row.width, np.int8)
    for document in row.documents:
        own = slice(document.start, document.stop)
        is_learned = document.labels != IGNORED_LABEL
        ranks[own] = np.where(is_learned, 3, np.where(_is_repeated(document.ids), 2, 1))
        if document.key is None:
            ranks[own] = -1
    for rank, colour in ((3, LEARNED), (2, MEDIA), (1, MASKED), (-1, PADDING)):
        colours[ranks == rank] = colour
    starts = _columns(row)
    highest = [
        start + int(ranks[start : max(stop, start + 1)].argmax())
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    return np.repeat(colours[highest][None], 12, axis=0)


def _is_repeated(ids: IntArray) -> npt.NDArray[np.bool_]:
    """Tell which tokens are of a run of equal ones, as those of a picture are."""
    lengths = [len(list(run)) for _, run in groupby(ids.tolist())]
    return np.repeat(np.array(lengths) >= MIN_REPEATS, lengths)


def _sawtooth(row: PackedRow) -> Pixels:
    """Return the positions as a curve that falls to 0 at each border, uint8 [H, W, 4]."""
    height = 32
    drawing = np.zeros((height + 1, NUM_COLUMNS, 4), np.uint8)
    positions = np.full(row.width, -1)
    for document in row.documents:
        positions[document.start : document.stop] = document.positions
    highest = max(1, int(positions.max()))
    # Rows of a picture count downwards: position 0 is in the last of them.
    levels = height - positions[_columns(row)[:-1]] * height // highest
    for column, level in enumerate(levels.tolist()):
        if level <= height:
            drawing[level:, column] = (*POSITION[:3], 70)
            drawing[level, column] = POSITION
    return drawing


def _document_table(documents: Sequence[Document]) -> str:
    rows = []
    for number, document in enumerate(documents):
        if document.key is None:
            continue
        shown = islice(document.pictures, MAX_PICTURES)
        pictures = " ".join(picture(image, 56, document.key) for image in shown)
        num_more = len(document.pictures) - MAX_PICTURES
        rows.append(
            (
                _chip(COLOURS[number % len(COLOURS)]),
                html_text(document.key, 60),
                f"{document.start:,}",
                f"{document.num_tokens:,}",
                f"{document.num_label_tokens:,}",
                f"{document.positions[0]}-{document.positions[-1]}",
                pictures + (f" and {num_more} more" if num_more > 0 else ""),
            )
        )
    return table(rows, ("", "key", "first token", "tokens", "learned", "positions", "pictures"))
