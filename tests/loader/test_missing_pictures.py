"""Samples without a picture among others: said once, and never of conversations."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import jpeg, write_corpus

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TEXT = {"txt": b"a caption"}
CHAT = {"json": json.dumps({"messages": TURNS}).encode()}
PICTURE = {"jpg": jpeg(0)}


@pytest.mark.parametrize(
    ("samples", "num_workers", "is_said"),
    [
        ([TEXT, {**TEXT, **PICTURE}], 0, True),
        ([TEXT, {**TEXT, **PICTURE}], 2, True),
        ([{**TEXT, **PICTURE}, {**TEXT, **PICTURE}], 0, False),
        ([TEXT, TEXT], 0, False),
        ([CHAT, {**TEXT, **PICTURE}], 0, False),
    ],
)
def test_a_sample_without_a_picture_is_named_once(
    samples: list[dict[str, Any]],
    num_workers: int,
    is_said: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_corpus(tmp_path, [8], lambda number: samples[number % 2])
    decode = mm.Decode(
        image=mm.ImageDecoder(size=8), text=mm.TextDecoder(byte_tokenizer(chat=True))
    )
    dataset = mm.open_dataset(tmp_path)
    pipeline = mm.Pipeline(dataset, global_batch_size=4, decode=decode, shuffle=False)
    loader = mm.Loader(pipeline, num_workers=num_workers)
    with caplog.at_level(logging.WARNING), closing(loader):
        for _ in range(2):
            assert len(list(loader)) == 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == is_said
    if is_said:
        assert messages[0].startswith("shard-000000.tar[0] ")
        assert "no picture, and other rows have one: pair texts and pictures" in messages[0]
