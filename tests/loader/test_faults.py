"""The loader under stress: errors of every kind, early ends, several loaders, bounded memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import mmstream as mm
from tests.helpers.bad_corpus import (
    bad_json,
    make_pipeline,
    policy,
    truncated_jpeg,
    write_faulty,
    write_tiny,
)
from tests.helpers.corpora import write_corpus
from tests.helpers.states import edited
from tests.helpers.stores import watched_pipeline
from tests.helpers.topology import assert_resumes_exactly, described, run

BAD = {0, 5, 30, 31, 70}


class Raises:
    """A transform that raises at one sample: an error, or nothing once a file is there."""

    def __init__(self, error: BaseException, unless: Path) -> None:
        self.error, self.unless = error, unless

    def __call__(self, sample):
        if not self.unless.exists():
            raise self.error
        return sample


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_keep_class_and_message_and_the_loader_goes_on_after_them(tmp_path, num_workers):
    corpus = write_corpus(tmp_path / "corpus", [20, 20])
    for kind in (mm.errors.ShardError, mm.errors.BadSampleLimitError, NameError, MemoryError):
        calm = tmp_path / kind.__name__
        pipeline = make_pipeline(corpus, transforms=(Raises(kind("s.tar[3] k.jpg: why"), calm),))
        loader = mm.Loader(pipeline, num_workers=num_workers)
        with pytest.raises(kind, match=r"s\.tar\[3\] k\.jpg: why") as caught:
            list(loader)
        assert type(caught.value) is kind
        assert loader.state_dict()["step"] == 0
        calm.touch()
        assert [b["__lineage__"].step for b in loader] == [0, 1, 2]
        loader.close()


@pytest.mark.slow
def test_a_limit_passed_in_the_main_process_leaves_the_workers_usable(tmp_path):
    pipeline = make_pipeline(
        write_tiny(tmp_path, [48], {12, 13, 14, 15}),
        shuffle=False,
        bad_samples=policy(max_consecutive=3),
    )
    loader = mm.Loader(pipeline, num_workers=1)
    with pytest.raises(mm.errors.BadSampleLimitError, match="4 bad samples in a row"):
        list(loader)
    state = loader.state_dict()
    assert state["step"] == 1
    loader.load_state_dict(edited(state, step=2))
    assert [b["__lineage__"].step for b in loader] == [2, 3]
    loader.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_the_users_loop_loses_and_repeats_nothing(corpus, error, ahead):
    pipeline = make_pipeline(corpus)
    loader = mm.to_device(mm.Loader(pipeline), "cpu") if ahead else mm.Loader(pipeline)
    seen = []
    for stop in (2, 1, 3):
        with pytest.raises(error):  # noqa: PT012 - the loop is the user's code
            for count, batch in enumerate(loader, start=1):
                seen.append(described(batch))
                if count == stop:
                    raise error
        assert loader.state_dict()["step"] == len(seen)
        loader.load_state_dict(loader.state_dict())
    seen += [described(batch) for batch in loader]
    assert seen == run(pipeline).steps


@pytest.mark.parametrize(
    ("ahead", "drop_last", "shuffle"),
    [(False, False, True), (True, True, False)],
)
def test_one_process_resumes_exactly_at_every_step(tmp_path, ahead, drop_last, shuffle):
    corpus = write_faulty(tmp_path, [30, 1, 0, 40, 26], BAD, truncated_jpeg)
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    pipeline = make_pipeline(corpus, decode=decode, drop_last=drop_last, shuffle=shuffle)

    def make_loader():
        loader = mm.Loader(pipeline)
        return mm.to_device(loader, "cpu") if ahead else loader

    steps = assert_resumes_exactly(make_loader, images=True)
    assert len(steps) == 2 * (8 if drop_last else 9)
    assert steps[: len(steps) // 2] == run(pipeline, 3, 2).steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "drop_last", "shuffle"),
    [(False, False, True), (True, True, False)],
)
def test_workers_resume_exactly_at_every_step(tmp_path, ahead, drop_last, shuffle):
    corpus = write_faulty(tmp_path, [30, 1, 0, 40, 26], BAD, bad_json)
    pipeline = make_pipeline(corpus, drop_last=drop_last, shuffle=shuffle)

    def make_loader():
        loader = mm.Loader(pipeline, num_workers=2)
        return mm.to_device(loader, "cpu") if ahead else loader

    steps = assert_resumes_exactly(make_loader, fresh=False)
    assert steps[: len(steps) // 2] == run(pipeline).steps


@pytest.fixture(scope="module")
def lanes(tmp_path_factory) -> str:
    """512 samples in 3 shards: 64 steps of 8, so that 16 lanes of 32 fill an epoch."""
    return write_tiny(tmp_path_factory.mktemp("lanes"), [128, 256, 128])


def payload(pipeline: mm.Pipeline) -> int:
    return sum(
        int(pipeline.dataset.shards.offsets(shard)[-1])
        for shard in range(pipeline.dataset.num_shards)
    )


def reads_no_gaps(pipeline: mm.Pipeline) -> mm.Pipeline:
    """The pipeline on a store whose ranges hold no bytes between samples: bytes can be counted."""
    return watched_pipeline(pipeline, max_gap_bytes=0)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "window"),
    [((1, 1), 50), ((4, 1), 50), ((1, 4), 50), ((3, 3), 8), ((4, 4), 1000)],
)
def test_every_byte_is_read_once(lanes, topology, window):
    pipeline = reads_no_gaps(make_pipeline(lanes, global_batch_size=8, grid=(4, 4), window=window))
    assert run(pipeline, *topology).num_bytes == payload(pipeline)


@pytest.mark.parametrize("start", [1, 17, 40])
def test_a_resume_reads_only_what_is_left(lanes, start):
    pipeline = reads_no_gaps(make_pipeline(lanes, global_batch_size=8, grid=(4, 4), window=50))
    rest = run(pipeline, 2, 2, range(start, 64))
    assert rest.num_bytes == payload(pipeline) * (64 - start) // 64


def test_two_loaders_of_one_pipeline_do_not_disturb_each_other(corpus):
    pipeline = make_pipeline(corpus)
    expected = run(pipeline).steps
    one, other = mm.Loader(pipeline), mm.Loader(pipeline)
    pairs = [(described(a), described(b)) for a, b in zip(one, other, strict=True)]
    assert pairs == [(step, step) for step in expected]
    nested = [
        ([described(inner) for inner in other], described(outer))
        for outer in itertools.islice(one, 3)
    ]
    for epoch, (inner, outer) in enumerate(nested, start=1):
        assert inner == run(pipeline, epoch=epoch).steps
        assert outer == run(pipeline, epoch=1).steps[epoch - 1]


def test_a_loop_inside_a_loop_over_the_same_loader_takes_over_with_the_next_epoch(corpus):
    loader = mm.Loader(make_pipeline(corpus))
    epochs = []
    with pytest.raises(mm.ConfigError, match="this loop is over: the loader was iterated again"):  # noqa: PT012
        for _ in loader:
            epochs += [inner["__lineage__"].epoch for inner in loader]
    assert set(epochs) == {1}
    assert loader.state_dict()["epoch"] == 2
