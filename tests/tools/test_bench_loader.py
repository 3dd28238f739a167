"""The benchmark beside other loaders: what it measures with, and one small table of two rows."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmstream import ImageDecoder
from tests.helpers.paths import PHOTOS
from tests.helpers.wait import wait_until
from tools.bench import corpus as bench_corpus
from tools.bench import loader as bench_loader
from tools.bench import loader_tables, process_tree
from tools.bench.loader_report import COLUMNS, verdicts
from tools.bench.loader_runs import kill_group
from tools.bench.loader_tables import Row
from tools.bench.loader_turns import start, take_turns, wait_for
from tools.bench.peers import environments
from tools.bench.peers.runners import decoded

SPENDS = """
import os, sys, time
if os.fork() == 0:
    block = b"x" * (64 << 20)
    started = time.process_time()
    while time.process_time() - started < 0.5:
        pass
    print("ready", flush=True)
    time.sleep(60)
os.wait()
"""


COUNTS = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
    for number in range(1 << 30):
        memory[:] = number.to_bytes(8, "little")
        time.sleep(float(sys.argv[2]))
"""


def test_rows_in_turns_are_measured_only_while_they_run(tmp_path: Path) -> None:
    counters = {}
    try:
        for name, pause_s in (("fast", "0"), ("slow", "0.002")):
            (tmp_path / name).write_bytes(bytes(8))
            command = [sys.executable, "-c", COUNTS, str(tmp_path / name), pause_s]
            counters[name] = start(command, tmp_path / name, os.environ)
            wait_for(counters[name], 1)
            os.killpg(counters[name].process.pid, signal.SIGSTOP)
        runs = take_turns(counters, 2, 0.3, {"fast": 0.1, "slow": 0.1})
        num_samples = {name: counter.num_samples for name, counter in counters.items()}
        assert all(len(turns) == 2 for turns in runs.values())
        assert runs["fast"][0]["samples_per_s"] > runs["slow"][0]["samples_per_s"] > 0
        time.sleep(0.1)
        assert num_samples == {name: counter.num_samples for name, counter in counters.items()}
    finally:
        for counter in counters.values():
            kill_group(counter.process)


@pytest.mark.slow
def test_a_quick_table_has_mmstream_and_webdataset_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # webdataset is a dependency of this project: no environment has to be made for it here.
    monkeypatch.setattr(environments, "peer_python", lambda _name, _cache: Path(sys.executable))
    rows = ["--row", "mmstream", "--row", "webdataset"]
    bench_loader.main(["--quick", "--samples", "384", "--table", "decoded", *rows])
    out = capsys.readouterr().out
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line[:1] == "|"]
    assert lines[0] == list(COLUMNS[1:])  # before them the empty head of the names
    ours, theirs = (line for line in lines if line[0] in ("mmstream", "webdataset"))
    assert len(ours) == len(theirs) == len(COLUMNS)
    assert (ours[1], theirs[1]) == ("uint8", "float32")
    assert theirs[3] == "1.00"
    for line in (ours, theirs):
        assert all(float(cell.replace(",", "")) > 0 for cell in line[5:])
    assert "- mmstream: " in out
    assert "webdataset 1.0.2" in out


def test_a_tree_counts_its_children_with_their_time_and_memory() -> None:
    before = process_tree.cpu_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", SPENDS], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own = process_tree.tree(process.pid)
        assert len(own) == 2
        with process_tree.PeakMemory(process.pid, share=0.5) as peak:
            wait_until(lambda: peak.num_bytes)
        assert 64 << 20 < peak.num_bytes < 256 << 20
        assert process_tree.cpu_seconds(process.pid) >= 0.5
        os.kill(own[1], 9)
    # What the child has used is not lost with it.
    assert process_tree.cpu_seconds(os.getpid()) - before >= 0.5
    assert process_tree.tree(process.pid) == [process.pid]


def test_the_verdict_compares_with_the_best_of_each_kind() -> None:
    rows = [
        Row("mmstream", "mmstream", "mmstream", "uint8"),
        Row("slow", "a", "peer", "float32"),
        Row("fast", "b", "peer", "float32"),
        Row("loop", "floor", "floor", "nothing"),
    ]
    speeds = {"mmstream": 90.0, "slow": 10.0, "fast": 30.0, "loop": 100.0}
    measured = {
        name: [{"samples_per_s": speed, "cpu_s_per_1000": 1000 / speed}]
        for name, speed in speeds.items()
    }
    assert verdicts(rows, measured) == [
        "",
        "- mmstream: 3.00x fast with 33% of its CPU time, 0.90x loop with 111% of its CPU time",
    ]


def test_both_forms_of_the_work_make_the_same_of_a_sample(tmp_path: Path) -> None:
    bench_corpus.write_tokenizer(tmp_path)
    decoded.import_torchvision()
    theirs, ours = (
        decoded.sample_work(decoded.Settings(str(tmp_path), num_batches=1, work=work))
        for work in ("torchvision", "mmstream")
    )
    mean, std = (torch.tensor(values)[:, None, None] for values in (decoded.MEAN, decoded.STD))
    for picture in bench_corpus.photographs()[::24]:
        text = picture.captions[0].encode()
        one, other = theirs(picture.jpeg, text), ours(picture.jpeg, text)
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(one[name], other[name])
        pixels = (one["image"] * std + mean) * 255
        # Pillow and torch round differently: by one, here and there.
        assert (pixels - other["image"]).square().mean() < 0.02


def test_each_peer_is_measured_as_documented_and_with_our_decoder() -> None:
    for name in ("decoded", "mixed", "large"):
        rows = loader_tables.TABLES[name].rows
        kinds = [row.kind for row in rows if row.runner in loader_tables.PEERS.values()]
        assert kinds.count("peer") == kinds.count("peer with mmstream's decoder") == 5
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            assert importlib.util.find_spec(f"{environments.RUNNERS}.decoded_{row.runner}")
        assert {row.runner for row in rows} >= set(loader_tables.NATIVE_PEERS.values())


def test_photographs_of_mixed_sizes_are_many_and_the_same_every_time(tmp_path: Path) -> None:
    for number, picture in enumerate(bench_corpus.photographs()[:3]):
        (tmp_path / f"{number}.jpg").write_bytes(picture.jpeg)
    (tmp_path / "small.jpg").write_bytes(PHOTOS[0].read_bytes())
    pictures = bench_corpus.mixed_photographs([tmp_path], 6)
    assert pictures == bench_corpus.mixed_photographs([tmp_path], 6)
    assert len({picture.jpeg for picture in pictures}) == 6
    for picture in pictures:
        height, width, _ = ImageDecoder()(picture.jpeg).shape
        assert 0.95 * bench_corpus.MIXED_PIXELS[0] < height * width <= 500 * 375
    with pytest.raises(ValueError, match="no JPEG of 50,000 pixels"):
        bench_corpus.mixed_photographs([tmp_path / "none"], 1)
