"""The tables of docs/batches.md are what real batches contain, and the other way round."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.converting.sidecar import write_sidecars
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.media_files import audio_file, video_file
from tests.helpers.paths import DOCS
from tests.helpers.pictures import encoded

PAGE = (DOCS / "batches.md").read_text()
NUM_ROWS = 4


@dataclass(frozen=True)
class Row:
    """A row of the table: a field of a batch."""

    name: str
    types: str
    shape: str


def rows_of(title: str, name: int, kind: int, shape: int) -> list[Row]:
    """Return the rows of the table below a heading; the numbers are columns."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (`.+) \|$", section, re.M)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [
        Row(
            line[name].strip("`| ").partition("`")[0],
            *(line[c].strip("`| ") for c in (kind, shape)),
        )
        for line in cells
    ]


OURS = rows_of("Fields of mmstream", 0, 1, 2)
FILES = rows_of("Fields of your files", 0, 2, 3)
FLAT = rows_of("Batches without padding", 0, 1, 2)


def png(height, width, mode="RGB"):
    return encoded(Image.new(mode, (width, height), 1), "png")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder, array = tmp_path_factory.mktemp("batches"), io.BytesIO()
    np.save(array, np.zeros((2, 5), np.float32))
    single = [
        {
            "jpg": png(40, 50), "mask.png": png(40, 50, "L"), "txt": b"hello", "cls": b"3",
            "score": b"0.5", "npy": array.getvalue(),
            "json": json.dumps({"boxes": [[1, 2, 3, 4]] * (1 + i % 2)}).encode(),
        }
        for i in range(NUM_ROWS)
    ]  # fmt: skip
    several = [{f"{j}.jpg": png(40, 50 + j) for j in range(1 + i % 3)} for i in range(NUM_ROWS)]
    media = [
        {f"{j}.mp4": video_file("mp4", audio_codec="aac") for j in range(i % 2)}
        | {"wav": audio_file("wav", seconds=0.25)}
        for i in range(NUM_ROWS)
    ]
    sounds = [{"wav": sample["wav"]} for sample in media]
    plain = [{"jpg": sample["jpg"], "txt": b"hello"} for sample in single]
    corpora = {"single": single, "several": several, "plain": plain, "media": media}
    return {
        name: mm.open_dataset(write_corpus(folder / name, [NUM_ROWS], samples.__getitem__))
        for name, samples in {**corpora, "sounds": sounds}.items()
    }


def two_events(sample):
    return [[0.1, 0.2], [0.1, 0.3]]


def batch_of(dataset, decode=None, **given):
    pipeline = mm.Pipeline(dataset, global_batch_size=NUM_ROWS, decode=decode, **given)
    return next(iter(mm.Loader(pipeline)))


@pytest.fixture(scope="module")
def batches(datasets):
    tokenizer = byte_tokenizer()
    by_field = {
        "jpg": mm.ImageDecoder(size=32), "mask.png": mm.ImageDecoder(mask=True), "cls": int,
        "score": float, "npy": ..., "boxes": mm.Boxes("json.boxes", format="xywh"),
    }  # fmt: skip
    tiles = mm.ImageDecoder(size=32, tiles=mm.families.internvl.InternVLTiles(max_tiles=4))
    sound = mm.AudioDecoder()
    with_sound = mm.VideoDecoder(size=32, audio=sound)
    write_sidecars(datasets["plain"])
    stereo = mm.AudioDecoder(channels=2, dtype="int16")
    features = mm.families.whisper.WhisperFeatures(padding="longest")
    mixture = mm.Mixture({"a": (datasets["plain"], 1)}, epoch_steps=1)
    return [
        batch_of(datasets["single"]),
        batch_of(
            datasets["single"],
            mm.Decode(
                by_field,
                text=mm.TextDecoder(tokenizer),
                same_geometry=("jpg", "mask.png", "boxes"),
            ),
        ),
        batch_of(
            datasets["plain"],
            mm.Decode(image=mm.ImageDecoder(size=32), text=mm.TextDecoder(tokenizer)),
        ),
        batch_of(datasets["several"], mm.Decode(image=mm.ImageDecoder(size=32))),
        batch_of(datasets["several"], mm.Decode(image=mm.ImageDecoder())),
        batch_of(datasets["several"], mm.Decode(image=tiles)),
        batch_of(
            datasets["plain"],
            mm.Decode(image=mm.ImageDecoder(size="bucket")),
            batching=mm.Buckets("aspect", edges=[(32, 32), (32, 40)]),
        ),
        batch_of(mixture),
        batch_of(datasets["plain"], repeat=2),
        batch_of(datasets["media"], mm.Decode(video=with_sound, audio=sound)),
        batch_of(datasets["media"], mm.Decode(video=mm.VideoDecoder(), audio=stereo)),
        batch_of(
            datasets["sounds"],
            mm.Decode(
                {"events": mm.Times(two_events, follows="audio")},
                audio=mm.AudioDecoder(features=features),
            ),
        ),
    ]


def is_row(row: Row, value: Any, numbers: dict[str, int]) -> bool:
    """Tell whether the value of a field is what a row of a table says."""
    sizes = {"B": NUM_ROWS, "3": 3, "2": 2, "4": 4, **numbers}
    count, _, entry_shape = row.shape.partition(" of ")
    if isinstance(value, torch.Tensor):
        if str(value.dtype).removeprefix("torch.") not in row.types.split(", ")[0] and (
            row.types != "the array's"
        ):
            return False
        shape = entry_shape.replace("`", "").replace("[", f"[{count}, ") if entry_shape else count
        names = shape.strip("[]`").split(", ")
        if names[-1] == "...":
            names[-1:] = ["any"] * (value.ndim - len(names) + 1)
        is_tensor = not row.types.startswith("list")
        return is_tensor and len(names) == value.ndim and all(
            sizes.get(name, size) == size for name, size in zip(names, value.shape)
        )  # fmt: skip
    if not isinstance(value, list):
        return type(value).__name__ == row.types
    kind = row.types.rpartition("list of ")[2]
    kinds = {
        str(entry.dtype).removeprefix("torch.")
        if isinstance(entry, torch.Tensor)
        else type(entry).__name__
        for entry in value
    }
    return "list of" in row.types and kinds == {kind} and len(value) == sizes[count.strip("[]")]


def rows_for(batch, name):
    fields = {"N": "image", "V": "video_row", "F": "video_pts_s", "A": "audio_row"}
    numbers = {letter: len(batch[field]) for letter, field in fields.items() if field in batch}
    if "input_ids" in batch:
        numbers["T"] = batch["input_ids"].shape[1]
    return [
        row for row in (*OURS, *FILES) if row.name == name and is_row(row, batch[name], numbers)
    ]


def test_every_field_of_real_batches_is_in_the_tables(batches):
    unknown = {
        name
        for batch in batches
        for name, value in batch.items()
        if not rows_for(batch, name) and not isinstance(value[0], bytes)
    }
    assert unknown == set()


def test_every_row_of_the_tables_is_a_field_of_a_real_batch(batches):
    known = {row for batch in batches for name in batch for row in rows_for(batch, name)}
    assert [row for row in (*OURS, *FILES) if row not in known] == []
    assert len(OURS) == 31
    assert len(FILES) == 13


def test_a_row_says_type_and_shape():
    row = Row("labels", "int64", "[B, T]")
    assert is_row(row, torch.zeros(NUM_ROWS, 7, dtype=torch.int64), {"T": 7})
    assert not is_row(row, torch.zeros(NUM_ROWS, 6, dtype=torch.int64), {"T": 7})
    assert not is_row(row, torch.zeros(NUM_ROWS, 7), {"T": 7})
    assert not is_row(row, [0] * NUM_ROWS, {"T": 7})


def test_the_table_of_batches_without_padding(datasets):
    decode = mm.Decode(image=mm.ImageDecoder(size=32), text=mm.TextDecoder(byte_tokenizer()))
    pipeline = mm.Pipeline(
        datasets["plain"], global_batch_size=NUM_ROWS, decode=decode, batching=mm.Flat()
    )
    batch = next(iter(mm.Loader(pipeline)))
    numbers = {
        "1": 1,
        "T": batch["num_tokens"],
        "N": NUM_ROWS,
        "D": NUM_ROWS,
        "D + 1": NUM_ROWS + 1,
        "E": NUM_ROWS,
    }
    named = {
        row.name for row in FLAT if row.name in batch and is_row(row, batch[row.name], numbers)
    }
    without = {"label_weights"}  # no message of these has a weight
    assert {row.name for row in FLAT} - named == without
    described = {"cu_seq_lens_k", "max_length_k", "__url__", "image", "txt", "__lineage__"}
    assert batch.keys() - named - described == set()
