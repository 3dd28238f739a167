"""Videos and recordings through the whole pipeline: the same batches everywhere."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.pipeline import PipelineRunner
from mmstream.ranks import World, rows_of_rank
from mmstream.reading.step import Job
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_media import FakeAudioDecoder, FakeVideoDecoder, fake_file
from tests.helpers.media_rows import media_rows

NUM_SAMPLES = 26
BAD = {5: "plan", 11: "decode", 17: "plan"}
"""Samples whose video is refused, and when."""


def files(number: int) -> dict[str, bytes]:
    """A sample of 0 to 2 videos, some with a track, and sometimes a recording."""
    fields = {
        f"{i}.mp4": fake_file(
            number, 1 + (number + i) % 3, has_track=number % 2 == 0, bad=BAD.get(number, "")
        )
        for i in range(1 if number in BAD else number % 3)
    }
    if number % 4 == 1:
        fields["9.wav"] = fake_file(number, 3 + number)
    return {**fields, "json": json.dumps({"start_s": number % 5}).encode()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return mm.open_dataset(write_corpus(tmp_path_factory.mktemp("media"), [10, 16], files))


def decode(size: tuple[int, int] | None = None) -> mm.Decode:
    audio = FakeAudioDecoder()
    return mm.Decode(
        video=FakeVideoDecoder(audio=audio, is_random=True, size=size),
        audio=FakeAudioDecoder(is_random=True),
    )


def make_pipeline(dataset: Any, size: tuple[int, int] | None = None) -> mm.Pipeline:
    return mm.Pipeline(
        dataset,
        global_batch_size=6,
        seed=4,
        window=9,
        drop_last=False,
        decode=decode(size),
        bad_samples=mm.BadSamplePolicy(max_fraction=1.0, quarantine=None),
    )


def steps_of(
    pipeline: mm.Pipeline, size: int = 1, num_workers: int = 1, num_threads: int = 1
) -> list[list[Any]]:
    """The rows of each global batch, put together from ranks and workers."""
    steps: list[list[Any]] = [[] for _ in range(pipeline.order.steps_per_epoch)]
    for rank in range(size):
        rows = rows_of_rank(pipeline.global_batch_size, World(rank, size), "balanced")
        for worker in range(num_workers):
            with closing(PipelineRunner(pipeline, num_threads=num_threads)) as runner:
                for step in range(worker, len(steps), num_workers):
                    steps[step] += media_rows(runner.batch(Job(0, step, *rows, num_workers)))
    return steps


@pytest.mark.parametrize(("size", "is_mixture"), [(None, False), ((4, 6), False), (None, True)])
def test_batches_are_the_same_on_every_topology(
    dataset: mm.Dataset, size: tuple[int, int] | None, is_mixture: bool
) -> None:
    mixture = mm.Mixture({"a": (dataset, 2), "b": (dataset, 1)}, epoch_steps=5)
    pipeline = make_pipeline(mixture if is_mixture else dataset, size)
    expected = steps_of(pipeline)
    assert sum(len(row) > 2 for step in expected for row in step) > NUM_SAMPLES // 2
    for topology in ((2, 1, 1), (3, 2, 1), (1, 3, 4), (2, 1, 3)):
        assert steps_of(pipeline, *topology) == expected


def test_bad_videos_are_substituted_with_their_reason(dataset: mm.Dataset) -> None:
    pipeline = make_pipeline(dataset)
    records = [bad for batch in mm.Loader(pipeline) for bad in batch["__lineage__"].bad]
    reasons = sorted(bad.reason for bad in records)
    assert len(reasons) == len(BAD)
    assert [reason.rpartition(": ")[2] for reason in reasons] == [
        "plan refuses it",
        "decode refuses it",
        "plan refuses it",
    ]
    assert "000005.0.mp4: " in reasons[0]
    assert {bad.kind for bad in records} == {"DecodeError"}


def test_a_transform_may_change_frames_and_sounds(dataset: mm.Dataset) -> None:
    def first_frames(sample: dict[str, Any]) -> dict[str, Any]:
        videos = sample["video"] if isinstance(sample["video"], list) else [sample["video"]]
        times = sample["video_pts_s"]
        times = times if isinstance(times, list) else [times]
        return {
            **sample,
            "video": [video[:1] for video in videos],
            "video_pts_s": [each[:1] for each in times],
            "audio": np.zeros(7, np.float32),
        }

    decoders = mm.Decode(video=FakeVideoDecoder())
    pipeline = mm.Pipeline(
        dataset, global_batch_size=6, decode=decoders, transforms=(first_frames,)
    )
    batch = next(iter(mm.Loader(pipeline)))
    assert set(batch["video_frames"].tolist()) == {1}
    assert batch["audio"].shape == (6, 7)
    assert batch["audio_length"].tolist() == [7] * 6


def test_rows_that_wait_for_storage_wait_side_by_side(tmp_path: Path) -> None:
    # All rows of the step must have begun before any of them goes on.
    barriers = {call: threading.Barrier(4, timeout=500) for call in ("plan", "decode")}

    class Waiting(FakeVideoDecoder):
        __module__ = "mmstream.decoding"  # as one of ours: those of users run one by one

        def plan(self, data: Any, *args: Any, **options: Any) -> Any:
            assert isinstance(data, mm.LazyBytes)
            barriers["plan"].wait()
            return super().plan(data, *args, **options)

        def decode(self, *args: Any, **options: Any) -> Any:
            barriers["decode"].wait()
            return super().decode(*args, **options)

    padding = b" " * 4096
    folder = write_corpus(tmp_path, [4], lambda n: {"mp4": fake_file(n, 1) + padding})
    pipeline = mm.Pipeline(
        mm.open_dataset(folder),
        global_batch_size=4,
        decode=mm.Decode(video=Waiting(), min_lazy_bytes=4096),
    )
    (batch,) = mm.Loader(pipeline, num_threads=1)
    assert len(batch["video"]) == 4
