"""A corpus of the same names and counts with other bytes is refused by name, in every way in."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.audit import SampleLog
from mmstream.state import order_of_state
from tests.helpers.bad_corpus import patch
from tests.helpers.corpora import write_checksums, write_corpus

COUNTS = [30, 20, 14]


def write(folder: Path, counts: list[int] = COUNTS) -> str:
    return write_checksums(write_corpus(folder, counts))


def one_byte_changed(folder: Path, counts: list[int] = COUNTS) -> str:
    """The same corpus, but for the last letter of the first sample's json."""
    write_corpus(folder, counts)
    data = (folder / "shard-000000.tar").read_bytes()
    patch(folder, 0, data.index(b'{"id": 0}') + 7, b"7")
    return write_checksums(str(folder))


def pipeline(corpus: str) -> mm.Pipeline:
    return mm.Pipeline(mm.open_dataset(corpus), global_batch_size=8)


def stopped_at(run: mm.Pipeline, num_steps: int) -> dict:
    loader = mm.Loader(run, num_threads=1)
    list(islice(loader, num_steps))
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
@pytest.mark.parametrize("num_steps", [0, 3, 8])
def test_a_loader_refuses_the_state_of_a_corpus_that_differs_in_one_byte(
    tmp_path, on_change, num_steps
):
    state = stopped_at(pipeline(write(tmp_path / "a")), num_steps)
    loader = mm.Loader(pipeline(one_byte_changed(tmp_path / "b")), on_change=on_change)
    with pytest.raises(mm.StateError, match=r"bytes \(sha256\) of the .*are not those of the stat"):
        loader.load_state_dict(state)
    with pytest.raises(mm.StateError, match=r"the bytes \(sha256\) of the first 3 shards are not"):
        order_of_state(state, mm.open_dataset(tmp_path / "b"))
    same = mm.Loader(pipeline(write(tmp_path / "c")), on_change=on_change)
    same.load_state_dict(state)
    assert same.state_dict() == state


def test_a_replaced_shard_of_another_size_is_refused_without_checksums(tmp_path):
    state = stopped_at(pipeline(write_corpus(tmp_path / "a", COUNTS)), 3)
    other = write_corpus(tmp_path / "b", COUNTS, lambda n: {"txt": b"x" * 600 * (n + 1)})
    with pytest.raises(mm.StateError, match="The sizes of the shards are not those of the state"):
        mm.Loader(pipeline(other)).load_state_dict(state)


def test_a_corpus_that_has_grown_is_the_old_one_if_its_first_shards_are(tmp_path):
    state = stopped_at(pipeline(write(tmp_path / "a")), 3)
    grown = pipeline(write(tmp_path / "b", [*COUNTS, 9]))
    loader = mm.Loader(grown, on_change="finish_epoch")
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    other = pipeline(one_byte_changed(tmp_path / "c", [*COUNTS, 9]))
    with pytest.raises(mm.StateError, match=r"the bytes \(sha256\) of the first 3 shards are not"):
        mm.Loader(other, on_change="finish_epoch").load_state_dict(state)


@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
def test_a_mixture_names_the_source_that_is_another_one(tmp_path, on_change):
    texts = mm.open_dataset(write(tmp_path / "texts", [40]))

    def mixed(corpus: str) -> mm.Pipeline:
        sources = {"texts": (texts, 1), "web": (mm.open_dataset(corpus), 1)}
        return mm.Pipeline(mm.Mixture(sources, epoch_steps=6), global_batch_size=8)

    for num_steps in (3, 6):  # mid-epoch, and where an epoch begins
        state = stopped_at(mixed(write(tmp_path / "a")), num_steps)
        other = mixed(one_byte_changed(tmp_path / "b"))
        with pytest.raises(mm.StateError, match=r"The bytes \(sha256\) of source web are not"):
            mm.Loader(other, on_change=on_change).load_state_dict(state)
        with pytest.raises(mm.StateError, match=r"source 'web' of the state has changed"):
            order_of_state(state, other.dataset)


@pytest.fixture
def replay(mmstream, tmp_path):
    """Compare logs of a folder of the test with a state, as `mmstream replay` does."""

    def run(corpus, state):
        path = tmp_path / "state.json"
        path.write_text(json.dumps(state))
        return mmstream("replay", corpus, "--state", path, "--check", tmp_path / "logs")

    return run


def write_log(run: mm.Pipeline, folder: Path) -> None:
    """What `mmstream train --log-keys` writes of one epoch."""
    folder.mkdir()
    samples, loader = SampleLog(enabled=True), mm.Loader(run, num_threads=1)
    for batch in loader:
        samples.add([batch], loader.state_dict()["order"])
    line = {"num_steps": 8, **samples.take(), "rank": 0, "world_size": 1}
    (folder / "metrics-rank0.jsonl").write_text(json.dumps(line) + "\n")


def test_replay_refuses_the_state_of_another_corpus(tmp_path, replay):
    write_log(pipeline(write(tmp_path / "a")), tmp_path / "logs")
    state = stopped_at(pipeline(str(tmp_path / "a")), 3)
    assert replay(tmp_path / "a", state)[0] == 0
    code, out, err = replay(one_byte_changed(tmp_path / "b"), state)
    assert (code, out) == (1, "")
    assert "the bytes (sha256) of the first 3 shards are not those of the state" in err
    assert err.count("\n") == 1


def test_replay_refuses_logs_of_another_corpus_with_any_state(tmp_path, replay):
    write_log(pipeline(write(tmp_path / "a")), tmp_path / "logs")
    other = one_byte_changed(tmp_path / "b")
    code, out, err = replay(other, stopped_at(pipeline(other), 0))
    assert (code, out) == (1, "")
    assert "the dataset is not the one of these logs: names and sample counts are the same" in err


def test_replay_checks_logs_that_were_written_before_there_were_checksums(tmp_path, replay):
    corpus = write_corpus(tmp_path / "a", COUNTS)
    write_log(pipeline(corpus), tmp_path / "logs")
    assert replay(corpus, stopped_at(pipeline(write_checksums(corpus)), 3))[0] == 0


def test_logs_with_something_else_for_an_order_are_refused_in_one_line(tmp_path, replay):
    corpus = write(tmp_path / "a")
    write_log(pipeline(corpus), tmp_path / "logs")
    path = tmp_path / "logs" / "metrics-rank0.jsonl"
    line = json.loads(path.read_text())
    for order in ([1], {"sources": 5}, {"sources": [1]}):
        line["lineage"][0]["order"] = order
        path.write_text(json.dumps(line) + "\n")
        code, _, err = replay(corpus, stopped_at(pipeline(corpus), 3))
        assert (code, err.count("\n")) == (2, 1)
        assert "not an order in these logs" in err


def test_a_state_is_small_and_a_source_of_a_mixture_takes_less_than_300_bytes(tmp_path):
    datasets = {f"source-{n}": mm.open_dataset(write(tmp_path / f"{n}", [9])) for n in range(4)}

    def size_of(num_sources: int) -> int:
        sources = {name: (datasets[name], 1) for name in list(datasets)[:num_sources]}
        mixture = mm.Mixture(sources, epoch_steps=6)
        loader = mm.Loader(mm.Pipeline(mixture, global_batch_size=8))
        return len(json.dumps(loader.state_dict()))

    one = mm.Loader(mm.Pipeline(datasets["source-0"], global_batch_size=8))
    assert len(json.dumps(one.state_dict())) < 600
    assert (size_of(4) - size_of(1)) / 3 < 300
