"""Real videos and recordings through the whole pipeline, with the decoders of mmstream."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.pipeline import PipelineRunner
from mmstream.reading.step import Job
from tests.helpers.corpora import write_corpus
from tests.helpers.media_files import audio_file, frame_number, video_file
from tests.helpers.media_rows import media_rows

KINDS = ("mp4", "mkv", "webm", "ts")


def files(number: int) -> dict[str, bytes]:
    """A sample with a video of 12 frames in 1.2 s, with or without sound, and a recording."""
    codec = "aac" if KINDS[number % 4] == "mp4" and number % 8 == 0 else None
    fields = {
        f"0.{KINDS[number % 4]}": video_file(
            KINDS[number % 4], audio_codec=codec, width=64 + 16 * (number % 2)
        ),
        "1.wav": audio_file("wav", seconds=0.5 + (number % 3) / 4),
    }
    if number == 3:
        fields["0.ts"] = fields["0.ts"][:300]
    if number == 6:
        fields["0.webm"] = fields["0.webm"][:100]
    row = {"start_s": 0.3, "end_s": 0.9} if number % 5 == 0 else {"id": number}
    return {**fields, "json": json.dumps(row).encode()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return mm.open_dataset(write_corpus(tmp_path_factory.mktemp("files"), [5, 7], files))


def make_pipeline(dataset: Any, video: mm.VideoDecoder, **settings: Any) -> mm.Pipeline:
    decode = mm.Decode(video=video, audio=mm.AudioDecoder(sample_rate=8000))
    policy = mm.BadSamplePolicy(max_fraction=1.0, quarantine=None)
    return mm.Pipeline(dataset, global_batch_size=4, decode=decode, bad_samples=policy, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(48, 64), None])
def test_batches_of_real_files_are_the_same_with_threads_workers_and_ranks(
    dataset: mm.Dataset, size: tuple[int, int] | None
) -> None:
    video = mm.VideoDecoder(
        fps=5,
        size=size,
        resize="exact" if size else None,
        clip_s=0.5,
        audio=mm.AudioDecoder(sample_rate=8000),
    )
    pipeline = make_pipeline(dataset, video)
    expected = [media_rows(batch) for batch in mm.Loader(pipeline, num_threads=1)]
    with closing(mm.Loader(pipeline, num_threads=3)) as loader:
        assert [media_rows(batch) for batch in loader] == expected
    if size is not None:
        with closing(mm.Loader(pipeline, num_workers=2)) as loader:
            assert [media_rows(batch) for batch in loader] == expected
    with closing(PipelineRunner(pipeline)) as runner:
        halves = [[media_rows(runner.batch(Job(0, 1, i, i + 2))) for i in (0, 2)]]
    assert [first + second for first, second in halves] == expected[1:2]


def test_files_that_are_read_by_ranges_give_the_same_batches(dataset: mm.Dataset) -> None:
    audio = mm.AudioDecoder(sample_rate=8000)
    rows = []
    for min_lazy_bytes in (None, 2048):
        decode = mm.Decode(
            video=mm.VideoDecoder(num_frames=3, audio=audio),
            audio=audio,
            min_lazy_bytes=min_lazy_bytes,
        )
        policy = mm.BadSamplePolicy(max_fraction=1.0, quarantine=None)
        pipeline = mm.Pipeline(dataset, global_batch_size=4, decode=decode, bad_samples=policy)
        batches = list(mm.Loader(pipeline))
        bad = [[record.reason for record in batch["__lineage__"].bad] for batch in batches]
        rows.append((list(map(media_rows, batches)), bad))
    assert rows[0] == rows[1]


def test_the_frames_are_those_of_their_times_and_the_sound_that_of_the_span(
    dataset: mm.Dataset,
) -> None:
    video = mm.VideoDecoder(size=(48, 64), resize="exact", audio=mm.AudioDecoder(sample_rate=8000))
    pipeline = make_pipeline(dataset, video, shuffle=False)
    batch = next(iter(mm.Loader(pipeline)))
    assert batch["__key__"][0] == "000000"
    rows = torch.repeat_interleave(batch["video_row"], batch["video_frames"])
    for frame, seconds in zip(batch["video"], batch["video_pts_s"].tolist(), strict=True):
        assert frame_number(frame.permute(1, 2, 0)) == round(seconds * 10)
    first = batch["video_pts_s"][rows == 0].tolist()
    assert first == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    owners = batch["audio_video"].tolist()
    assert owners[:2] == [0, -1]
    assert batch["audio_length"].tolist()[:2] == [0.6 * 8000, 0.2 * 8000]  # the rows say 0.3 to 0.9


def test_by_field_each_row_has_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_corpus(
        tmp_path_factory.mktemp("by_field"),
        [4],
        lambda number: {
            "mp4": video_file("mp4"),
            "flac": audio_file("flac", seconds=0.25 * (1 + number)),
            "txt": b"a text",
        },
    )
    decode = mm.Decode(
        {"mp4": mm.VideoDecoder(num_frames=3), "wav;flac": mm.AudioDecoder(), "txt": str}
    )
    pipeline = mm.Pipeline(
        mm.open_dataset(folder), global_batch_size=4, decode=decode, shuffle=False
    )
    (batch,) = mm.Loader(pipeline)
    assert [len(video) for video in batch["mp4"]] == [3] * 4
    assert batch["mp4_row"].tolist() == batch["wav_row"].tolist() == [0, 1, 2, 3]
    assert batch["wav_length"].tolist() == [4000, 8000, 12_000, 16_000]
    assert batch["txt"] == ["a text"] * 4
