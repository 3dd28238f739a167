"""Small corpora of texts whose tokens are their bytes, and the plans of their packs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mmstream as mm
from mmstream.packing.plan import PackLimits, PackPlan
from mmstream.packing.planner import Measure, make_plan
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus

MAX_TOKENS = 64


def length_of(number: int) -> int:
    """Bytes of a sample's text: from 4 to 40."""
    return 4 + number * 17 % 37


def text_of(number: int) -> str:
    """The text of a sample: its number, and as many letters as are missing."""
    return f"{number:04d}".ljust(length_of(number), "x")


def fields_of(number: int) -> dict[str, bytes]:
    """The fields of a sample."""
    return {"txt": text_of(number).encode()}


def write_texts(folder: str | Path, counts: Sequence[int], **options: Any) -> str:
    """Write a dataset of texts; return its folder."""
    return write_corpus(folder, counts, options.pop("fields_of", fields_of), **options)


def plan_texts(
    dataset: mm.Dataset, max_tokens: int = MAX_TOKENS, previous: PackPlan | None = None
) -> PackPlan:
    """Plan the packs of such a dataset, in memory. Two tokens more begin and end a text."""
    lengths = np.array([length_of(number) + 2 for number in range(len(dataset))])
    columns = {"num_tokens": lengths, "num_label_tokens": lengths - 1}
    measure = Measure(tuple(dataset.manifest.shards), columns)
    return make_plan(measure, PackLimits(max_tokens), previous=previous)


def pack_pipeline(folder: str | Path, rows: int = 4, **options: Any) -> mm.Pipeline:
    """A pipeline over the packs of such a dataset."""
    dataset = mm.open_dataset(str(folder))
    plan = options.pop("plan", None) or plan_texts(dataset)
    text = mm.TextDecoder(byte_tokenizer(), max_length=options.pop("max_length", 10 * MAX_TOKENS))
    return mm.Pipeline(
        dataset,
        global_batch_size=rows,
        decode=mm.Decode(text=text),
        batching=mm.Pack(plan.settings.max_tokens, plan=plan),
        **options,
    )
