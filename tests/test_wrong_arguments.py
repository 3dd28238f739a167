"""Wrong arguments are a ConfigError of one line that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from tests.helpers.corpora import write_corpus


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("arguments")
    write_corpus(folder, [4])
    return mm.open_dataset(folder)


def pipeline(dataset: mm.Dataset, **settings: Any) -> mm.Pipeline:
    return mm.Pipeline(dataset, **{"global_batch_size": 2, **settings})


def to_device(dataset: mm.Dataset, *arguments: Any, **settings: Any) -> object:
    return mm.to_device(mm.Loader(pipeline(dataset)), *arguments, **settings)


CALLS: dict[str, Callable[[Any], object]] = {
    "source=3: pass a folder, a URL": lambda _: mm.open_dataset(3),  # type: ignore[arg-type]
    r"source=\[None\]: pass a folder, a URL": lambda _: mm.open_dataset([None]),  # type: ignore[list-item]
    "source=<Dataset .*>: pass a folder": lambda dataset: mm.open_dataset(dataset),
    "no-such-store://: .*; give a local folder, or a URL of s3": lambda _: mm.open_dataset(
        "no-such-store://a/b"
    ),
    r"dataset='corpus/': give mm.open_dataset\(...\)": lambda _: mm.statistics("corpus/"),  # type: ignore[arg-type]
    "bad_samples='mask': pass mm.BadSamplePolicy": lambda dataset: pipeline(
        dataset, bad_samples="mask"
    ),
    "Pipeline has no batch_size=: write global_batch_size=": lambda dataset: pipeline(
        dataset, batch_size=2
    ),
    "ImageDecoder has no device=: the CPU decodes; leave it out, and": lambda _: mm.ImageDecoder(
        device="cuda"  # type: ignore[call-arg]
    ),
    "VideoDecoder has no device=: the CPU decodes; leave it out, and": lambda _: mm.VideoDecoder(
        device="cuda"  # type: ignore[call-arg]
    ),
    "to_device has no decode_jpegs=: the loader's workers decode": lambda dataset: to_device(
        dataset,
        "cpu",
        decode_jpegs=len,  # type: ignore[call-arg]
    ),
    "to_device has no decode_clip=: the loader's workers decode": lambda dataset: to_device(
        dataset,
        "cpu",
        decode_clip=len,  # type: ignore[call-arg]
    ),
    "Decode has no images=: write image=mm.ImageDecoder": lambda _: mm.Decode(images=224),  # type: ignore[call-arg]
    r"convert has no format=: write reading=mm.RowReading\(format=": lambda _: mm.convert(
        "rows.jsonl",
        "corpus/",
        format="llava",  # type: ignore[call-arg]
    ),
    r"convert has no check=: write rerun=mm.Rerun\(check=": lambda _: mm.convert(
        "rows.jsonl",
        "corpus/",
        check=True,  # type: ignore[call-arg]
    ),
    r"reading='llava': pass mm.RowReading": lambda _: mm.convert(
        "rows.jsonl",
        "corpus/",
        reading="llava",  # type: ignore[arg-type]
    ),
    "tokenizer: str is not a fast tokenizer .*; pass what AutoTokenizer": lambda _: mm.TextDecoder(
        "gpt2"
    ),
    "device='gpu': give": lambda dataset: to_device(dataset, "gpu"),
    "dtype='bf16': give a floating type, such as torch.bfloat16": lambda dataset: to_device(
        dataset, "cpu", dtype="bf16"
    ),
    "dtype=torch.int8: give a floating type, such as torch.bfloat16": lambda dataset: to_device(
        dataset, "cpu", dtype=torch.int8
    ),
    "num_workers='2': give a whole number from 0 up": lambda dataset: mm.Loader(
        pipeline(dataset),
        num_workers="2",  # type: ignore[arg-type]
    ),
    "num_samples='2': give a whole number from 0 up": lambda dataset: pipeline(dataset).take("2"),  # type: ignore[arg-type]
    "rank='0': give a whole number from 0 up": lambda _: mm.World("0", 2),  # type: ignore[arg-type]
    "samples_per_shard='9': give a whole number from 1 up": lambda _: mm.convert(
        [],
        "corpus/",
        samples_per_shard="9",  # type: ignore[arg-type]
    ),
    "max_fraction='1%': give a number from 0 to 1": lambda _: mm.BadSamplePolicy(
        max_fraction="1%"  # type: ignore[arg-type]
    ),
    "global_batch_size=True: give a whole number from 1 up": lambda dataset: pipeline(
        dataset, global_batch_size=True
    ),
    "num_workers=True: give a whole number from 0 up": lambda dataset: mm.Loader(
        pipeline(dataset), num_workers=True
    ),
    r"grid=\(True, 1\): give \(a whole number from 1 up, a whole": lambda dataset: pipeline(
        dataset, grid=(True, 1)
    ),
    "splits={'train': True}: give {name: fraction}": lambda _: mm.Splitting({"train": True}),
    "splits={'val': '0.1'}: give {name: fraction}": lambda _: mm.Splitting(
        {"val": "0.1"}  # type: ignore[dict-item]
    ),
    "flip=True: give a probability, such as flip=0.5": lambda _: mm.ImageDecoder(
        size=32, flip=True
    ),
    'scale=.*: goes with crop="random" only': lambda _: mm.ImageDecoder(size=32, scale=(0.5, 1.0)),
    "collate=None: pass a function": lambda dataset: pipeline(dataset, collate=None),
    "shuffle='no': give True or False": lambda dataset: pipeline(dataset, shuffle="no"),
    r"Decode\(image=\): got .*: write image=mm.ImageDecoder\(size=224": lambda _: mm.Decode(
        image=mm.ImageDecoder  # type: ignore[arg-type]
    ),
    r"normalize=\(0.5, 0.5\): pass mm.Normalize": lambda dataset: to_device(
        dataset, "cpu", normalize=(0.5, 0.5)
    ),
    r"row='f': give a function": lambda _: mm.convert(
        [],
        "corpus/",
        row="f",  # type: ignore[arg-type]
    ),
    "sample_rng: the sample has no __lineage__": lambda _: mm.sample_rng({}),
    "mark_delivered: the batch has no __lineage__": lambda dataset: mm.Loader(
        pipeline(dataset)
    ).mark_delivered({}),
    ": is a file, not a folder; name another": lambda dataset: mm.bake(
        pipeline(dataset, transforms=(dict,)), __file__
    ),
}
"""Part of the message -> a call."""


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_argument_is_one_line_that_says_what_to_write(message, dataset):
    with pytest.raises(mm.ConfigError, match=message) as caught:
        CALLS[message](dataset)
    assert "\n" not in str(caught.value)


def test_the_manifest_in_place_of_its_folder_is_named(dataset, tmp_path):
    manifest = Path(tmp_path, "mmstream.json")
    manifest.write_text("{}")
    with pytest.raises(mm.ManifestError, match=f"the manifest of a dataset: .* {tmp_path}$"):
        mm.open_dataset(manifest)


def test_python_can_suggest_the_name_that_was_meant():
    with pytest.raises(AttributeError) as caught:
        mm.ImageDecode  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("ImageDecode", mm)
