"""One segment of a row: which one is drawn, what it becomes, and what is no segment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.types import SampleLineage
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_media import FakeAudioDecoder, fake_file

SEGMENTS = [{"start_s": i, "end_s": i + 1, "text": f"part {i}"} for i in range(5)]


def sample(row: Any, epoch: int = 0, index: int = 0) -> dict[str, Any]:
    return {"__key__": "k", "__lineage__": SampleLineage(0, index, epoch), "json": row}


def test_a_segment_gives_the_row_its_times_and_its_text() -> None:
    before = sample({"id": 7, "segments": SEGMENTS, "text": "the whole"})
    after = mm.one_segment(before)
    number = after["json"]["start_s"]
    assert after == {**before, "json": {"id": 7, **SEGMENTS[number]}, "txt": f"part {number}"}
    assert before["json"]["segments"] is SEGMENTS
    turns = [{"role": "user", "content": "what is it?"}]
    segment = {"start_s": 1, "end_s": 2, "messages": turns}
    assert mm.one_segment(sample({"segments": [segment]})) == sample(segment)


def test_each_epoch_draws_anew_and_all_segments_come() -> None:
    row = {"segments": SEGMENTS}
    drawn = [mm.one_segment(sample(row, epoch))["json"]["start_s"] for epoch in range(40)]
    assert set(drawn) == set(range(5))
    assert drawn == [mm.one_segment(sample(row, epoch))["json"]["start_s"] for epoch in range(40)]


@pytest.mark.parametrize("row", [{"id": 1}, [1, 2], None])
def test_a_row_without_segments_stays_as_it_is(row: Any) -> None:
    before = sample(row)
    assert mm.one_segment(before) is before


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([], mm.SkipSample, r"json\.segments is empty"),
        ("all", mm.errors.DecodeError, r"json\.segments is 'all', not a list"),
        ([3], mm.errors.DecodeError, r"json\.segments\[0\] is 3, not an object"),
    ],
)
def test_an_empty_list_leaves_the_sample_out_and_nonsense_makes_it_bad(
    segments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mm.one_segment(sample({"segments": segments}))


def test_decoders_take_the_span_of_the_segment(tmp_path: Path) -> None:
    row = json.dumps({"segments": SEGMENTS}).encode()
    folder = write_corpus(tmp_path, [8], lambda n: {"wav": fake_file(0, 1), "json": row})
    pipeline = mm.Pipeline(
        mm.open_dataset(folder),
        global_batch_size=8,
        before=(mm.one_segment,),
        decode=mm.Decode(audio=FakeAudioDecoder()),
    )
    for num_threads in (1, 3):
        (batch,) = mm.Loader(pipeline, num_threads=num_threads)
        starts = [row["start_s"] for row in batch["json"]]
        assert batch["audio"][:, 0].tolist() == starts
        assert batch["txt"] == [f"part {start}" for start in starts]
        assert len(set(starts)) > 1


def test_a_row_with_one_segment_is_about_that_segment(tmp_path: Path) -> None:
    rows = [{"segments": SEGMENTS[2:3]}, {"segments": SEGMENTS}, {"start_s": 4, "end_s": 5}]

    def fields(number: int) -> dict[str, bytes]:
        return {"wav": fake_file(0, 1), "json": json.dumps(rows[number]).encode()}

    pipeline = mm.Pipeline(
        mm.open_dataset(write_corpus(tmp_path, [3], fields)),
        global_batch_size=3,
        shuffle=False,
        decode=mm.Decode(audio=FakeAudioDecoder()),
    )
    (batch,) = mm.Loader(pipeline)
    assert batch["audio"][:, 0].tolist() == [2, 0, 4]
