"""``mmstream plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import mmstream as mm
from tests.helpers.corpora import captioned, write_corpus

PIPELINES = """
import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=128))

def shout(sample):
    return {**sample, "txt": sample["txt"] + b"!"}

def make(dataset, **settings):
    pack = mm.Pack(128)
    return mm.Pipeline(dataset, global_batch_size=1, decode=decode, batching=pack, **settings)

pipeline = make(mm.open_dataset("corpus"))

def loud(dataset):
    return make(dataset, before=(shout,))

def mixed(mixture):
    return mm.Pipeline(mixture, global_batch_size=1, decode=decode, before=(draw,), seed=5,
                       batching=mm.Pack(128, weights_of="samples"))

def draw(sample):
    return {**sample, "txt": "x" * int(mm.sample_rng(sample, "length").integers(9, 30))}
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "pipelines_of_test.py").write_text(PIPELINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "pipelines_of_test", raising=False)
    return write_corpus(tmp_path / "corpus", [4, 3])


@pytest.mark.parametrize(("name", "extra"), [("pipeline", 0), ("make", 0), ("loud", 1)])
def test_a_pipeline_finds_the_plan_that_the_command_made(
    mmstream, corpus: str, caplog, name: str, extra: int
) -> None:
    words = ["--max-tokens", "128", "--pipeline", f"pipelines_of_test:{name}"]
    code, out, err = mmstream("plan", corpus, *words)
    assert (code, err) == (0, "")
    assert "7 samples to measure, of " in caplog.text
    import pipelines_of_test  # type: ignore[import-not-found]

    value = getattr(pipelines_of_test, name)
    plan = (value(mm.open_dataset(corpus)) if callable(value) else value).order.plan
    assert out.endswith(f"plan: {plan.url}\n")
    lengths = [len(captioned(number)["txt"]) + 2 + extra for number in range(7)]
    assert plan.member_tokens.tolist() == lengths


def test_the_sources_of_a_mixture_are_planned_with_their_seeds(
    mmstream, corpus: str, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "other", [5])
    sources = {name: {"url": name, "weight": 1} for name in ("corpus", "other")}
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources, "epoch_steps": 2}))
    words = [
        "--max-tokens",
        "128",
        "--epochs",
        "0-1",
        "--json",
        "--pipeline",
        "pipelines_of_test:mixed",
    ]
    code, out, err = mmstream("plan", "mix.json", *words)
    assert (code, err) == (0, "")
    assert [json.loads(line)["source"] for line in out.splitlines()] == ["corpus", "other"]
    import pipelines_of_test

    assert pipelines_of_test.mixed(mm.Mixture.open("mix.json")).order.is_packed


def test_the_command_says_how_full_the_packs_are(mmstream, corpus: str) -> None:
    words = ["--max-tokens", "32", "--tokenizer", "bytes"]
    code, out, err = mmstream("plan", corpus, *words, "--where", "num_tokens < 20")
    assert (code, err) == (0, "")
    patterns = (
        r"2 samples in .* full; samples of a pack lie among 1 pack",
        "left out: 5 samples, 160 tokens: condition",
        rf"plan: {corpus}/mmstream\.plan\.32-[0-9a-f]{{12}}",
    )
    for pattern, line in zip(patterns, out.splitlines(), strict=True):
        assert re.fullmatch(pattern, line), line
    code, out, err = mmstream("plan", corpus, *words, "--max-documents", 1, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["num_packs"] == 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "give one of --pipeline, --processor and --tokenizer"),
        ("--tokenizer bytes --pipeline a:b", "give one of --pipeline"),
        ("--pipeline no_such_module:b", "no module 'no_such_module' here"),
        ("--pipeline pipelines_of_test:shorn", "the module has no 'shorn'"),
        ("--pipeline pipelines_of_test", "is not a name such as module:function"),
        ("--pipeline pipelines_of_test:decode", "is Decode, and no mm.Pipeline"),
        ("--processor no_such", "no_such/config.json: No such file or directory"),
        ("--tokenizer bytes --epochs 2-1", "--epochs 2-1: give numbers such as 0-2"),
        ("--tokenizer bytes --epochs x", "--epochs x: give numbers such as 0-2"),
        ("--tokenizer bytes --where size>1", "the measure has no such column, but"),
        ("--tokenizer bytes --where size>", "'>' is not understood"),
        ("--tokenizer bytes --document-multiple-of 7", "needs a multiple of"),
        ("--tokenizer bytes --name a/b", "cannot stand in the name of a file"),
    ],
)
def test_wrong_words_are_refused(mmstream, corpus: str, words: str, reason: str) -> None:
    code, out, err = mmstream("plan", corpus, "--max-tokens", 128, *words.split())
    assert (code, out) == (2, "")
    assert reason in err
