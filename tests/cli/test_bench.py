"""``mmstream bench`` and ``mmstream info --plan``: what a run gets here, and asks of storage."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.cli import pipeline as bench_module
from tests.helpers.corpora import captioned, write_corpus

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(mmstream: Run) -> Run:
    return partial(mmstream, "bench")


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take seconds to start. One test has them."""
    monkeypatch.setattr(bench_module, "_settings", lambda _: [(0, 1), (0, 2)])


ROW = r"([\d,]+) +([\d,.]+) +[\d.]+ +[\d.,]+ [kMG]?B"


@pytest.mark.slow
def test_workers_and_threads_are_tried(bench: Run, corpus: str) -> None:
    code, out, err = bench(corpus, "--seconds", 1, "--image-size", 32, "--global-batch-size", 8)
    assert (code, err) == (0, "")
    tried = re.findall(rf"^(\d+) x (\d+) +{ROW}$", out, re.M)
    assert {int(num_workers) > 0 for num_workers, *_ in tried} == {True, False}


@pytest.mark.usefixtures("without_workers")
def test_the_report_names_a_setting_and_a_speed_and_writes_nothing(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fields_of(number: int) -> dict[str, bytes]:
        return {"jpg": b"no picture"} if number == 3 else captioned(number)

    folder = write_corpus(tmp_path / "shards", [40], fields_of)
    monkeypatch.chdir(tmp_path)
    words = ("--seconds", 0.3, "--image-size", 32, "--global-batch-size", 8)
    code, out, err = bench(folder, *words)
    assert (code, err) == (0, "")
    first, heads, *rows, reading, limit, use = out.splitlines()
    assert first == (
        f"{folder}: 5 steps of 8 rows an epoch; pictures were decoded to 32x32; --pipeline "
        "measures your own"
    )
    assert heads.split()[:4] == ["workers", "x", "threads", "samples/s"]
    speeds = {
        f"{match[1]} x {match[2]}": int(match[3].replace(",", ""))
        for match in re.finditer(rf"^(\d) x (\d) +{ROW}$", "\n".join(rows), re.M)
    }
    assert speeds.keys() == {"0 x 1", "0 x 2"}
    assert min(speeds.values()) > 0
    assert re.fullmatch(rf"reading alone +{ROW}", reading)
    assert limit.startswith("limit: ")
    match = re.fullmatch(
        r"use: num_workers=0, num_threads=(\d); a training step that takes ([\d.,]+) ms or longer "
        "does not wait",
        use,
    )
    assert match is not None
    step_ms = 8000 / speeds[f"0 x {match[1]}"]
    assert float(match[2].replace(",", "")) == pytest.approx(step_ms, rel=0.1, abs=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


PIPELINES = """
import mmstream as mm

def of(dataset):
    return mm.Pipeline(dataset, global_batch_size=4)

done = mm.Pipeline(mm.open_dataset({other!r}), global_batch_size=2)
number = 3
"""


@pytest.mark.usefixtures("without_workers")
def test_a_pipeline_of_the_user_is_measured_with_the_data_of_the_url(
    bench: Run, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_corpus(tmp_path / "other", [3])
    name = "pipelines_of_bench"
    (tmp_path / f"{name}.py").write_text(PIPELINES.format(other=other))
    monkeypatch.syspath_prepend(tmp_path)
    for attribute, num_steps, num_rows in (("of", 24, 4), ("done", 48, 2)):
        out = bench(corpus, "--pipeline", f"{name}:{attribute}", "--seconds", 0.2)[1]
        begin = f"{corpus}: {num_steps} steps of {num_rows} rows an epoch; --pipeline was measured"
        assert out.startswith(begin)
    code, _, err = bench(corpus, "--pipeline", f"{name}:number")
    assert (code, f"{name}:number: is int, and no mm.Pipeline" in err) == (2, True)
    code, _, err = bench(corpus, "--pipeline", f"{name}:of", "--image-size", 9)
    assert (code, "--image-size and --global-batch-size go without --pipeline" in err) == (2, True)


@pytest.mark.usefixtures("without_workers")
def test_texts_are_measured_as_they_are(bench: Run, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [5], lambda number: {"txt": b"words %d" % number})
    code, out, _ = bench(folder, "--seconds", 0.2)
    assert code == 0
    assert "1 step of 5 rows an epoch; nothing was decoded; --pipeline measures your own" in out
    code, _, err = bench(folder, "--image-size", 32)
    assert (code, "--image-size: the samples have no pictures" in err) == (2, True)


@pytest.mark.usefixtures("without_workers")
def test_a_bake_is_measured_as_it_was_baked(bench: Run, corpus: str, tmp_path: Path) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    source = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=4, decode=decode)
    mm.bake(source, tmp_path / "baked", progress=False)
    out = bench(tmp_path / "baked", "--seconds", 0.2)[1]
    assert "; fields were read as they were baked; --pipeline measures your own" in out


def test_a_planned_run_asks_about_so_much_of_storage(mmstream: Run, corpus: str) -> None:
    code, out, err = mmstream("info", corpus, "--plan", 8, "--ranks", 2)
    assert (code, err) == (0, "")
    plan, num_bytes, requests, memory, prefix = out.splitlines()
    assert plan == "plan: 12 steps of 8 rows per epoch; grid (1, 1), 2 ranks"
    assert re.fullmatch(r"bytes: [\d.]+ [kM]B an epoch", num_bytes)
    assert re.fullmatch(r"requests: about [\d,]+ an epoch, [\d,]+ a GB", requests)
    assert re.fullmatch(r"memory: up to .* of windows on a rank, beside what is read ahead", memory)
    assert prefix.startswith("S3: a prefix answers 5,500 requests/s, which is about ")
    code, _, err = mmstream("info", corpus, "--ranks", 2)
    assert (code, "--ranks would do nothing here: it goes with --plan" in err) == (2, True)
    code, _, err = mmstream("info", corpus, "--plan", 8, "--json")
    assert (code, "--json would do nothing here: it goes without --plan" in err) == (2, True)
    code, _, err = mmstream("info", corpus, "--plan", 1000)
    assert (code, "--plan" in err) == (2, True)
