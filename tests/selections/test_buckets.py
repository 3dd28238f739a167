"""Buckets of a dataset: found, stored, run on any ranks, resumed, and what bad input gets."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import take_down
from mmstream.pipeline import PipelineRunner
from mmstream.reading.step import Job
from mmstream.state import order_of_state
from mmstream.storage import open_store
from mmstream.train.models import validation_pipeline
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.media_files import audio_file
from tests.helpers.reader_thread import reader_thread
from tests.helpers.stores import far
from tests.helpers.topology import Step, assert_resumes_exactly, described, run

ROWS = [
    {"text": f"text {number}", **({} if number % 20 == 7 else {"words": number % 13})}
    for number in range(150)
]
"""150 samples in 15 shards; words of 7 samples are not known."""

EDGES = [2, 5, 9]

Command = Callable[..., tuple[int, str, str]]


def write(dest: str, rows: list[dict[str, Any]] = ROWS) -> str:
    mm.convert(rows, dest, samples_per_shard=10, progress=False)
    return dest


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset that no test writes to."""
    return write(str(tmp_path_factory.mktemp("buckets") / "corpus"))


@pytest.fixture
def corpus(written: str, tmp_path: Path) -> str:
    """A copy that a test may write to."""
    return str(shutil.copytree(written, tmp_path / "corpus"))


def pipeline(data: str | mm.Dataset, edges: Any = EDGES, **settings: Any) -> mm.Pipeline:
    dataset = mm.open_dataset(data) if isinstance(data, str) else data
    of_buckets = {"min_steps": settings.pop("min_steps", 1)}
    of_buckets |= {"pad_to": settings.pop("pad_to", "longest")}
    batching = mm.Buckets("words", edges=edges, **of_buckets)
    settings = {"global_batch_size": 4, "seed": 3, "batching": batching, **settings}
    return mm.Pipeline(dataset, **settings)


def words_of(key: str) -> int | None:
    words = ROWS[int(key) - 1].get("words")
    return None if words is None else int(str(words))


def bucket_of(key: str) -> int | None:
    words = words_of(key)
    return None if words is None else next((edge for edge in EDGES if words <= edge), None)


def require_buckets(steps: list[Step]) -> Counter[str]:
    """Require one bucket a step; return how often each sample has come."""
    for step in steps:
        assert len({bucket_of(key) for key in step.keys}) == 1
    return Counter(
        key for step in steps for key, valid in zip(step.keys, step.valid, strict=True) if valid
    )


def test_an_epoch_has_steps_of_one_bucket_and_each_sample_once(
    written: str, caplog: pytest.LogCaptureFixture
) -> None:
    described_run = pipeline(written, drop_last=False)
    assert repr(described_run).startswith("<Pipeline: Buckets(column='words'")
    whole = run(described_run)
    wanted = {str(n + 1).zfill(9) for n in range(150) if bucket_of(str(n + 1)) is not None}
    for epoch in range(2):
        counts = require_buckets(run(described_run, epoch=epoch).steps)
        assert set(counts) == wanted
        assert set(counts.values()) == {1}
    num_outside = 150 - len(wanted)
    assert f"buckets of words: {num_outside} of 150 samples are in no bucket" in caplog.text
    assert "NULL" in caplog.text
    assert repr(described_run).startswith(f"<Pipeline: {len(whole.steps)} steps of 4 per epoch")
    for size, num_workers in ((2, 1), (4, 2), (3, 3)):
        assert run(described_run, size, num_workers).steps == whole.steps


def test_resumes_are_exact(written: str) -> None:
    steps, states = states_of(pipeline(written, drop_last=False))
    for step in (1, 7, len(steps) - 2):
        parts = []
        for rank in range(2):
            other = mm.Loader(pipeline(written, drop_last=False), world=mm.World(rank, 2))
            other.load_state_dict(states[step - 1])
            parts.append([described(batch) for batch in other])
        keys = [first.keys + second.keys for first, second in zip(*parts, strict=True)]
        assert keys == [of.keys for of in steps[step:]]


ROWS_OF_EDGE = {2: 8, 5: 4, 9: 2}


def with_rows(corpus: str, **settings: Any) -> mm.Pipeline:
    batching = mm.Buckets("words", edges=EDGES, rows=ROWS_OF_EDGE, min_steps=2)
    return pipeline(corpus, batching=batching, global_batch_size=8, drop_last=False, **settings)


def test_steps_of_long_samples_have_fewer_rows(written: str) -> None:
    whole = run(with_rows(written)).steps
    counts = require_buckets(whole)
    assert set(counts.values()) == {1}
    assert len(counts) == 110
    for step in whole:
        assert len(step.keys) == ROWS_OF_EDGE[bucket_of(step.keys[0]) or 0]
    assert run(with_rows(written), 2, 2).steps == whole
    assert_resumes_exactly(lambda: mm.Loader(with_rows(written)), every=13)
    with pytest.raises(mm.ConfigError, match=r"have 2, 4, 8 rows, which 4 ranks .* run 1, 2 ranks"):
        mm.Loader(with_rows(written), world=mm.World(0, 4))
    with pytest.raises(mm.ConfigError, match=r"rows_per_rank=\(6, 2\)"):
        mm.Loader(with_rows(written), world=mm.World(0, 2), rows_per_rank=(6, 2))
    with pytest.raises(mm.ConfigError, match="global_batch_size 4: give 8, the most rows"):
        mm.Loader(pipeline(written, batching=with_rows(written).batching))
    keys = [key for step in whole for key in step.keys]
    for num_samples in (1, 5, 20):
        taken = [sample["__key__"] for sample in with_rows(written).take(num_samples)]
        assert taken == keys[:num_samples]


def test_object_storage_gives_the_same_steps(written: str) -> None:
    """A reader process plans ranges, and `as_webdataset` whole windows; both know rows of steps."""
    of = with_rows(written, window=8)
    whole = run(of).steps
    for rank in range(2):
        keys = []
        with reader_thread(of) as reader:
            (connection,) = reader.connections
            reader.begin(0, 3, (4 * rank, 4 * rank + 4))
            with closing(PipelineRunner(of, connection=connection)) as runner:
                for step in range(3, len(whole)):
                    job = Job(0, step, 4 * rank, 4 * rank + 4, iteration=reader.iteration)
                    batch = runner.batch(job)
                    keys.append(described(batch).keys)
                    assert batch["__lineage__"].start == rank * len(keys[-1])
        halves = [len(step.keys) // 2 for step in whole[3:]]
        assert keys == [
            step.keys[rank * half : (rank + 1) * half]
            for step, half in zip(whole[3:], halves, strict=True)
        ]
    remote = replace(of, dataset=far(of.dataset))  # type: ignore[arg-type]
    for world in (mm.World(0, 1), mm.World(1, 2)):
        local = [sample["__key__"] for sample in of.as_webdataset(world=world)]
        assert [sample["__key__"] for sample in remote.as_webdataset(world=world)] == local
    with pytest.raises(mm.ConfigError, match="which 4 ranks do not share"):
        next(iter(of.as_webdataset(world=mm.World(0, 4))))


def test_a_row_that_nothing_fills_is_one_of_its_step(written: str) -> None:
    """Rows of bad samples show another row of the step, which may have fewer rows than G."""

    def only_some(sample: Any) -> Any:
        if int(sample["__key__"]) % 3:
            raise mm.SampleError("bad")
        return sample

    policy = mm.BadSamplePolicy(max_fraction=1, max_consecutive=10**6)
    settings: dict[str, Any] = {"transforms": (only_some,), "bad_samples": policy}
    whole = run(with_rows(written, **settings)).steps
    for step in whole:
        assert all(int(key) % 3 == 0 for key in step.keys)
        assert len({bucket_of(key) for key in step.keys}) == 1
    assert run(with_rows(written, **settings), 2).steps == whole


@pytest.mark.slow
def test_workers_and_threads_change_nothing(written: str) -> None:
    expected = run(pipeline(written)).steps
    with closing(mm.Loader(pipeline(written), num_workers=2)) as loader:
        assert [described(batch) for batch in loader] == expected


def test_small_buckets_are_joined_and_said(written: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mmstream"):
        order = pipeline(written, [0, 5, 9, 12], min_steps=4).order
    assert [part.edge for part in order.buckets] == [5, 9, 12]
    assert "words: 5 also takes the samples of 0, too few for min_steps=4 steps" in caplog.text


def test_a_view_has_its_own_samples_of_each_bucket(written: str) -> None:
    dataset = mm.open_dataset(written)
    view = dataset[::2]
    counts = require_buckets(run(pipeline(view, drop_last=False)).steps)
    wanted = {bytes(view[n]["__key__"], "ascii").decode() for n in range(len(view))}
    assert set(counts) == {key for key in wanted if bucket_of(key) is not None}


# -- stored ----------------------------------------------------------------------------------------


def test_several_ranks_use_what_a_command_has_stored(
    corpus: str, mmstream: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(pipeline(corpus)).steps
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(mm.ConfigError, match="4 ranks would each read the columns") as error:
        mm.Loader(pipeline(corpus))
    _, command, _ = str(error.value).split("`")
    assert command == f"mmstream select {corpus} --buckets words --edges 2,5,9"
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    rc, out, _ = mmstream(*shlex.split(command)[1:])
    assert rc == 0
    assert [line.split()[0] for line in out.splitlines()] == ["34", "34", "42", "40"]
    monkeypatch.setattr("mmstream.dataset.columns.read_columns", None)  # nothing is read any more
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(pipeline(corpus)).steps == expected
    first = mm.open_dataset(corpus).where("words <= 2")
    assert len(first) == 34
    with pytest.raises(mm.ConfigError, match="would each read"):
        mm.Loader(pipeline(corpus, [2, 5, 10]))


def test_an_empty_bucket_is_stored_and_stays_an_error_of_where(
    corpus: str, mmstream: Command
) -> None:
    rc, out, _ = mmstream("select", corpus, "--buckets", "words", "--edges", "-1,20")
    assert rc == 0
    assert [line.split()[0] for line in out.splitlines()] == ["0", "142", "8"]
    assert [part.edge for part in pipeline(corpus, [-1, 20]).order.buckets] == [20]
    with pytest.raises(mm.ConfigError, match="none of"):
        mm.open_dataset(corpus).where("words <= -1")


def test_wrong_options_say_what_to_give(corpus: str, mmstream: Command) -> None:
    for words, message in (
        (["--buckets", "words"], "give --edges, or --resolution"),
        (["--edges", "2"], "--edges would do nothing here: it goes with --buckets"),
        (["--buckets", "words", "--edges", "a,b"], "give 2,4,8 or 512x512"),
        (["--buckets", "words", "--edges", "4,2"], "edges must rise"),
        (["--buckets", "words", "--edges", "2", "--name", "a"], "--name does not go with"),
        (["--buckets", "words", "--edges", "2", "--sample", "0.5"], "--sample does not go with"),
        (["--buckets", "words", "--edges", "2", "--by-media"], "it goes without --buckets"),
        (["--buckets", "text or words", "--edges", "2"], "name one column"),
        (["--buckets", "wrods", "--edges", "2"], "wrods: no such column"),
        (["--buckets", "key", "--edges", "2"], "do not compare"),
    ):
        rc, out, err = mmstream("select", corpus, *words)
        assert rc in (1, 2)
        assert message in out + err
    assert not any("select" in name for name in open_store(corpus).list())


def test_info_plans_the_reads_of_buckets(written: str, mmstream: Command) -> None:
    words = ["info", written, "--plan", "4", "--buckets", "words", "--edges", "2,5,9"]
    rc, out, _ = mmstream(*words)
    assert rc == 0
    assert "words up to" in out
    assert "plan: 26 steps of 4 rows" in out
    _, whole, _ = mmstream(*words[:4])
    requests = [text.split("requests: about ")[1].split()[0] for text in (out, whole)]
    assert float(requests[0]) > float(requests[1])


# -- changes ---------------------------------------------------------------------------------------


def states_of(of: mm.Pipeline) -> tuple[list[Step], list[dict[str, Any]]]:
    loader = mm.Loader(of)
    steps, states = [], []
    for batch in loader:
        steps.append(described(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return steps, states


def rest_of(of: mm.Pipeline, state: dict[str, Any], **settings: Any) -> list[Step]:
    loader = mm.Loader(of, **settings)
    loader.load_state_dict(state)
    return [described(batch) for batch in loader]


def test_other_buckets_in_mid_epoch_are_refused_or_begin_with_the_next(written: str) -> None:
    steps, states = states_of(pipeline(written))
    others = {
        r"buckets was of words with 34 up to 2, .*and is of .* up to 10": pipeline(
            written, [2, 5, 10]
        ),
        r"is of buckets \(batching=mm.Buckets\), this run of single samples: buckets begin": (
            pipeline(written, batching=None)
        ),
    }
    for message, other in others.items():
        with pytest.raises(mm.StateError, match=message):
            mm.Loader(other).load_state_dict(states[2])
        assert rest_of(other, states[2], on_change="finish_epoch") == steps[3:]
        loader = mm.Loader(other)
        loader.load_state_dict({**states[-1]})
        assert loader.state_dict()["epoch"] == 1
    plain_steps, plain_states = states_of(pipeline(written, batching=None))
    with pytest.raises(mm.StateError, match="is of single samples, this run of buckets"):
        mm.Loader(pipeline(written)).load_state_dict(plain_states[2])
    finished = rest_of(pipeline(written), plain_states[2], on_change="finish_epoch")
    assert finished == plain_steps[3:]


def test_an_epoch_of_a_view_begins_with_other_settings(written: str) -> None:
    view = mm.open_dataset(written)[::2]
    state = mm.Loader(pipeline(view)).state_dict()
    for data, settings in ((view, {"seed": 4}), (written, {"seed": 4}), (view, {"edges": [4, 9]})):
        other = pipeline(data, **settings)
        assert rest_of(other, state, on_change="finish_epoch") == run(other).steps


def test_a_state_keeps_the_windows_of_its_epoch(written: str) -> None:
    steps, states = states_of(pipeline(written, window=6, grid=(1, 2)))
    assert rest_of(pipeline(written), states[3]) == steps[4:]  # defaults are others now


def test_an_epoch_goes_on_where_shards_were_appended(written: str, tmp_path: Path) -> None:
    steps, states = states_of(pipeline(written))
    grown = write(str(tmp_path / "grown"), ROWS + [{"text": "more", "words": 3}] * 20)
    for settings in ({}, {"on_change": "finish_epoch"}):
        rest = rest_of(pipeline(grown), states[1], **settings)
        assert [(of.keys, of.planned) for of in rest] == [(of.keys, of.planned) for of in steps[2:]]
    order = order_of_state(states[1], mm.open_dataset(grown))[0]
    assert order.refs(0, 2).shard.tolist() == [shard for shard, _ in steps[2].planned]


def test_an_epoch_goes_on_after_a_takedown(corpus: str) -> None:
    steps, states = states_of(pipeline(corpus, min_steps=8))
    removed = {"000000001", "000000002", "000000015"}
    refs = [ref for of in steps for key, ref in zip(of.keys, of.shown) if key in removed]
    take_down(mm.open_dataset(corpus), refs, "request")
    rest = rest_of(pipeline(corpus, min_steps=8), states[0])
    require_buckets(rest)
    for now, before in zip(rest, steps[1:], strict=True):
        assert now.planned == before.planned
        assert removed.isdisjoint(now.keys)
    again = pipeline(corpus, min_steps=8, drop_last=False)
    assert [part.edge for part in again.order.buckets] == [5, 9]  # 31 samples are too few now
    keys = [key for of in run(again).steps for key, valid in zip(of.keys, of.valid) if valid]
    assert removed.isdisjoint(keys)
    assert len(set(keys)) == len(keys) == 107


def test_replay_names_the_samples_of_a_state(
    written: str, mmstream: Command, tmp_path: Path
) -> None:
    steps, states = states_of(pipeline(written))
    file = tmp_path / "state.json"
    file.write_text(json.dumps(states[2]))
    rc, out, _ = mmstream("replay", written, "--state", str(file), "--step", "3")
    assert rc == 0
    for shard, index in steps[3].planned:
        assert f"shard-{shard:06d}.tar[{index}]" in out


def test_validation_shows_also_what_is_in_no_bucket(written: str) -> None:
    of = validation_pipeline(pipeline(written), mm.open_dataset(written))
    assert sum(sum(batch["__valid__"].tolist()) for batch in mm.Loader(of)) == 150


def test_what_does_not_go_with_buckets_is_refused(written: str) -> None:
    dataset = mm.open_dataset(written)
    with pytest.raises(mm.ConfigError, match=r"mm\.Buckets\(\.\.\.\) is for one dataset"):
        pipeline(mm.Mixture({"all": (dataset, 1)}, epoch_steps=5))  # type: ignore[arg-type]
    with pytest.raises(mm.ConfigError, match="do not fill one step"):
        mm.Loader(pipeline(written, global_batch_size=1000))
    with pytest.raises(mm.ConfigError, match="no sample is in a bucket"):
        mm.Loader(pipeline(written, [-2, -1]))


def recordings(dest: str) -> mm.Dataset:
    """Recordings of 1, 3, 6, 9 and 12 tenths of a second at 8 kHz; some rows have none."""
    rows = [
        {
            "audio": audio_file("wav", seconds=(1, 3, 6, 9, 12)[n % 5] / 10, sample_rate=8000),
            "text": "ab",
        }
        for n in range(60)
    ]
    mm.convert(rows, dest, samples_per_shard=10, progress=False)
    return mm.open_dataset(dest)


def test_recordings_are_padded_to_the_edge_of_the_bucket(tmp_path: Path) -> None:
    dataset = recordings(str(tmp_path / "corpus"))

    def lengths(decoder: mm.AudioDecoder, name: str = "audio") -> set[tuple[int, int]]:
        of = mm.Pipeline(
            dataset,
            global_batch_size=4,
            batching=mm.Buckets("duration_s", edges=[0.5, 1, 1.5], min_steps=1, pad_to="edge"),
            decode=mm.Decode(audio=decoder),
        )
        return {
            (batch[name].shape[-1], batch[f"{name}_length"].max().item()) for batch in run_of(of)
        }

    def run_of(of: mm.Pipeline) -> list[Any]:
        return [*mm.Loader(of, world=mm.World(0, 2)), *mm.Loader(of, world=mm.World(1, 2))]

    assert {padded for padded, _ in lengths(mm.AudioDecoder())} == {8000, 16_000, 24_000}
    assert {longest for _, longest in lengths(mm.AudioDecoder())} <= {
        1600,
        4800,
        9600,
        14_400,
        19_200,
    }
    cut = lengths(mm.AudioDecoder(sample_rate=8000, channels=2, duration_s=0.75))
    assert {padded for padded, _ in cut} == {4000, 6000}
    features = mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures(padding="longest"))
    assert {padded for padded, _ in lengths(features, "audio_features")} == {50, 100, 150}


def test_tokens_are_padded_to_the_edge_of_the_bucket(written: str) -> None:
    text = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))
    widths = set()
    for batch in mm.Loader(pipeline(written, [5, 50], pad_to="edge", decode=text)):
        edge = 5 if words_of(batch["__key__"][0]) <= 5 else 50  # type: ignore[operator]
        longest = int(batch["attention_mask"].sum(1).max())
        assert longest in (8, 9, 10)  # of "text 1" to "text 149"
        assert batch["input_ids"].shape == batch["labels"].shape == (4, max(edge, longest))
        widths.add(batch["input_ids"].shape[1])
    assert 50 in widths
    assert len(widths) > 1


@pytest.mark.parametrize(
    ("column", "given", "message"),
    [
        ("words", {}, "pads tokens: pass decode="),
        ("words", {"collate": list}, "collate= makes the batches"),
        ("words", {"decode": "max_length"}, "pads all rows to one length"),
        ("duration_s", {"decode": "longest"}, "pads recordings of a known rate"),
        ("duration_s", {"decode": mm.AudioDecoder(sample_rate=None)}, "of a known rate"),
    ],
)
def test_padding_to_what_has_no_length_is_refused(
    written: str, column: str, given: dict[str, Any], message: str
) -> None:
    if isinstance(given.get("decode"), str):
        text = mm.TextDecoder(byte_tokenizer(), padding=given["decode"], max_length=64)
        given = {"decode": mm.Decode(text=text)}
    elif "decode" in given:
        given = {"decode": mm.Decode(audio=given["decode"])}
    with pytest.raises(mm.ConfigError, match=message):
        mm.Pipeline(
            mm.open_dataset(written),
            global_batch_size=4,
            batching=mm.Buckets(column, edges=EDGES, pad_to="edge"),
            **given,
        )


def test_reshard_gives_each_bucket_its_own_shards(
    corpus: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, mmstream: Command
) -> None:
    dest, buckets = str(tmp_path / "buckets"), mm.Buckets("words", edges=EDGES)
    mm.reshard(corpus, dest, buckets=buckets, samples_per_shard=10, progress=False)
    dataset = mm.open_dataset(dest)
    keys_of_shards = [
        [dataset.read(shard, index)["__key__"] for index in range(count)]
        for shard, count in enumerate(dataset.counts.tolist())
    ]
    assert all(len({bucket_of(key) for key in keys}) == 1 for keys in keys_of_shards)
    assert max(map(len, keys_of_shards)) == 10
    chosen = [str(number) for number in range(1, 151) if bucket_of(str(number)) is not None]
    assert sorted(int(key) for keys in keys_of_shards for key in keys) == list(map(int, chosen))
    num_outside = f"{150 - len(chosen)} samples are in no bucket and not written"
    assert num_outside in caplog.text
    # The command makes the same shards, and the new dataset has the same buckets.
    again = ["reshard", corpus, dest, "--buckets", "words", "--edges", "2,5,9"]
    assert mmstream(*again, "--samples-per-shard", "10")[0] == 0
    assert mmstream("index", dest, "--columns")[0] == 0
    assert pipeline(dest).order.num_samples == len(chosen)


def test_reshard_takes_packs_or_buckets(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(mm.ConfigError, match="packs have no buckets; give plan= or buckets="):
        mm.reshard(corpus, tmp_path / "new", plan="64", buckets=mm.Buckets("words", edges=EDGES))
    with pytest.raises(mm.ConfigError, match="word: no such column"):
        mm.reshard(corpus, tmp_path / "new", buckets=mm.Buckets("word", edges=EDGES))
    assert not (tmp_path / "new").exists()
