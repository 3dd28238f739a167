"""`mmstream replay`: any step of a run, from its state and the manifest, is what a loader gives."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.audit import read_keys, replay
from mmstream.cli.training import read_state
from mmstream.dataset.bad_list import BAD_NAME, REMOVED_NAME
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.errors import StateError, StorageError
from mmstream.ranks import World, rows_of_rank
from mmstream.state import order_of_state
from mmstream.storage import open_store
from mmstream.train.checkpoint import Checkpoint, save_checkpoint
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.bad_corpus import make_pipeline, offsets, patch, write_faulty
from tests.helpers.corpora import captioned, write_corpus, write_shard
from tests.helpers.states import edited
from tests.helpers.stores import WatchedStore, watched
from tests.helpers.topology import described, joined

BAD = {0, 5, 6, 29, 30, 31, 58, 70, 96}
COUNTS = [30, 1, 0, 40, 26]


@pytest.fixture
def mmstream(mmstream):
    """Run `mmstream replay` in this process; return (exit code, stdout, stderr)."""
    return partial(mmstream, "replay")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The counts of `corpus`, with samples whose json is broken."""
    return write_faulty(tmp_path_factory.mktemp("faulty"), COUNTS, BAD)


def loaders(pipeline: mm.Pipeline, rows: list[int]) -> list[mm.Loader]:
    worlds = [World(rank, len(rows)) for rank in range(len(rows))]
    return [mm.Loader(pipeline, world=world, rows_per_rank=rows, num_threads=1) for world in worlds]


def names_of(dataset: mm.Dataset, refs: list[tuple[int, int]]) -> list[tuple[str, int]]:
    return [(dataset.name_of(shard), index) for shard, index in refs]


def test_repeated_samples_are_replayed_once(faulty, tmp_path, mmstream):
    pipeline = make_pipeline(faulty, repeat=3)
    rows = [6, 3, 3]
    delivered = [described(next(iter(loader))) for loader in loaders(pipeline, rows)]
    state = tmp_path / "state.json"
    state.write_text(json.dumps(mm.Loader(pipeline).state_dict()))
    for rank, step in enumerate(delivered):
        options = ["--rank", rank, "--world-size", 3, "--rows-per-rank", "6,3,3", "--json"]
        code, output, _ = mmstream(faulty, "--state", state, *options)
        assert code == 0
        planned = [json.loads(line) for line in output.splitlines()]
        assert [row["row"] for row in planned] == ([0, 1], [2], [3])[rank]
        refs = [(row["shard"], row["index"]) for row in planned]
        assert refs == names_of(pipeline.dataset, step.planned)


def test_the_samples_of_packs_are_replayed_row_by_row(tmp_path, mmstream):
    url = write_corpus(tmp_path / "corpus", [30, 20, 10])
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=512))
    pipeline = mm.Pipeline(
        mm.open_dataset(url), global_batch_size=2, decode=decode, batching=mm.Pack(512)
    )
    mm.plan(pipeline)
    loader, shown = mm.Loader(pipeline), []
    for batch in loader:
        lineage = batch["__lineage__"]
        shown += [
            f"0 {lineage.step} {row} {pipeline.dataset.name_of(shard)}[{index}]"
            for row, (shard, index) in zip(lineage.rows, lineage.shown, strict=True)
        ]
    assert len(shown) > 4 * pipeline.order.steps_per_epoch
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    code, out, err = mmstream(url, "--state", state, "--epoch", "0", "--step", "0:")
    assert (code, out.splitlines()) == (0, shown), err
    for folder in Path(url).glob("mmstream.plan.*"):
        folder.rename(tmp_path / folder.name)
    code, _, err = mmstream(url, "--state", state, "--step", "0")
    assert code == 1
    assert "bring the plan's folder back beside the index" in err


# -- the plan is what was delivered --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, [12]),
        ({}, [6, 6]),
        ({"drop_last": False}, [5, 4, 3]),
        ({"shuffle": False, "drop_last": False}, [3, 3, 3, 3]),
        ({"grid": (2, 3), "seed": -7}, [1, 11]),
    ],
)
def test_every_step_of_every_rank_is_what_its_loader_gave(faulty, settings, rows):
    pipeline = make_pipeline(faulty, **settings)
    dataset, ranks = pipeline.dataset, loaders(pipeline, rows)
    before, delivered = ranks[0].state_dict(), {}
    for _ in range(2):
        for parts in zip(*ranks, strict=True):
            for rank, part in enumerate(parts):
                step = described(part)
                rank_rows = rows_of_rank(12, World(rank, len(rows)), rows)
                delivered[step.epoch, step.step, rank_rows] = step
    assert len(delivered) == 2 * pipeline.order.steps_per_epoch * len(rows)
    state = json.loads(json.dumps(ranks[0].state_dict()))
    elsewhere = loaders(pipeline, [2, 1, 4, 3, 2])
    for rank in elsewhere:
        rank.load_state_dict(state)
    for parts in islice(zip(*elsewhere, strict=True), 2):
        step = joined([described(part) for part in parts])
        delivered[step.epoch, step.step, (0, 12)] = step
    resumed = json.loads(json.dumps(elsewhere[0].state_dict()))
    order, *position = order_of_state(resumed, mm.open_dataset(faulty))
    assert position == [2, 2]
    for other in (before, state):  # all is future there, or past
        assert order_of_state(other, dataset)[0].identity() == order.identity()
    num_substituted = 0
    for (epoch, step, rank_rows), given in delivered.items():
        replayed = list(replay(dataset, order, epoch, [step], rank_rows, keys=True))
        assert [(row.shard, row.index) for row in replayed] == names_of(dataset, given.planned)
        assert [row.row for row in replayed] == list(range(*rank_rows))
        for row, key, valid, planned, shown in zip(
            replayed, given.keys, given.valid, given.planned, given.shown, strict=True
        ):
            assert row.key == dataset.read(*planned)["__key__"]
            assert (row.key == key) == (planned == shown)
            assert row.valid or not valid
            num_substituted += row.valid and planned != shown
    assert num_substituted == sum(len(given.bad) for given in delivered.values()) > len(BAD)


# -- without reading data ------------------------------------------------------------------------


def test_only_the_manifest_is_read_and_for_keys_one_header_a_sample(
    mmstream, corpus, tmp_path, monkeypatch
):
    state = tmp_path / "state.json"
    state.write_text(json.dumps(mm.Loader(make_pipeline(corpus)).state_dict()))
    store = WatchedStore(open_store(corpus))
    monkeypatch.setattr("mmstream.dataset.open.open_store", lambda url: store)
    code, out, err = mmstream(corpus, "--state", state, "--step", "2:4", "--epoch", 7)
    assert (code, err, len(out.splitlines())) == (0, "", 24)
    assert {*store.whole_reads} <= {MANIFEST_NAME, BAD_NAME, REMOVED_NAME}
    assert store.range_reads == []
    code, with_keys, err = mmstream(
        corpus, "--state", state, "--step", "2:4", "--epoch", 7, "--keys"
    )
    assert (code, err) == (0, "")
    assert [line.rpartition(" ")[0] for line in with_keys.splitlines()] == out.splitlines()
    names = [ranges[0][0] for ranges in store.range_reads]
    indexes = [name for name in names if name.endswith(".idx")]
    assert len(indexes) == len(set(indexes)) <= 4
    of_tars = [ranges for ranges in store.range_reads if ranges[0][0] not in indexes]
    assert [len(ranges) for ranges in of_tars] == [12, 12]  # a call a step: side by side
    assert sum(stop - start for ranges in of_tars for _, start, stop in ranges) == 24 * 512


def test_a_state_may_lie_in_an_object_store(corpus, tmp_path):
    prefix = f"memory://{tmp_path.name}"
    state = mm.Loader(make_pipeline(corpus)).state_dict()
    open_store(prefix).write("state.json", json.dumps(state).encode())
    content = {"loader": json.dumps(edited(state, step=2))}
    save_checkpoint(open_store(f"{prefix}/run/checkpoints"), Checkpoint(2, content), keep=3)
    assert read_state(f"{prefix}/state.json")["step"] == 0
    for source in ("run", "run/", "run/checkpoints", "run/checkpoints/step-00000002.pt"):
        assert read_state(f"{prefix}/{source}")["step"] == 2


def test_keys_behind_long_names_take_a_second_look_and_no_payload(tmp_path):
    keys = ["é" * 60 + f"{n}" if n % 2 else f"{'d' * 150}/{'x' * 120}{n}" for n in range(6)]
    shard = write_shard(tmp_path, "a.tar", [(k, captioned(n)) for n, k in enumerate(keys)])
    open_store(tmp_path).write(MANIFEST_NAME, Manifest((shard,)).to_bytes())
    dataset = watched(mm.open_dataset(tmp_path))
    assert read_keys(dataset, [(0, n) for n in (3, 0, 3, 5)]) == [keys[n] for n in (3, 0, 3, 5)]
    assert dataset.store.num_range_bytes <= 3 * (512 + 1024 + 1536)


def test_a_key_that_cannot_be_read_is_a_warning(tmp_path, caplog):
    corpus = write_corpus(tmp_path, [4, 4, 4])
    patch(corpus, 0, int(offsets(corpus, 0)[1]), b"\xff" * 512)
    (tmp_path / "shard-000001.tar").unlink()
    (tmp_path / "shard-000002.tar.idx").unlink()
    dataset = mm.open_dataset(tmp_path)
    refs = [(0, 0), (0, 1), (1, 1), (2, 0)]
    assert read_keys(dataset, refs) == ["000000", None, None, None]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert any(
        text.startswith("shard-000000.tar[1]: no key: not a tar header") for text in messages
    )
    away = watched(dataset, lambda name, bounds, answer: StorageError("a.tar: failed 5 times"))
    with pytest.raises(StorageError, match="failed 5 times"):
        read_keys(away, [(0, 0)])


# -- the command line ----------------------------------------------------------------------------


def saved(pipeline: mm.Pipeline, folder: Path, num_steps: int = 0) -> Path:
    loader = mm.Loader(pipeline)
    stream = iter(loader)
    for _ in range(num_steps):
        next(stream)
    path = folder / "state.json"
    path.write_text(json.dumps(loader.state_dict()))
    return path


def test_a_step_is_printed_a_line_a_row(mmstream, corpus, tmp_path, monkeypatch):
    pipeline = make_pipeline(corpus, drop_last=False)
    state = saved(pipeline, tmp_path, num_steps=2)
    code, out, err = mmstream(corpus, "--state", state, "--step", 8, "--epoch", 3)
    assert (code, err) == (0, "")
    refs = pipeline.order.refs(3, 8)
    assert out.splitlines() == [
        f"3 8 {row} shard-{shard:06d}.tar[{index}]" + ("" if valid else " (padding)")
        for row, (shard, index, valid) in enumerate(zip(*map(np.ndarray.tolist, refs)))
    ]
    assert out.count("padding") == 11  # 97 samples, 12 a step
    words = (corpus, "--state", state, "--step", 8, "--epoch", 3, "--json")
    rows = [json.loads(line) for line in mmstream(*words, "--keys")[1].splitlines()]
    assert rows[3].keys() == {"epoch", "step", "row", "shard", "index", "valid", "key"}
    names = [shard.name for shard in pipeline.dataset.manifest.shards]
    for row in rows:
        sample = pipeline.dataset.read(names.index(row["shard"]), row["index"])
        assert row["key"] == sample["__key__"]
    without = [json.loads(line) for line in mmstream(*words)[1].splitlines()]
    assert without == [{**row, "key": None} for row in rows]

    following = mmstream(corpus, "--state", state)[1]  # where the run stands
    assert following == mmstream(corpus, "--state", state, "--step", 2, "--epoch", 0)[1]
    whole = mmstream(corpus, "--state", state, "--step", ":")[1].splitlines()
    assert whole[24:36] == following.splitlines()
    assert mmstream(corpus, "--state", state, "--step", "7:")[1].splitlines() == whole[-24:]

    monkeypatch.setattr(sys, "stdin", io.StringIO(state.read_text()))
    assert mmstream(corpus, "--state", "-")[1] == following

    saved(pipeline, tmp_path, num_steps=9)
    code, out, err = mmstream(corpus, "--state", state)  # the next epoch has not begun
    assert (code, out[:2]) == (0, "1 ")
    assert err == (
        "the state is at the start of epoch 1; for the epoch that was finished, use --epoch 0\n"
    )
    assert mmstream(corpus, "--state", state, "--epoch", 1)[2] == ""


def test_a_rank_is_told_its_own_rows(mmstream, corpus, tmp_path):
    state = saved(make_pipeline(corpus), tmp_path)
    step = ("--state", state, "--step", 5)
    whole = mmstream(corpus, *step)[1].splitlines()
    for size in (1, 2, 5):
        ranks = [
            mmstream(corpus, *step, "--rank", rank, "--world-size", size)[1].splitlines()
            for rank in range(size)
        ]
        assert sum(ranks, []) == whole
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    uneven = ("--rank", 1, "--world-size", 2, "--rows-per-rank", "9,3")
    assert mmstream(corpus, *step, *uneven)[1].splitlines() == whole[9:]


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("--step 8", 2, "an epoch has steps 0 to 7"),
        ("--step 6:9", 2, "an epoch has steps 0 to 7"),
        ("--step x", 2, "write S or A:B"),
        ("--step -1", 2, "write S or A:B"),
        ("--step 3:3", 2, "write S or A:B"),
        ("--epoch -1", 2, "--epoch"),
        ("--rank 1", 2, "--rank and --world-size: use both"),
        ("--rank 2 --world-size 2", 2, "does not exist"),
        ("--rank 0 --world-size 13", 2, "global_batch_size 12 is too small for 13 ranks"),
        ("--rank 0 --world-size 2 --rows-per-rank 6,x", 2, "write N,N,..."),
        ("--rank 0 --world-size 2 --rows-per-rank 6,7", 2, "sum to global_batch_size 12"),
        ("--check run --keys", 2, "--check compares all ranks"),
        ("--check absent.jsonl", 1, "absent.jsonl"),
    ],
)
def test_a_mistake_is_a_line_and_an_exit_code(mmstream, corpus, tmp_path, words, code, reason):
    replayed = mmstream(corpus, "--state", saved(make_pipeline(corpus), tmp_path), *words.split())
    assert replayed[0] == code
    assert reason in replayed[2]
    assert "Traceback" not in replayed[2]


@pytest.mark.parametrize(
    ("text_of", "counts", "reason"),
    [
        (json.dumps, [30, 1, 0, 26, 40], "first 5 shards are not those of the state"),
        (json.dumps, [30, 1, 0, 40], "first 5 shards are not those of the state"),
        (lambda state: "{}", COUNTS, "holds no order"),
        (lambda state: "{", COUNTS, "not the JSON of a state"),
        (lambda state: "[1]", COUNTS, "not a state of a Loader"),
        (lambda state: json.dumps(edited(state, version=99)), COUNTS, "state version 99"),
        (
            lambda state: json.dumps(edited(state, order={**state["order"], "version": 99})),
            COUNTS,
            "order version 99",
        ),
        (lambda state: json.dumps(edited(state, step=8)), COUNTS, "an epoch has 8 steps"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(mmstream, corpus, tmp_path, text_of, counts, reason):
    path = saved(make_pipeline(corpus), tmp_path)
    path.write_text(text_of(json.loads(path.read_text())))
    url = corpus if counts == COUNTS else write_corpus(tmp_path / "other", counts)
    code, out, err = mmstream(url, "--state", path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert reason in err


def test_checkpoints_of_training_hold_a_state(mmstream, corpus, tmp_path):
    pipeline = make_pipeline(corpus)
    state = mm.Loader(pipeline).state_dict()
    store = open_store(tmp_path / "run/checkpoints")
    for step in (3, 4):
        content = {"loader": json.dumps(edited(state, step=step))}
        save_checkpoint(store, Checkpoint(step, content), keep=3)
    assert mmstream(corpus, "--state", tmp_path / "run")[1].startswith("0 4 0 shard-")
    store.write("step-00000004.pt", b"damaged")
    assert mmstream(corpus, "--state", tmp_path / "run")[1].startswith("0 3 0 shard-")
    code, _, err = mmstream(corpus, "--state", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert "neither a state's JSON nor a folder with checkpoints" in err
    older = tmp_path / "run/checkpoints/step-00000003.pt"
    assert mmstream(corpus, "--state", older)[1].startswith("0 3 0 shard-")
    with pytest.raises(StateError, match="not a checkpoint of"):
        read_state(str(tmp_path / "weights.pt"))
    save_checkpoint(store, Checkpoint(5, {"model": {}}), keep=1)
    with pytest.raises(StateError, match="without a loader's state"):
        read_state(str(tmp_path / "run"))


def test_a_state_file_needs_no_torch(corpus, tmp_path):
    probe = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from mmstream.cli import main; sys.argv = ['mmstream', *sys.argv[1:]]; main()"
    )
    words = ["replay", corpus, "--state", str(saved(make_pipeline(corpus), tmp_path)), "--keys"]
    done = subprocess.run([sys.executable, "-c", probe, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 12)
