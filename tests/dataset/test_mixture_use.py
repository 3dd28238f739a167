"""Mixtures in use: their files, the commands, metrics, notebooks, bad samples, and the page."""

from __future__ import annotations

import html
import json
import os

import pytest
import torch

import mmstream as mm
from mmstream.dataset.bad_list import BAD_NAME, write_bad
from mmstream.decoding.bad_samples import quarantined_refs
from mmstream.storage import open_store
from mmstream.train.distributed import TrainProcess
from mmstream.train.metrics import Meter
from tests.helpers.bad_corpus import policy, write_tiny
from tests.helpers.corpora import write_corpus
from tests.helpers.topology import run

COUNTS = {"a": [40, 0, 31], "b": [7], "c": [130]}
WEIGHTS = {"a": 0.7, "b": 0.05, "c": 0.25}


def text_of(sources=None, **settings):
    sources = sources or {n: {"url": n, "weight": w} for n, w in WEIGHTS.items()}
    return json.dumps({"sources": sources, **(settings or {"epoch_steps": 20})})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three corpora and ``mix.json``."""
    root = tmp_path_factory.mktemp("mix")
    for name, counts in COUNTS.items():
        write_corpus(root / name, counts)
    (root / "mix.json").write_text(text_of())
    return root


# -- the file -------------------------------------------------------------------------------------


def test_a_file_gives_the_mixture_that_it_describes(folder, tmp_path, monkeypatch):
    path = tmp_path / "mix.json"
    sources = {
        "c": {"url": str(folder / "c"), "weight": 3},
        "a": {"url": "../mix/a", "weight": 0.7},
        "one": {"url": "deep/shard-{000000..000002}.tar", "weight": 0},
    }
    (tmp_path / "deep").symlink_to(folder / "a")
    (tmp_path.parent / "mix").symlink_to(folder)
    changes = {"7": {"a": 1, "c": 0, "one": 2.5}}
    path.write_text(text_of(sources, epoch_steps=12, changes=changes))
    mixture = mm.Mixture.open(path)
    assert list(mixture.datasets) == ["c", "a", "one"]
    assert [len(dataset) for dataset in mixture.datasets.values()] == [130, 71, 71]
    assert mixture.weights == {0: {"c": 3, "a": 0.7, "one": 0}, 7: {"a": 1, "c": 0, "one": 2.5}}
    assert mixture.epoch_steps == 12
    monkeypatch.chdir(tmp_path)
    assert mm.Mixture.open("mix.json").weights == mixture.weights
    path.write_text(text_of(sources, stop="all"))
    assert mm.Mixture.open(f"file://{path}").epoch_steps == "all"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON: Expecting value"),
        ("[" * 100_000, "too deep"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `sources`"),
        (text_of({"a": {"url": "a"}}), "sources.a: .*missing required field `weight`"),
        (text_of({"a": {"url": "a", "weight": "1"}}), "sources.a.weight: Expected"),
        (text_of({"a": {"url": "a", "weight": True}}), "sources.a.weight: Expected"),
        (text_of({"a": {"url": "a", "weight": -1}}), "sources.a.weight: Expected .* >= 0"),
        (text_of({"a": {"url": "", "weight": 1}}), "sources.a.url: is empty"),
        (
            text_of({"a": {"url": "x" * 5000, "weight": 1}}, stop="all"),
            "no file can have this name",
        ),
        (text_of({"a": {"url": "a{", "weight": 1}}, stop="all"), "a.url: .*a brace is not closed"),
        (text_of({"a": {"url": "\ud800", "weight": 1}}), "surrogates not allowed"),
        (text_of({"a": {"url": "a", "weight": 1, "wait": 2}}), "sources.a: .* unknown .*`wait`"),
        ('{"sources": {"a": {"url": "a", "weight": NaN}}}', "NaN is not a number"),
        (
            '{"sources": {"a": {"url": "a", "weight": 1e999}}, "stop": "all"}',
            r"'a': .*, inf\)}: give \{name: ",
        ),
        ('{"sources": {"a": 1, "a": 1}}', "key 'a' stands there twice"),
        ('{"sources": {}, "epoch_steps": 3}', "sources: Expected"),
        (text_of(epoch_steps=0), "epoch_steps: Expected `int` >= 1"),
        (text_of(stop="last"), "stop: Invalid enum value 'last'"),
        (text_of(steps=3), "unknown field `steps`"),
        (text_of(stop="all", epoch_steps=3), "say when an epoch ends"),
        (text_of(epoch_steps=3, changes={"soon": {}}), "changes: Expected `int`, got `str`"),
        (text_of(epoch_steps=3, changes={"5": {"a": "x"}}), "changes.5.a: Expected"),
        (text_of(epoch_steps=3, changes={"5": {"a": 1}}), "changes at step 5 name"),
        (
            text_of({"a": {"url": "a", "weight": 1}}, epoch_steps=3, changes={"5": {"a": 0}}),
            r"changes\.5: weights \[0\]: at least one",
        ),
        (text_of({"a": {"url": "a", "weight": 0}}, stop="all"), "at least one must be above 0"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_file_and_key(folder, tmp_path, text, reason):
    for name in COUNTS:
        (tmp_path / name).symlink_to(folder / name)
    path = tmp_path / "mix.json"
    path.write_text(text)
    with pytest.raises(mm.ConfigError, match=reason) as error:
        mm.Mixture.open(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_what_is_wrong_with_a_source_says_which_it_is(folder, tmp_path):
    path = tmp_path / "mix.json"
    (tmp_path / "empty").mkdir()
    for url, kind, reason in (
        ("none", mm.errors.ManifestError, "no such folder"),
        ("empty", mm.errors.ManifestError, "neither mmstream.json nor tars"),
        ("none.tar", FileNotFoundError, "no such tar"),
        ("{a,s3://b/c}.tar", mm.ConfigError, "local tars and remote"),
    ):
        sources = {"good": {"url": str(folder / "a"), "weight": 1}, "b": {"url": url, "weight": 1}}
        path.write_text(text_of(sources, stop="all"))
        with pytest.raises(kind) as error:
            mm.Mixture.open(path)
        assert str(error.value).startswith(f"{path}: sources.b: ")
        assert reason in str(error.value)


def test_what_is_no_mixture_says_what_it_is(folder):
    os.mkfifo(folder / "fifo.json")
    for name, kind, reason in (
        ("a", mm.ConfigError, r"a: a folder; a file is needed; .*mm\.open_dataset"),
        ("fifo.json", mm.ConfigError, r"fifo\.json: a FIFO; a file is needed"),
        ("absent.json", FileNotFoundError, r"absent\.json"),
        ("a/mmstream.json", mm.ConfigError, "a dataset's manifest"),
    ):
        with pytest.raises(kind, match=reason):
            mm.Mixture.open(folder / name)
    with pytest.raises(mm.errors.ManifestError, match=r"mixture.s file with mm\.Mixture\.open"):
        mm.open_dataset(folder / "mix.json")


@pytest.mark.s3
def test_a_mixture_in_a_bucket_has_the_local_batches(folder, s3, tmp_path, mmstream):
    root = f"{s3}/{tmp_path.name}"
    for name in COUNTS:
        for file in (folder / name).iterdir():
            open_store(f"{root}/data/{name}").write(file.name, file.read_bytes())
    sources = {n: {"url": f"../data/{n}", "weight": w} for n, w in WEIGHTS.items()}
    open_store(f"{root}/mixes").write("mix.json", text_of(sources).encode())
    pipelines = [
        mm.Pipeline(mm.Mixture.open(file), global_batch_size=8)
        for file in (f"{root}/mixes/mix.json", folder / "mix.json")
    ]
    assert pipelines[0].order.identity() == pipelines[1].order.identity()
    assert run(pipelines[0], 2, 1, range(3)).steps == run(pipelines[1], 1, 2, range(3)).steps
    code, out, _ = mmstream("info", f"{root}/mixes/mix.json", "--keys", 1)
    assert code == 0
    assert f"c: <Dataset {root}/data/c: 130 samples" in out
    sources["a"]["url"] = "../../../../elsewhere/a"
    open_store(f"{root}/mixes").write("bad.json", text_of(sources).encode())
    with pytest.raises(mm.ConfigError, match="leads out of the bucket"):
        mm.Mixture.open(f"{root}/mixes/bad.json")


# -- the commands ---------------------------------------------------------------------------------


def test_info_tells_weights_epoch_and_sources(folder, mmstream):
    code, out, _ = mmstream("info", folder / "mix.json", "--keys", 1)
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "mixture of 3 sources, 208 samples; an epoch is 20 steps"
    assert lines[1] == "  weights: a 0.7, b 0.05, c 0.25"
    assert [line.split()[0] for line in lines if "<Dataset" in line] == [
        "a:",
        "b:",
        "c:",
    ]
    about = json.loads(mmstream("info", folder / "mix.json", "--json")[1])
    assert about["weights"] == {"0": WEIGHTS}
    assert (about["epoch_steps"], about["num_samples"], about["num_shards"]) == (20, 208, 5)
    assert about["sources"]["b"]["keys"][0] == "000000"


# -- metrics and bad samples ----------------------------------------------------------------------


def broken(tmp_path, **settings):
    """A source that is all bad among good ones, as a pipeline."""
    urls = {
        "good": write_tiny(tmp_path / "good", [90]),
        "web/bad": write_tiny(tmp_path / "bad", [9, 40], bad=range(49)),
    }
    datasets = {name: mm.open_dataset(url) for name, url in urls.items()}
    mixture = mm.Mixture(
        {"good": (datasets["good"], 3), "web/bad": (datasets["web/bad"], 1)}, epoch_steps=40
    )
    return datasets, mm.Pipeline(mixture, global_batch_size=8, bad_samples=policy(**settings))


@pytest.mark.slow
def test_metrics_count_the_valid_rows_of_each_source(tmp_path):
    loader = mm.Loader(broken(tmp_path)[1])
    meter = Meter(mm.to_device(loader, "cpu"), TrainProcess(torch.device("cpu")))
    lines = []
    for batch in loader:
        meter.arrived([batch])
        if batch["__lineage__"].step % 2:
            lines.append(meter.read(torch.zeros(()), torch.zeros(()), num_steps=1, lr=0.1))
    assert {tuple(line["sources"]) for line in lines} == {("good",)}
    assert sum(line["sources"]["good"] for line in lines) == 240
    assert lines[-1]["num_bad"] == 80


def test_a_source_that_is_all_bad_stops_the_run_however_rare_it_is(tmp_path):
    _, pipeline = broken(tmp_path, max_consecutive=20, quarantine=str(tmp_path / "logs"))
    loader = mm.Loader(pipeline)
    with pytest.raises(mm.errors.BadSampleLimitError, match="in a row"):
        list(loader)
    assert loader.stats.consecutive["good"] == 0
    assert 20 < loader.stats.consecutive["web/bad"] == loader.stats.num_bad <= 22
    assert loader.state_dict()["step"] in (9, 10)


@pytest.mark.slow
def test_a_quarantine_of_a_mixture_becomes_a_sources_bad_list(tmp_path, mmstream):
    datasets, pipeline = broken(tmp_path, quarantine=str(tmp_path))
    list(mm.Loader(pipeline))
    file = tmp_path / "quarantine-rank0.jsonl"
    refs = quarantined_refs([file], datasets["web/bad"], "web/bad")
    assert len(refs) == 49
    assert len(quarantined_refs([file], datasets["good"], "good")) == 0
    with pytest.raises(mm.ConfigError, match="say which source"):
        quarantined_refs([file], datasets["web/bad"])
    limited = broken(tmp_path, max_samples=3, quarantine=str(tmp_path / "more"))[1]
    with pytest.raises(
        mm.errors.BadSampleLimitError, match="verify URL --decode --write-bad` leaves out"
    ):
        list(mm.Loader(limited))
    words = ("--quarantine", file, "--source", "web/bad")
    code, out, _ = mmstream("verify", tmp_path / "bad", *words)
    assert (code, out[:32]) == (0, "49 of 49 samples are left out of")
    assert len(mm.open_dataset(tmp_path / "bad").bad) == 49
    assert json.loads(file.read_text().splitlines()[0])["reason"].startswith("web/bad/shard-")


def test_a_bad_list_that_came_later_is_refused_until_it_is_moved_away(tmp_path):
    datasets, pipeline = broken(tmp_path)
    loader = mm.Loader(pipeline)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    write_bad(datasets["web/bad"], [(0, 3)])
    with pytest.raises(mm.StateError, match=r"or move mmstream\.bad\.json away"):
        mm.Loader(broken(tmp_path)[1]).load_state_dict(state)
    (tmp_path / "bad" / BAD_NAME).rename(tmp_path / "away")
    again = mm.Loader(broken(tmp_path)[1])
    again.load_state_dict(state)
    assert again.state_dict() == state


# -- notebooks ------------------------------------------------------------------------------------


def test_a_batch_of_a_mixture_tells_the_source_of_each_row(folder):
    datasets = {name: mm.open_dataset(folder / name) for name in COUNTS}
    names = {"a": "<b>a</b>", "b": "b", "c": "c"}
    mixture = mm.Mixture({names[n]: (datasets[n], w) for n, w in WEIGHTS.items()}, epoch_steps=20)
    batch = next(iter(mm.Loader(mm.Pipeline(mixture, global_batch_size=10))))
    page = mm.show(batch)._repr_html_()
    rows = zip(batch["__source__"], batch["__key__"], strict=True)
    for text in ("7 &lt;b&gt;a", *(html.escape(f"{source}: {key}") for source, key in rows)):
        assert text in page
    assert "<b>a</b>" not in page


def test_a_mixture_without_any_weight_can_still_be_looked_at(folder):
    mixture = mm.Mixture({"a": (mm.open_dataset(folder / "a"), 0)}, stop="all")
    assert "weight 0" in repr(mixture)
    assert "until" not in mixture.epoch_text
