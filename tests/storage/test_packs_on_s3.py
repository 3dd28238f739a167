"""Packs from a real S3 server: measure, plan, and training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.storage import open_store
from tests.helpers.corpora import write_corpus
from tests.helpers.forked_ranks import run_starts
from tests.helpers.logged_runs import require_exact
from tests.helpers.packed_texts import write_texts
from tests.helpers.packs_pipeline import pipeline as packs_pipeline

pytestmark = pytest.mark.s3


def files_of(url: str) -> dict[str, bytes]:
    """Return the files of measure and plan."""
    files = {}
    for folder in open_store(url).folders():
        if "mmstream." in folder:
            store = open_store(f"{url}/{folder}")
            files |= {f"{folder}/{name}": store.read(name) for name in store.list()}
    return files


def test_measure_and_plan_on_the_server_are_those_of_a_folder(
    s3: str, tmp_path: Path, mmstream: Callable[..., tuple[int, str, str]]
) -> None:
    urls = [write_texts(folder, [90, 90]) for folder in (tmp_path / "texts", f"{s3}/texts")]
    for url in urls:
        assert mmstream("plan", url, "--max-tokens", 128, "--tokenizer", "bytes")[0] == 0
    local, remote = map(files_of, urls)
    assert local.keys() == remote.keys()
    assert len({name.partition("/")[0] for name in local}) == 2
    assert [name for name in local if local[name] != remote[name]] == []


def chat(number: int) -> dict[str, bytes]:
    """A conversation of some words."""
    messages = [
        {"role": "user", "content": "Which number? " * (1 + number % 4)},
        {"role": "assistant", "content": f"It is {number}. " * (1 + number * 7 % 5)},
    ]
    return {"json": json.dumps({"messages": messages}).encode()}


@pytest.mark.slow
def test_a_killed_run_on_packs_goes_on_with_one_rank_and_with_three(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, out = write_corpus(f"{s3}/chats", [120, 120], chat, checksums=True), tmp_path / "run"
    monkeypatch.setenv("PACKS_CACHE", str(tmp_path / "cache"))
    plan = mm.plan(packs_pipeline(mm.open_dataset(url)), num_workers=0, progress=False)
    num_steps = 2 * (plan.num_units // 6)
    command = [
        url, "--model", "vlm", "--image-size", "16", "--device", "cpu", "--log-keys", "--epochs",
        "2", "--checkpoint-every", "1", "--num-workers", "0",
    ]  # fmt: skip
    command += ["--pipeline", "tests.helpers.packs_pipeline:pipeline"]
    run_starts(command, out, [(2, 3), (1, 3), (3, None)])
    lines = require_exact(url, out, num_steps, plan)
    worlds = [line["world_size"] for line in lines]
    assert worlds[0] == 2
    assert {1, 3} <= set(worlds)
    assert worlds == sorted(worlds, key=[2, 1, 3].index)
    assert lines[-1]["cache_hit_fraction"] > 0.5  # by what the starts before it have kept
