"""``mmstream bench``: its report, its JSON, and which pipeline it measures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.forecast import bench as measuring
from mmstream.forecast.connections import ConnectionSpeed
from tests.helpers.corpora import write_corpus
from tests.helpers.forecasts import forecast_of, speed

Run = Any


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, mmstream: Run) -> Run:
    """Run `mmstream bench` in this process; return (exit code, stdout, stderr)."""
    monkeypatch.setattr(measuring, "LEAST_ROUND_S", 0.01)
    return partial(mmstream, "bench")


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "settings_to_try", lambda _: [(0, 1)])


def test_the_report_names_a_setting_and_a_speed(run: Run, corpus: str) -> None:
    code, out, err = run(corpus, "--seconds", 0.5, "--image-size", 32, "--global-batch-size", 8)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{corpus}: 96 samples an epoch, ")
    assert "; 12 steps; " in lines[0]
    assert [line.split()[0] for line in lines if line[:13].strip().isdecimal()] == [
        *("1", "2", "4", "8", "16", "32", "64")
    ]
    for words in ("CPU time of a sample, ", "limit: ", "use: num_workers=", "prediction: "):
        assert any(line.startswith(words) for line in lines), words
    assert "  undecoded " in out
    assert "  once more " in out
    assert "pictures were decoded to 32x32. Texts were not tokenized." in lines[-1]
    assert "connections: the reader process" not in out  # there is none on a local disk


def test_a_reader_process_says_what_it_had_in_flight(
    run: Run, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = speed(2, 1, 500.0, mean_in_flight=48.2, num_throttled=3, limit="storage")
    busy = ConnectionSpeed(2, 70.0, 0.05, 0.06, 0.07, 10, 4, 1)
    forecasts = [
        forecast_of(chosen, full_window_bytes=2.1e9, connections=(busy,)),
        forecast_of(
            replace(chosen, other_cores=0.5), full_window_bytes=99e9, window_bytes=6_000_000_000
        ),
    ]
    monkeypatch.setattr(measuring, "bench", lambda *_, **__: forecasts.pop(0))
    out = run(corpus)[1]
    for words in (
        "connections: the reader process finds their number by itself; it had 48 requests in",
        "windows: 2.1 GB on this rank when they are full, which fits in memory",
        "the storage asked 3 times for fewer requests",
        "limit: storage: it gives no more bytes a second",
        "4 answers asked for fewer requests  1 requests failed",
        "prediction: 500 samples/s on this rank, an epoch in 3 s; a training step of 10 rows",
    ):
        assert words in out, words
    assert "other programs" not in out
    out = run(corpus)[1]
    assert "window_bytes=6000000000 is not" in out
    assert "other programs took 0.5 cores meanwhile: a run without them is faster" in out


@pytest.mark.usefixtures("without_workers")
def test_the_json_has_all_figures(run: Run, corpus: str) -> None:
    code, out, _ = run(corpus, "--seconds", 0.2, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["samples_per_s"] == figures["chosen"]["samples_per_s"] > 0
    assert figures["epoch_s"] > 0
    assert figures["batch_size"] == 64
    assert {speed["num_connections"] for speed in figures["connections"]} >= {1, 64}


PIPELINES = """
import mmstream as mm

def of(dataset):
    return mm.Pipeline(dataset, global_batch_size=4)

done = mm.Pipeline(mm.open_dataset({other!r}), global_batch_size=2)
number = 3
"""


@pytest.mark.usefixtures("without_workers")
def test_a_pipeline_of_the_user_is_measured_with_the_data_of_the_url(
    run: Run, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_corpus(tmp_path / "other", [3])
    name = "pipelines_of_bench"
    (tmp_path / f"{name}.py").write_text(PIPELINES.format(other=other))
    monkeypatch.syspath_prepend(tmp_path)
    for attribute, rows in (("of", 4), ("done", 2)):
        out = run(corpus, "--pipeline", f"{name}:{attribute}", "--seconds", 0.2, "--json")[1]
        figures = json.loads(out)
        assert (figures["batch_size"], figures["num_samples"]) == (rows, 96)
        assert figures["url"] == corpus
    code, _, err = run(corpus, "--pipeline", f"{name}:number")
    assert (code, f"{name}:number: is int, and no mm.Pipeline" in err) == (2, True)
    code, _, err = run(corpus, "--pipeline", f"{name}:of", "--image-size", 9)
    assert (code, "--image-size and --global-batch-size go without --pipeline" in err) == (2, True)


@pytest.mark.usefixtures("without_workers")
def test_texts_are_measured_as_they_are(run: Run, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [5], lambda number: {"txt": b"words %d" % number})
    code, out, _ = run(folder, "--seconds", 0.2)
    assert code == 0
    assert "nothing was decoded. Texts were not tokenized." in out
    assert "; 1 step; " in out
    assert "the dataset has fewer than 64 samples, so a step has 5: figures of a larger" in out
    code, _, err = run(folder, "--image-size", 32)
    assert (code, "--image-size: the samples have no pictures" in err) == (2, True)


@pytest.mark.usefixtures("without_workers")
def test_a_bake_is_measured_as_it_was_baked(run: Run, corpus: str, tmp_path: Path) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    source = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=4, decode=decode)
    mm.bake(source, tmp_path / "baked", progress=False)
    out = run(tmp_path / "baked", "--seconds", 0.2)[1]
    assert "fields were read as they were baked. --pipeline measures your own." in out
