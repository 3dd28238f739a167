"""How batches without padding are drawn: documents, borders, labels, positions, free room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import mmstream as mm
from mmstream.display.packs import pack_html, rows_of_pack
from mmstream.reading.step import BatchLineage
from mmstream.train.tokenizer import byte_tokenizer
from tests.display.test_display import EVIL, parse

IMAGE = 300


def batch(padding: int = 4) -> dict[str, Any]:
    """Two rows of 64 tokens: documents of 20 and 40 tokens with a picture; one of 30."""
    lengths = [20, 40, padding, 30]
    samples = [0, 1, -1, 2]
    ids = torch.arange(sum(lengths)) % 90 + 32
    ids[25:41] = IMAGE  # of the picture: tokens 5 to 20 of the second document
    labels = ids.clone()
    labels[:10] = labels[20:50] = labels[60 : 60 + padding] = -100
    return {
        "input_ids": ids[None],
        "labels": labels[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        "document_row": torch.tensor([0, 0, 0, 1]),
        "document_sample": torch.tensor(samples),
        "image": torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
        "image_document": torch.tensor([1]),
        "image_row": torch.tensor([0]),
        "__key__": ["first", EVIL, "third"],
        "__url__": ["a.tar"] * 3,
        "__valid__": torch.tensor([True, True]),
    }


def test_a_row_has_its_documents_in_their_order_with_borders_labels_and_positions() -> None:
    first, second = rows_of_pack(batch())
    documents = [
        (d.key, d.start, d.stop, d.num_label_tokens, len(d.images)) for d in first.documents
    ]
    assert documents == [("first", 0, 20, 10, 0), (EVIL, 20, 60, 10, 1), (None, 60, 64, 0, 0)]
    assert [d.positions[0] for d in first.documents] == [0, 0, 0]
    assert (first.num_tokens, second.num_tokens) == (60, 30)
    assert [(d.key, d.start, d.stop) for d in second.documents] == [("third", 0, 30)]


def test_positions_of_four_dimensions_are_those_of_the_text() -> None:
    flat = batch()
    flat["position_ids"] = torch.stack([flat["position_ids"]] + [torch.zeros(1, 94).long()] * 3)
    assert rows_of_pack(flat)[0].documents[1].positions.tolist() == list(range(40))


def test_rows_that_were_dealt_to_a_rank_keep_the_numbers_of_the_order() -> None:
    lineage = BatchLineage(0, 3, 6, [], [True, True], [], rows=[0, 0, 1], order_rows=[9, 2])
    dealt = {**batch(), "__lineage__": lineage}
    assert [row.number for row in rows_of_pack(dealt)] == [9, 2]
    plain = {**batch(), "__lineage__": replace(lineage, order_rows=None)}
    assert [row.number for row in rows_of_pack(plain)] == [6, 7]


def test_a_terminal_shows_a_line_for_each_row() -> None:
    assert repr(mm.show(batch())).splitlines() == [
        "row 0: 2 documents, 60 tokens, 4 of padding, 20 learned, 1 picture",
        "row 1: 1 document, 30 tokens, 30 learned, 0 pictures",
    ]


def test_a_page_is_bounded_and_escaped_and_names_the_documents() -> None:
    shown = mm.show(batch(), tokenizer=byte_tokenizer())
    page = parse(shown)
    assert "first" in page.words
    assert "<script>" in page.words  # as text
    assert len(page.images()) == 1
    assert repr(shown).startswith("row 0: 2 documents, 60 tokens, 4 of padding")
    many = batch()
    many |= {
        "cu_seq_lens_q": torch.arange(95).int(),
        "document_row": torch.zeros(94).long(),
        "document_sample": torch.arange(94),
        "__key__": [str(i) for i in range(94)],
        "__valid__": torch.tensor([True]),
    }
    assert "... 34 more documents" in pack_html(many)


def test_documents_that_only_fill_a_fixed_number_are_not_drawn() -> None:
    filled = batch()
    filled["cu_seq_lens_q"] = torch.cat([filled["cu_seq_lens_q"], torch.tensor([94, 94]).int()])
    filled["document_row"] = torch.tensor([0, 0, 0, 1, 1, 1])
    filled["document_sample"] = torch.tensor([0, 1, -1, 2, -1, -1])
    assert [len(row.documents) for row in rows_of_pack(filled)] == [3, 1]
    empty = {**batch(), "__valid__": torch.tensor([True, True, False])}
    assert rows_of_pack(empty)[2].documents == []
    assert "row 2: 0 documents, 0 tokens, 0 learned, 0 pictures, not valid" in repr(mm.show(empty))
