"""Functions of the user draw alike on every topology, and move no generator of the process."""

from __future__ import annotations

import logging
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.threaded_calls import calls_ahead
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.wait import wait_until

Sample = dict[str, Any]
Rows = dict[tuple[int, str], list[Any]]

DRAWN = ("before", "txt", "noise", "last", "batch", "words")


def draw() -> float:
    """A number from all three generators."""
    return float(torch.rand(())) + random.random() + np.random.rand()


def draw_before(sample: Sample) -> Sample:
    return sample | {"before": np.float32(draw())}


def draw_text(sample: Sample) -> str:
    return f"words {draw()}"


def draw_value(data: bytes) -> Any:
    return np.float32(draw() + len(data))


def draw_noise(sample: Sample) -> Sample:
    noise = torch.randint(0, 9, sample["image"].shape, dtype=torch.uint8)
    return sample | {"image": sample["image"] + noise, "noise": np.float32(draw())}


def seed_all(sample: Sample) -> Sample:
    """What some functions do, and must not do to others."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return sample


def draw_last(sample: Sample) -> Sample:
    return sample | {"last": np.float32(draw())}


def draw_batch(samples: list[Sample]) -> dict[str, Any]:
    batch = mm.collate(samples)
    return batch | {"batch": torch.rand(len(samples)), "words": batch["input_ids"].sum(1)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), [9, 8, 7])


def make(corpus: str, size: int | None = 16, **settings: Any) -> mm.Pipeline:
    decode = mm.Decode(
        {"txt": draw_value},
        image=mm.ImageDecoder(size=size),
        text=mm.TextDecoder(byte_tokenizer(), field=draw_text),
    )
    defaults: dict[str, Any] = {
        "global_batch_size": 8,
        "seed": 3,
        "before": (draw_before,),
        "decode": decode,
        "transforms": (draw_noise, seed_all, draw_last),
        "collate": draw_batch,
    }
    return mm.Pipeline(mm.open_dataset(corpus), **(defaults | settings))


def rows_of(batches: Any, names: tuple[str, ...] = (*DRAWN, "image")) -> Rows:
    """What was drawn for each sample of each epoch."""
    rows: Rows = {}
    for batch in batches:
        for row, key in enumerate(batch["__key__"]):
            drawn = [batch[name][row].tolist() for name in names]
            rows[batch["__lineage__"].epoch, key] = drawn
    return rows


def delivered(pipeline: mm.Pipeline, epochs: int = 1, **settings: Any) -> Rows:
    rows: Rows = {}
    with closing(mm.Loader(pipeline, **settings)) as loader:
        for _ in range(epochs):
            rows |= rows_of(loader)
    return rows


def states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        numpy_state[1].tolist(),
        numpy_state[2:],
        random.getstate(),
    )


@pytest.mark.parametrize("size", [16, None])
@pytest.mark.parametrize("num_threads", [2, 4])
def test_draws_are_those_of_one_thread(corpus: str, size: int | None, num_threads: int) -> None:
    pipeline = make(corpus, size)
    expected = delivered(pipeline, epochs=2, num_threads=1)
    assert delivered(pipeline, epochs=2, num_threads=num_threads) == expected
    for number in range(len(DRAWN) - 1):  # sums of words may be the same
        assert len({row[number] for row in expected.values()}) == len(expected) == 48


@pytest.mark.parametrize(
    ("num_workers", "num_threads"),
    [(1, 2), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_draws_in_workers_are_those_without(
    corpus: str, num_workers: int, num_threads: int
) -> None:
    settings = {"num_workers": num_workers, "num_threads": num_threads}
    assert delivered(make(corpus), **settings) == delivered(make(corpus))


def test_draws_on_two_ranks_are_those_on_one(corpus: str) -> None:
    """But for what `collate` draws, which has no sample: it is the rank's own."""
    names = tuple(name for name in (*DRAWN, "image") if name != "batch")
    loaders = [mm.Loader(make(corpus), world=mm.World(rank, 2)) for rank in range(2)]
    first, second = (rows_of(loader, names) for loader in loaders)
    assert first | second == rows_of(mm.Loader(make(corpus)), names)
    batches = [next(iter(loader))["batch"].tolist() for loader in loaders]
    assert batches[0] != batches[1]


def test_draws_after_a_resume_are_those_of_a_run_that_was_not_left(corpus: str) -> None:
    loader = mm.Loader(make(corpus))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = rows_of(batches)
    resumed = mm.Loader(make(corpus), num_threads=4)
    resumed.load_state_dict(state)
    assert rows_of(resumed) == expected


def test_take_and_bake_show_what_training_sees(corpus: str, tmp_path: Path) -> None:
    pipeline = make(corpus)
    names = ("before", "txt", "noise", "last", "image")
    expected = rows_of(mm.Loader(pipeline), names)
    before = states()
    taken = pipeline.take(24)
    mm.bake(pipeline, tmp_path / "baked", epoch_of_draws=0, num_workers=1, progress=False)
    assert states() == before
    baked = mm.Pipeline(
        mm.open_dataset(tmp_path / "baked"), global_batch_size=8, decode=mm.Decode.baked()
    )
    for samples in (taken, baked.take(24)):
        assert {
            (0, sample["__key__"]): [torch.as_tensor(sample[name]).tolist() for name in names]
            for sample in samples
        } == expected


def test_sources_of_a_mixture_draw_on_their_own(corpus: str) -> None:
    """The same sample in two sources has two draws."""
    dataset = mm.open_dataset(corpus)
    mixture = mm.Mixture({"a": (dataset, 1), "b": (dataset, 1)}, stop="all")
    pipeline = mm.Pipeline(
        mixture, global_batch_size=48, before=(draw_before,), decode=mm.Decode(), seed=3
    )
    samples = pipeline.take(48)
    drawn = {
        (sample["__source__"], sample["__key__"]): float(sample["before"]) for sample in samples
    }
    assert len(set(drawn.values())) == len(drawn) == 48


def fail(sample: Sample) -> Sample:
    raise NameError(f"a bug after {draw()}")


@pytest.mark.parametrize("settings", [{"num_threads": 1}, {"num_threads": 4}, {"num_workers": 1}])
def test_no_generator_of_the_process_moves(corpus: str, settings: dict[str, int]) -> None:
    """Also where a function fails."""
    torch.randn(()), np.random.randn(), random.gauss()  # each keeps half of a pair
    before = states()
    delivered(make(corpus), **settings)
    with pytest.raises(NameError):
        delivered(make(corpus, transforms=(draw_noise, fail)), **settings)
    assert states() == before


def test_a_measure_moves_no_generator(corpus: str, tmp_path: Path) -> None:
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), field=draw_text))
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=1, decode=decode)
    before = states()
    mm.plan(pipeline, 4096, epochs=[0], folder=tmp_path, progress=False, num_workers=1)
    assert states() == before


def test_functions_run_in_the_callers_thread_in_the_order_of_rows(corpus: str) -> None:
    calls: dict[str, list[str]] = {}
    threads = set()

    def noting(name: str, result: Any = None) -> Any:
        def function(argument: Any) -> Any:
            threads.add(threading.current_thread())
            key = argument["__key__"] if isinstance(argument, dict) else argument.decode()
            calls.setdefault(name, []).append(key)
            return argument if result is None else result

        return function

    decode = mm.Decode(
        {"txt": noting("field")},
        image=mm.ImageDecoder(),
        text=mm.TextDecoder(byte_tokenizer(), field=noting("text", "words")),
    )
    settings = {"before": (noting("before"),), "transforms": (noting("transforms"),)}
    pipeline = make(corpus, decode=decode, collate=mm.collate, **settings)
    keys = [key for batch in mm.Loader(pipeline, num_threads=4) for key in batch["__key__"]]
    assert calls["before"] == calls["text"] == calls["transforms"] == keys
    assert len(calls["field"]) == len(keys)
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("has_functions", [True, False])
def test_a_loop_in_another_thread_is_warned_of_once(
    corpus: str, has_functions: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"before": (), "transforms": (), "collate": mm.collate, "decode": None}
    loader = mm.Loader(make(corpus, **({} if has_functions else plain)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(list, loader).result()
        pool.submit(list, loader).result()
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert ["num_workers=1" in each.message for each in warnings] == [True] * has_functions


def test_the_first_error_of_a_line_is_logged_with_its_traceback(
    corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_at_times(sample: Sample) -> Sample:
        if int(sample["__key__"]) % 4 == 0:
            raise ValueError("four")
        return sample

    policy = mm.BadSamplePolicy(max_fraction=1, max_consecutive=100)
    delivered(make(corpus, transforms=(fail_at_times, draw_noise, draw_last), bad_samples=policy))
    (record,) = [each for each in caplog.records if each.exc_info]
    assert "fail_at_times: ValueError: four" in record.message
    assert "000" in record.message
    assert record.exc_info is not None
    assert "int(sample" not in record.message
    assert record.exc_info[2].tb_next.tb_frame.f_code.co_name == "fail_at_times"


@pytest.mark.parametrize("place", ["transforms", "decode"])
def test_an_error_that_ends_the_run_has_the_traceback_of_the_function(
    corpus: str, place: str
) -> None:
    def fail(_: Any) -> Any:
        raise ValueError("four")

    settings = {
        "transforms": {"transforms": (fail,)},
        "decode": {"decode": mm.Decode({"txt": fail}), "transforms": ()},
    }[place]
    policy = mm.BadSamplePolicy(action="raise")
    pipeline = make(corpus, collate=mm.collate, bad_samples=policy, **settings)
    with pytest.raises(
        mm.SampleError, match=r"^shard-\d+\.tar\[\d+\] \S+: .*fail: ValueError: four"
    ) as raised:
        delivered(pipeline, num_threads=1)
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError)
    assert cause.__traceback__ is not None


def refused(_: Any) -> Any:
    raise ValueError("four")


def no_batch(_: Any) -> Any:
    raise mm.ConfigError("no batch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kind", "function"),
    [
        ({"transforms": (refused,)}, mm.SampleError, refused),
        ({"transforms": (), "collate": no_batch}, mm.ConfigError, no_batch),
    ],
)
def test_an_error_of_a_worker_has_the_workers_traceback_as_its_cause(
    corpus: str, settings: Any, kind: type[Exception], function: Any
) -> None:
    policy = mm.BadSamplePolicy(action="raise")
    loader = mm.Loader(make(corpus, bad_samples=policy, **settings), num_workers=1)
    with pytest.raises(kind) as raised:
        list(loader)
    assert "\n" not in str(raised.value)
    line = function.__code__.co_firstlineno + 1
    assert f'test_user_functions.py", line {line}, in {function.__name__}' in str(
        raised.value.__cause__
    )


def test_few_rows_are_decoded_before_their_turn() -> None:
    """Decoded pictures of a whole step would take gigabytes."""
    begun = []
    results = []
    with ThreadPoolExecutor(2) as pool:

        def items() -> Any:
            for number in range(20):
                begun.append(number)
                yield number, number % 3 > 0

        for result in calls_ahead(lambda number: number * 2, items(), pool, 4):
            results.append(result)
            assert len(begun) <= len(results) + 4
    assert results == [number * 2 for number in range(20)]


def test_a_row_is_held_by_no_thread_that_did_not_get_to_it() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def items() -> Any:
        for number in range(6):
            held.append(weakref.ref(tensor := torch.tensor(number)))
            yield tensor, True
            del tensor

    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(is_over.wait)  # the only thread is busy all the time
        try:
            numbers = [int(result) for result in calls_ahead(torch.neg, items(), pool, 2)]
            assert [tensor() for tensor in held] == [None] * 6
        finally:
            is_over.set()
    assert numbers == [0, -1, -2, -3, -4, -5]


def test_rows_are_decoded_in_the_callers_thread_while_another_is_at_the_due_one() -> None:
    threads: dict[int, int] = {}
    may_end = threading.Event()

    def decode(number: int) -> int:
        threads[number] = threading.get_ident()
        if number == 1:
            may_end.wait()  # the caller's thread does 2 meanwhile, and then lets 1 end
        if number == 2:
            may_end.set()
        if number == 3:
            raise KeyError(number)
        return number

    def items() -> Any:
        for number in range(5):
            if number == 1:
                yield number, True
                wait_until(lambda: 1 in threads)  # the thread of the pool is at it
            else:
                yield number, number > 0

    results = []
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):  # noqa: PT012
        for result in calls_ahead(decode, items(), pool, 2):
            results.append(result)
    assert results == [0, 1, 2]
    assert threads[1] != threads[2] == threading.get_ident()
