"""Ranks compare their settings before they begin: one that differs is named, and no rank trains."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mmstream as mm
from mmstream import ranks as world_module
from mmstream.dataset.bad_list import write_bad
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.image.geometry import InternVLTiles
from mmstream.loader import settings as loader_settings
from mmstream.loader.settings import described, rank_settings
from mmstream.ranks import check_consistency
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.gloo_ranks import join_group, run_ranks
from tests.helpers.states import edited
from tests.test_other_corpus import one_byte_changed, write

WORLD_SIZE = 4
COUNTS = [30, 20, 14]


class Outcome(NamedTuple):
    text: str
    logged: list[str]


# -- what the ranks do ---------------------------------------------------------------------------


def first(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def second(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def pipeline(corpus: str, **changes: Any) -> mm.Pipeline:
    text = mm.TextDecoder(changes.pop("tokenizer", byte_tokenizer)(), max_length=16)
    image = mm.ImageDecoder(size=changes.pop("size", 16))
    settings = {
        "global_batch_size": 8,
        "decode": mm.Decode(image=image, text=text),
        "transforms": (first,),
        "bad_samples": BadSamplePolicy(quarantine=None),
    }
    dataset = mm.open_dataset(corpus, checksums=changes.pop("checksums", True))
    return mm.Pipeline(dataset, **{**settings, **changes})


def other_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<another>"])
    return tokenizer


def loader_of(
    folder: Path, corpus: str = "a", options: dict[str, Any] | None = None, **changes: Any
) -> mm.Loader:
    """A loader with options of its own, of a pipeline with these changes."""
    return mm.Loader(
        pipeline(str(folder / corpus), **changes), **{"num_threads": 1, **(options or {})}
    )


Case = Callable[[Path, int], "mm.Loader | None"]
"""What a rank does: from a folder and its number to its loader; None: it begins no loop."""


def on_rank_2(**given: Any) -> Case:
    """Rank 2 is told something that the others are not."""
    return lambda folder, rank: loader_of(folder, **(given if rank == 2 else {}))


def without(absent: int) -> Case:
    return lambda folder, rank: None if rank == absent else loader_of(folder)


def in_world(world_of: Callable[[int], mm.World], **given: Any) -> Case:
    return lambda folder, rank: loader_of(folder, options={"world": world_of(rank)}, **given)


def further_state(folder: Path, rank: int) -> mm.Loader:
    loader = loader_of(folder)
    loader.load_state_dict(edited(loader.state_dict(), step=3 if rank == 2 else 2))
    return loader


def other_version(folder: Path, rank: int) -> mm.Loader:
    if rank == 2:
        real = loader_settings.version
        loader_settings.version = lambda name: "0.0.1" if name == "pillow" else real(name)
    return loader_of(folder)


EQUAL: dict[str, tuple[Case, list[str]]] = {
    "same": (on_rank_2(), ["2"] * WORLD_SIZE),
    "folder for bad samples, threads": (
        lambda folder, rank: loader_of(
            folder,
            bad_samples=BadSamplePolicy(quarantine=str(folder / f"rank{rank}")),
            options={"num_threads": 1 + rank},
        ),
        ["2"] * WORLD_SIZE,
    ),
    "permuted worlds": (
        in_world(lambda rank: mm.World((rank + 1) % WORLD_SIZE, WORLD_SIZE)),
        ["2"] * WORLD_SIZE,
    ),
    # A world of another size is not compared.
    "smaller worlds": (
        lambda folder, rank: loader_of(
            folder, seed=rank // 2, options={"world": mm.World(rank // 2, 2)}
        ),
        ["4"] * WORLD_SIZE,
    ),
    "alone": (
        lambda folder, rank: None if rank else loader_of(folder, options={"world": mm.World(0, 1)}),
        ["8", *["not begun"] * 3],
    ),
}
"""What is not a difference, and how many rows each rank has in its first batch."""

THERE = "rank 2 differs from the other ranks: "
DIFFERENT: dict[str, tuple[Case, str]] = {
    "seed": (on_rank_2(seed=1), THERE + "seed is 1 there and 0 elsewhere;"),
    "batch size": (on_rank_2(global_batch_size=7), "global_batch_size is 7 there and 8 elsewhere"),
    "window": (on_rank_2(window=5), THERE + "window is 5 there and "),
    "decode size": (
        on_rank_2(size=32),
        THERE + "ImageDecoder.size is 32 there and 16 elsewhere;",
    ),
    "tokenizer": (
        on_rank_2(tokenizer=other_tokenizer),
        THERE + "TextDecoder.tokenizer is 'hash ",
    ),
    "no decoder": (
        on_rank_2(decode=None),
        "image decoder is None there and mmstream.decoding.image.decoder.ImageDecoder elsewhere",
    ),
    "corpus": (on_rank_2(corpus="b"), THERE + "bytes of the shards (hash of their sha256) is '"),
    "grown corpus": (on_rank_2(corpus="grown"), "number of shards is 4 there and 3 elsewhere"),
    "bad list": (on_rank_2(corpus="listed"), "bad list (hash) is '"),
    "transforms": (
        on_rank_2(transforms=(second,)),
        THERE + "transforms is [tests.test_consistency.second] there and "
        "[tests.test_consistency.first] elsewhere;",
    ),
    "policy": (
        on_rank_2(bad_samples=BadSamplePolicy("mask", quarantine=None)),
        THERE + "BadSamplePolicy.action is 'mask' there and 'substitute' elsewhere;",
    ),
    "position": (further_state, THERE + "step is 3 there and 2 elsewhere;"),
    "rows": (
        lambda folder, rank: loader_of(
            folder, options={"rows_per_rank": [3, 1, 2, 2] if rank == 2 else [2, 2, 2, 2]}
        ),
        THERE + "rows_per_rank is [3, 1, 2, 2] there and [2, 2, 2, 2] elsewhere;",
    ),
    "checksums": (
        lambda folder, rank: loader_of(folder, "checked", checksums=rank != 2),
        THERE + "bytes are compared with checksums is False there and True elsewhere;",
    ),
    "on_change": (
        on_rank_2(options={"on_change": "finish_epoch"}),
        THERE + "on_change is 'finish_epoch' there and 'refuse' elsewhere;",
    ),
    "version": (other_version, THERE + "version of pillow is '0.0.1' there and '"),
    "each its own": (
        lambda folder, rank: loader_of(folder, seed=rank),
        "rank 1 differs from the other ranks: seed is 1 there and 0 elsewhere; "
        "rank 2 differs from the other ranks: seed is 2 there and 0 elsewhere; rank 3 ",
    ),
    "two sides": (
        lambda folder, rank: loader_of(folder, seed=7 * (rank % 2)),
        "ranks 1 and 3 differ from the other ranks: seed is 7 there and 0 elsewhere;",
    ),
    "world": (
        in_world(lambda rank: mm.World(1 if rank == 3 else rank, WORLD_SIZE)),
        "ranks 1 and 3 all have World(rank=1), and so the same ",
    ),
}
"""What is a difference, and what every rank says about it."""

ABSENT = {"rank 2 is missing": 2, "rank 0 is missing": 0}
ABSENT_S = 15
"""Seconds until a missing rank is an error: enough for the others on a busy machine."""


class Noted(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def outcome_of(loader: mm.Loader | None) -> Outcome:
    noted = Noted()
    logging.getLogger("mmstream.ranks").addHandler(noted)
    try:
        text = "not begun" if loader is None else str(len(next(iter(loader))["__key__"]))
    except mm.MMStreamError as error:
        text = f"{type(error).__name__}: {error}"
    logging.getLogger("mmstream.ranks").removeHandler(noted)
    return Outcome(text, noted.messages)


def in_a_thread_beside_collectives(folder: Path, rank: int) -> str:
    """As a prefetch thread does: the main thread is in collectives meanwhile."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(outcome_of(loader_of(folder))))
    time.sleep(0.3 * rank)
    thread.start()
    total = torch.ones(())
    for _ in range(5):
        dist.all_reduce(total)
    thread.join(500)
    return f"{outcomes[0].text} {total.item()}"


def play(rank: int, folder_name: str) -> None:
    """What each rank does: all cases one after another, in one process group."""
    folder, outcomes = Path(folder_name), {}
    real_version = loader_settings.version
    join_group(rank, Path(folder, "rendezvous"), WORLD_SIZE, timeout_s=300)
    for name, (case, _) in {**EQUAL, **DIFFERENT, "same again": EQUAL["same"]}.items():
        outcomes[name] = outcome_of(case(folder, rank))
        loader_settings.version = real_version
    outcomes["in a thread"] = Outcome(in_a_thread_beside_collectives(folder, rank), [])
    store = world_module._default_store()
    dist.barrier()
    store.set_timeout(timedelta(seconds=ABSENT_S))
    world_module.WARNING_S = 0.5
    for name, absent in ABSENT.items():
        loader = without(absent)(folder, rank)
        dist.barrier()  # a busy machine takes long to make a loader: it is not part of ABSENT_S
        outcomes[name] = outcome_of(loader)
        if loader is None:
            store.add(f"mmstream/begun/{rank}", 1)  # else this rank stays behind in the next case
        dist.barrier()
    (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The outcome of every case, on each rank."""
    folder = tmp_path_factory.mktemp("consistency")
    write(folder / "a", COUNTS)
    one_byte_changed(folder / "b", COUNTS)
    write(folder / "grown", [*COUNTS, 9])
    write_corpus(folder / "checked", COUNTS, checksums=True)
    write_bad(mm.open_dataset(write(folder / "listed", COUNTS)), [(0, 3)])
    run_ranks(play, str(folder), num_ranks=WORLD_SIZE)
    ranks = [json.loads((folder / f"outcomes-{n}.json").read_text()) for n in range(WORLD_SIZE)]
    return {name: [Outcome(*outcomes[name]) for outcomes in ranks] for name in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DIFFERENT])
def test_a_rank_that_differs_is_named_on_every_rank_and_nobody_trains(played, name):
    expected = DIFFERENT[name][1]
    for outcome in played[name]:
        assert outcome.text.startswith("ConfigError: ")
        assert outcome.text.endswith("; no rank trains")
        assert expected in outcome.text
    assert len({outcome.text for outcome in played[name]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_ranks_with_the_same_settings_begin(played, name):
    assert [outcome.text for outcome in played[name]] == EQUAL[name][1]


@pytest.mark.slow
def test_ranks_that_have_refused_can_begin_anew(played):
    assert [outcome.text for outcome in played["same again"]] == ["2"] * WORLD_SIZE


@pytest.mark.slow
def test_a_thread_compares_beside_the_collectives_of_the_main_thread(played):
    total = float(WORLD_SIZE**5)
    assert [outcome.text for outcome in played["in a thread"]] == [f"2 {total}"] * WORLD_SIZE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "absent"), ABSENT.items())
def test_a_rank_that_never_iterates_is_named_first_in_a_warning_then_in_an_error(
    played, name, absent
):
    refused = (
        f"ConfigError: within {ABSENT_S} s rank {absent} has not begun this iteration: every rank "
        "must iterate its Loader; for one rank alone pass world=mm.World(0, 1); no rank trains"
    )
    texts = ["not begun" if rank == absent else refused for rank in range(WORLD_SIZE)]
    assert [outcome.text for outcome in played[name]] == texts
    warnings = played[name][0 if absent else 1].logged
    assert warnings
    assert all(text.startswith(f"waiting for rank {absent} since ") for text in warnings)


# -- the comparison itself -----------------------------------------------------------------------


class CountedStore:
    """A store that many ranks share as threads, and that counts their requests."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.timeout = timedelta(seconds=500)
        self.num_requests = 0

    def __getattr__(self, name: str) -> Any:
        self.num_requests += name != "check"
        return getattr(self.store, name)


class Compared(NamedTuple):
    store: CountedStore
    errors: dict[int, str]
    """Of the ranks that were refused."""


Begin = Callable[[int, mm.World], None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Begin], Compared]:
    """Run a function on so many ranks, as threads with one store."""
    local = threading.local()
    monkeypatch.setattr(dist, "is_initialized", lambda: hasattr(local, "rank"))
    monkeypatch.setattr(dist, "get_rank", lambda: local.rank)

    def run(world_size: int, begin: Begin) -> Compared:
        compared = Compared(CountedStore(), {})
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        monkeypatch.setattr(world_module, "_default_store", lambda: compared.store)

        def play_rank(rank: int) -> None:
            local.rank = rank
            try:
                begin(rank, mm.World(rank, world_size))
            except mm.MMStreamError as error:
                compared.errors[rank] = str(error)

        threads = [threading.Thread(target=play_rank, args=(n,)) for n in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(500)
        return compared

    return run


ZERO, ONE = {"seed": "0"}, {"seed": "1"}
MANY = {f"setting {number}": "1" for number in range(9)}


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([ZERO, ZERO], None),
        ([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}], None),
        ([ZERO, ONE, ONE], "rank 0 differs from the other ranks: seed is 0 "),
        ([ZERO, ONE], "rank 1 differs from the other ranks: seed is 1 there"),
        ([ONE, ZERO, ZERO, ONE], "ranks 1 and 2 differ from the other ranks:"),
        ([{"a": "1"}, {"a": "1"}, {}], "rank 2 differs .* a is not set there and 1 elsewhere; "),
        ([{}, {}, {"b": "1"}], "b is 1 there and not set elsewhere; "),
        ([{"seed": str(rank)} for rank in range(7)], "rank 4 differs .* elsewhere; and 2 more ki"),
        ([{"seed": str(rank % 2)} for rank in range(14)], "ranks 1, 3, 5, 7 and 3 more differ "),
        ([MANY, MANY, dict.fromkeys(MANY, "2")], "elsewhere, and 5 more; no rank trains"),
    ],
)
def test_the_settings_of_most_ranks_are_taken_for_the_right_ones(ranks, settings, verdict):
    def begin(rank: int, world: mm.World) -> None:
        check_consistency(settings[rank], world, beginning="", advice="")

    texts = list(ranks(len(settings), begin).errors.values())
    assert len(texts) == len(settings) * (verdict is not None)
    assert verdict is None or all(re.search(verdict, text) for text in texts)


def test_a_long_run_does_not_fill_the_store_and_requests_grow_with_the_ranks_alone(ranks):
    def begin(rank: int, world: mm.World) -> None:
        for epoch in range(5):
            check_consistency({"epoch": str(epoch)}, world, beginning="", advice="")

    num_requests = {}
    for world_size in (4, 32):
        store = ranks(world_size, begin).store
        # The counters, the last verdict and the last settings of rank 0.
        assert store.store.num_keys() <= world_size + 2
        num_requests[world_size] = store.num_requests / world_size / 5
    assert num_requests[32] < num_requests[4] + 1


def test_rank_0_that_holds_the_store_ends_after_all_others_have_read_the_verdict(
    ranks, monkeypatch
):
    read, has_read = world_module._await_verdict, []

    def read_late(*arguments: Any) -> str:
        time.sleep(0.5)
        return read(*arguments)

    def begin(rank: int, world: mm.World) -> None:
        try:
            check_consistency({"seed": str(rank == 3)}, world, beginning="", advice="")
        finally:
            if rank == 0:
                keys = [f"mmstream/comparison/1/{number}/read" for number in (1, 2, 3)]
                has_read.append(world_module._default_store().check(keys))

    monkeypatch.setattr(world_module, "_await_verdict", read_late)
    assert ranks(4, begin).errors.keys() == {0, 1, 2, 3}
    assert has_read == [True]


def test_a_store_that_fails_is_an_error_of_one_line(ranks, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("connection\nreset")

    monkeypatch.setattr(CountedStore, "add", fail, raising=False)
    errors = ranks(2, lambda _, world: check_consistency({}, world, beginning="", advice="")).errors
    assert errors.keys() == {0, 1}
    assert "store of the process group has failed (connection\\nreset)" in errors[0]


# -- what is compared ----------------------------------------------------------------------------


@pytest.fixture
def decoders(corpus) -> Callable[..., dict[str, str]]:
    """Return the settings of a pipeline with such decoders."""

    def settings_of(fields=None, before=(), **decoders):
        decode, dataset = mm.Decode(fields, **decoders), mm.open_dataset(corpus)
        made = mm.Pipeline(dataset, global_batch_size=4, decode=decode, before=before)
        return rank_settings(made, None)

    return settings_of


def test_decoders_by_field_and_functions_before_decoding_are_compared(decoders):
    fields = {"jpg": mm.ImageDecoder(size=8), "b": mm.Boxes("json.b")}
    group = {"same_geometry": ("jpg", "b")}
    same = decoders(fields, **group)
    assert decoders(dict(fields), **group) == same
    assert any(name == "version of pillow" for name in same)
    for other in (
        decoders(fields | {"cls": int}, **group),
        decoders(fields | {"jpg": mm.ImageDecoder(size=9)}, **group),
        decoders(fields | {"b": mm.Boxes("json.b", format="xywh")}, **group),
        decoders(fields, (first,), **group),
        decoders({"jpg": fields["jpg"]}),
        decoders(fields, max_json_bytes=99, **group),
        decoders(fields, min_lazy_bytes=99, **group),
    ):
        assert other != same


def test_decoders_of_videos_and_recordings_are_compared(decoders):
    audio = mm.AudioDecoder(sample_rate=8000)
    times = {"fields": {"t": mm.Times("json.t", follows="audio")}, "audio": audio}
    points = {"t": mm.Times("json.t", follows="audio", format="point")}
    assert decoders(**times) == decoders(**times)
    assert decoders(**times) != decoders(**(times | {"fields": points}))
    one = decoders(video=mm.VideoDecoder(fps=2, audio=audio), audio=audio)
    assert (one["VideoDecoder.fps"], one["AudioDecoder.sample_rate"]) == ("2", "8000")
    assert "sample_rate=8000" in decoders(video=mm.VideoDecoder(audio=audio))["VideoDecoder.audio"]
    assert {"version of av", "version of soxr", "version of torch"} <= one.keys()
    assert "version of soxr" not in decoders(video=mm.VideoDecoder(fps=2))
    assert "version of av" not in decoders()


def test_a_rank_with_another_reshuffle_is_told_that_cache_dir_may_be_why(corpus):
    texts = [
        rank_settings(replace(pipeline(corpus), reshuffle=how), None) for how in ("global", "lanes")
    ]
    names = [name for name in texts[0] if texts[0][name] != texts[1][name]]
    assert names[0].startswith("reshuffle (lanes by default where cache_dir is set")
    assert names[1:] == ["version of the order"]


def test_a_tokenizer_that_was_used_is_still_the_same(corpus):
    tokenizer = byte_tokenizer()
    made = pipeline(corpus, tokenizer=lambda: tokenizer)
    before = rank_settings(made, None)
    tokenizer(["a", "longer text"], truncation=True, max_length=3, padding=True)
    assert rank_settings(made, None) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (np.int64(3), "3"),
        ((1, 2.5, "a"), "[1, 2.5, 'a']"),
        ({"b": 1, "a": [True]}, "{'a': [True], 'b': 1}"),
        (first, "tests.test_consistency.first"),
        (partial(first, 1, size=2), "partial(tests.test_consistency.first, 1, size=2)"),
        (object(), "builtins.object"),
        (mm.World(0, 2), "(World.rank=0, World.world_size=2)"),
        (InternVLTiles, "mmstream.decoding.image.geometry.InternVLTiles"),
    ],
)
def test_settings_are_described_without_addresses(value, text):
    assert described(value) == text


def test_a_long_setting_is_cut_and_still_told_from_others(corpus):
    many = pipeline(corpus, transforms=(first,) * 20)
    others = replace(many, transforms=(*many.transforms[:-1], second))
    texts = [rank_settings(pipeline, None)["transforms"] for pipeline in (many, others)]
    assert texts[0] != texts[1]
    assert max(map(len, texts)) < 90


def test_the_sources_of_a_mixture_are_compared_by_name(tmp_path):
    def settings(corpus: str) -> dict[str, str]:
        mixture = mm.Mixture({"web": (mm.open_dataset(corpus), 1)}, epoch_steps=6)
        return rank_settings(mm.Pipeline(mixture, global_batch_size=8), None)

    was = settings(write(tmp_path / "a", COUNTS))
    now = settings(one_byte_changed(tmp_path / "b", COUNTS))
    name = "source web: bytes of the shards (hash of their sha256)"
    assert {key for key in was if was[key] != now[key]} == {name}
    assert settings(write_corpus(tmp_path / "c", COUNTS))[name] == "None"
