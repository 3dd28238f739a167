"""``mmstream info --plan G``: what a run asks of object storage."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.forecast.reads import forecast_reads
from mmstream.packing.plan_file import write_plan
from tests.helpers.corpora import write_corpus
from tests.helpers.packed_texts import plan_texts, write_texts

PAPER = ["--samples", "1000000", "--mean-bytes", "110000"]
SMALL_PAPER = ["--samples", "50000", "--mean-bytes", "110000"]
"""It is larger than its windows."""


@pytest.fixture
def info(mmstream):
    """Run ``mmstream info``; return (exit code, stdout, stderr)."""
    return partial(mmstream, "info")


def test_it_says_what_the_forecast_of_a_dataset_says(info, corpus):
    code, out, _ = info(corpus, "--plan", 8, "--ranks", 2, "--json")
    about = json.loads(out)
    dataset = mm.open_dataset(corpus)
    forecast = forecast_reads(dataset, dataset.plan_order(global_batch_size=8), [0, 4, 8])
    assert code == 0
    assert about["epoch"]["num_requests"] == forecast.epoch.num_requests
    assert about["start"]["num_requests"] == forecast.start.num_requests
    assert (about["num_samples"], about["num_nodes"], about["is_exact"]) == (96, 1, True)
    assert about["per_second"] is about["price"] is None


def test_a_corpus_on_paper_has_speed_price_memory_and_a_cache(info):
    prices = ["--request-price", "0.5", "--egress-price", "0.01"]
    words = ["--plan", "256", "--ranks", "16", "--epochs", "3", "--samples-per-second", "1000"]
    about = json.loads(info(*PAPER, *words, *prices, "--cache-bytes", 275 * 10**8, "--json")[1])
    epoch, total = about["epoch"], about["total"]
    assert about["num_nodes"] == 2
    assert epoch["num_bytes"] == pytest.approx(1.1e11, rel=0.01)
    assert epoch["num_requests"] == pytest.approx(1.1e11 / 1e9 * 297, rel=0.05)
    assert about["hit_rate"] == pytest.approx(0.5, rel=0.01)  # lanes: each machine reads 55 GB
    assert total["num_bytes"] == pytest.approx(2 * epoch["num_bytes"], rel=0.01)
    assert about["price"]["epoch"] == pytest.approx(
        epoch["num_requests"] / 1e3 * 0.5 + epoch["num_bytes"] / 1e9 * 0.01
    )
    assert about["per_second"]["num_bytes"] == pytest.approx(1000 * 110_000, rel=0.01)
    assert about["window_bytes"] == pytest.approx((2 << 30) / 16, rel=0.01)


def test_more_requests_than_a_prefix_of_s3_answers_are_a_warning(info):
    words = (*SMALL_PAPER, "--plan", 256, "--ranks", 8, "--samples-per-second")
    assert "warning" not in info(*words, 100_000)[1]
    out = info(*words, 1_000_000)[1]
    assert "warning: the busiest prefix would get more requests than S3 promises" in out


def test_a_start_that_reads_less_has_no_negative_bytes(info):
    words = ("--samples", 111, "--mean-bytes", 170_000, "--plan", 8, "--ranks", 3)
    assert json.loads(info(*words, "--json")[1])["start"]["num_bytes"] < 0
    assert " MB less at each start" in info(*words)[1]


def test_videos_that_are_read_by_ranges_cost_what_is_said_of_them(info):
    videos = ["--samples", "10000", "--mean-bytes", "20000000", "--plan", "64", "--json"]
    whole = json.loads(info(*videos)[1])
    ranged = json.loads(info(*videos, "--ranged-bytes", 3_000_000, "--ranged-requests", 14)[1])
    assert whole["epoch"]["num_requests"] == pytest.approx(whole["num_samples"])
    assert ranged["epoch"]["num_requests"] == pytest.approx(15 * ranged["num_samples"])
    assert ranged["epoch"]["num_bytes"] == pytest.approx(
        (3_000_000 + 65_536) * ranged["num_samples"], rel=0.01
    )


def test_packs_of_a_plan_are_rows(info, tmp_path: Path):
    folder = write_texts(tmp_path / "texts", [200, 200])
    plan = plan_texts(mm.open_dataset(folder))
    write_plan(plan, f"{folder}/mmstream.plan.small")
    about = json.loads(info(folder, "--plan", 8, "--pack-plan", "small", "--json")[1])
    assert about["num_steps"] == plan.num_units // 8
    assert about["num_samples"] > 8 * about["num_steps"]
    other = write_texts(tmp_path / "other", [100])
    code, _, err = info(other, "--plan", 8, "--pack-plan", f"{folder}/mmstream.plan.small")
    assert code == 2
    assert "mmstream.plan.small: is of other shards than" in err


def test_packs_of_a_mixture_have_a_plan_of_one_name_in_each_source(info, tmp_path: Path):
    for name, counts in {"web": [200, 100], "books": [150]}.items():
        folder = write_texts(tmp_path / name, counts)
        write_plan(plan_texts(mm.open_dataset(folder)), f"{folder}/mmstream.plan.small")
    mixture = tmp_path / "mix.json"
    sources = {name: {"url": name, "weight": 1} for name in ("web", "books")}
    mixture.write_text(json.dumps({"sources": sources, "epoch_steps": 20}))
    words = (mixture, "--plan", 8, "--pack-plan", "small", "--weights-of", "tokens")
    about = json.loads(info(*words, "--json")[1])
    assert about["num_steps"] == 20
    assert about["num_samples"] > 8 * 20
    code, _, err = info(mixture, "--plan", 8, "--pack-plan", f"{tmp_path}/web/small")
    assert code == 2
    assert "--pack-plan of a mixture is a name: each source has a plan of this name" in err


PIPELINE = """
import mmstream as mm

def first_bytes(data):
    return data[:100]

first_bytes.reads_ranges = True

def of(dataset):
    decode = mm.Decode({"bin": first_bytes}, min_lazy_bytes=1 << 18)
    return mm.Pipeline(dataset, global_batch_size=4, decode=decode)
"""


def test_a_pipeline_says_what_its_decoders_read(info, tmp_path: Path, monkeypatch):
    name = "pipelines_of_forecast"
    (tmp_path / f"{name}.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_corpus(tmp_path / "films", [8, 8], lambda _: {"bin": bytes(1_000_000)})
    words = (folder, "--plan", 4, "--pipeline", f"{name}:of")
    whole = json.loads(info(folder, "--plan", 4, "--json")[1])
    ranged = json.loads(info(*words, "--json")[1])
    assert ranged["large_samples"] == {
        "least_bytes": 1 << 18,
        "reads": {"num_requests": 0.0, "num_bytes": 0.0},  # all is in the first bytes
    }
    assert ranged["epoch"]["num_bytes"] == 16 * 65_536
    assert ranged["num_sample_bytes"] == whole["num_sample_bytes"] > 16e6
    assert "\nlarge samples: the decoders read 0 bytes of each, in 0.0 requests" in info(*words)[1]


def test_windows_that_are_too_large_for_the_machine_are_read_sample_by_sample(info, caplog):
    words = (*SMALL_PAPER, "--plan", 256, "--json")
    about = json.loads(info(*words, "--memory-bytes", 4 << 30)[1])
    assert about["epoch"]["num_requests"] == pytest.approx(about["num_samples"])
    assert "samples are read one by one" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give the URL of a dataset"),
        (("--plan", 8), "give URL, or --samples and --mean-bytes of a corpus"),
        ((*PAPER, "--plan", 8, "--ranged-bytes", 1), "--ranged-bytes and --ranged-requests go"),
        ((*PAPER, "--plan", 8, "--pipeline", "a:b"), "--pipeline decodes samples: give URL"),
        (("shards/", "--ranks", 8), "--ranks would do nothing here: it goes with --plan"),
        ((*PAPER, "--plan", 8, "--stats"), "--stats would do nothing here: it goes without --plan"),
        (("shards/", "--samples", 8), "--samples would do nothing here"),
        (("shards/", "--stats", "--keys", 8), "--keys would do nothing here"),
        (("shards/", "--plan", 8, "--mean-bytes", 10), "--mean-bytes is for a corpus without URL"),
        (("--plan", 8, "--samples", 10, "--mean-bytes", 10), "a sample in a tar has 1024 bytes"),
    ],
)
def test_wrong_words_are_a_message(info, words, message):
    code, _, err = info(*words)
    assert code != 0
    assert message in err
