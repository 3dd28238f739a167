"""Readers of Hugging Face take the tars of a dataset's folder for its data, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.files import README_NAME
from mmstream.train.tokenizer import byte_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"text": f"text {n}"} for n in range(5)]
    mm.convert(rows, tmp_path / "corpus", samples_per_shard=2, progress=False)
    return tmp_path / "corpus"


@pytest.mark.parametrize("kind", ["converted", "baked"])
def test_load_dataset_reads_the_samples_of_a_folder(corpus, tmp_path, monkeypatch, kind):
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    if kind == "baked":
        decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=8))
        pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=2, decode=decode)
        mm.bake(pipeline, tmp_path / "baked", progress=False)
        corpus = tmp_path / "baked"
    loaded = datasets.load_dataset(str(corpus), split="train", streaming=True)
    assert [row["__key__"] for row in loaded] == [s["__key__"] for s in mm.open_dataset(corpus)]


def test_a_readme_that_is_there_stays(corpus, tmp_path):
    written = (corpus / README_NAME).read_text()
    (corpus / README_NAME).write_text("mine")
    rows = [{"text": "a"}]
    mm.convert(rows, corpus, rerun=mm.Rerun(overwrite=True), progress=False)
    assert (corpus / README_NAME).read_text() == "mine"
    mm.convert(rows, tmp_path / "new", progress=False)
    assert (tmp_path / "new" / README_NAME).read_text() == written
    assert mm.convert(tmp_path / "new", tmp_path / "again", progress=False).num_samples == 1
