"""Corpora in which some samples are bad, each in a way of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

import mmstream as mm
from mmstream.dataset.index import decode_index
from tests.helpers.corpora import captioned, write_corpus


def truncated_jpeg(number: int) -> dict[str, bytes]:
    good = captioned(number)
    return good | {"jpg": good["jpg"][: len(good["jpg"]) * 2 // 3]}


def empty_jpeg(number: int) -> dict[str, bytes]:
    return captioned(number) | {"jpg": b""}


def html(number: int) -> dict[str, bytes]:
    return captioned(number) | {"jpg": b"<!DOCTYPE html><html>404 Not Found</html>" * 20}


def bad_json(number: int) -> dict[str, bytes]:
    return captioned(number) | {"json": b'{"id": '}


def latin_text(number: int) -> dict[str, bytes]:
    return captioned(number) | {"txt": "café au lait".encode("latin-1")}


def empty_text(number: int) -> dict[str, bytes]:
    return captioned(number) | {"txt": b""}


def field_twice(number: int) -> dict[str, bytes]:
    return captioned(number) | {"JPG": b"again"}


def reserved_field(number: int) -> dict[str, bytes]:
    return captioned(number) | {"__source__": b"a stranger's", "__VALID__": b"1"}


def refused_field(number: int) -> dict[str, bytes]:
    """Say that a bake refused the sample, in a dataset that was never baked."""
    return captioned(number) | {"__refused__": b'{"kind": "SkipSample", "reason": "mine"}'}


FAULTS: dict[str, Callable[[int], dict[str, bytes]]] = {
    fault.__name__: fault
    for fault in (
        truncated_jpeg,
        empty_jpeg,
        html,
        bad_json,
        latin_text,
        empty_text,
        field_twice,
        reserved_field,
        refused_field,
    )
}
"""`empty_text` is bad only for a tokenizer that adds no tokens of its own."""

FAULTS_OF_TARS = {"field_twice", "reserved_field", "refused_field"}
"""The faults that are a SampleError; the others are a DecodeError."""


def write_faulty(
    folder: str | Path,
    counts: Sequence[int],
    bad: Collection[int],
    fault: Callable[[int], dict[str, bytes]] = bad_json,
) -> str:
    """Write a corpus whose samples of these numbers have a fault."""
    return write_corpus(folder, counts, lambda n: fault(n) if n in bad else captioned(n))


def write_tiny(folder: str | Path, counts: Sequence[int], bad: Collection[int] = ()) -> str:
    """Write a corpus of a few bytes a sample; broken JSON where it is bad."""
    return write_corpus(folder, counts, lambda n: {"json": b"{" if n in bad else b"%d" % n})


def offsets(folder: str | Path, shard: int) -> np.ndarray:
    name = f"shard-{shard:06d}.tar.idx"
    return decode_index(Path(folder, name).read_bytes(), name)


def patch(folder: str | Path, shard: int, position: int, data: bytes) -> None:
    """Overwrite bytes of a shard."""
    with Path(folder, f"shard-{shard:06d}.tar").open("r+b") as file:
        file.seek(position)
        file.write(data)


def make_pipeline(corpus: str, **settings: object) -> mm.Pipeline:
    """A pipeline that bears any number of bad samples and writes none of them down."""
    settings = {
        "global_batch_size": 12,
        "seed": 3,
        "window": 24,
        "bad_samples": policy(),
        **settings,
    }
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def policy(**limits: object) -> mm.BadSamplePolicy:
    limits = {"max_fraction": 1.0, "max_consecutive": 0, "quarantine": None, **limits}
    return mm.BadSamplePolicy(**limits)
