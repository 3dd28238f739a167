"""A pipeline that decodes other things and leaves videos as bytes is told so, once."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_media import FakeAudioDecoder, FakeVideoDecoder, fake_file


def same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"decode": mm.Decode({"txt": str})}, "4 mp4, 4 wav"),
        ({"decode": mm.Decode({"txt": str}, video=FakeVideoDecoder())}, "4 wav"),
        ({"decode": mm.Decode({"mp4": len}, audio=FakeAudioDecoder())}, ""),
        ({"decode": mm.Decode({"txt": str}), "transforms": (same,)}, ""),
        ({"decode": mm.Decode({"txt": str}), "before": (same,)}, ""),
    ],
)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_media_that_nothing_decodes_are_named_once(
    settings: dict[str, Any],
    said: str,
    is_mixture: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = {"mp4": fake_file(0, 1), "wav": fake_file(0, 1), "txt": b"a text"}
    write_corpus(tmp_path, [4], lambda number: fields)
    path = tmp_path / MANIFEST_NAME
    manifest = Manifest.from_bytes(path.read_bytes())
    path.write_bytes(replace(manifest, fields=dict.fromkeys(fields, 4)).to_bytes())
    dataset: Any = mm.open_dataset(tmp_path)
    if is_mixture:
        dataset = mm.Mixture({"one": (dataset, 1)}, epoch_steps=1)
    loader = mm.Loader(mm.Pipeline(dataset, global_batch_size=4, **settings))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert len(list(loader)) == 1
    messages = [each for each in caplog.messages if each.startswith("not decoded: ")]
    assert [message.partition(";")[0] for message in messages] == (
        [f"not decoded: {said}"] if said else []
    )
