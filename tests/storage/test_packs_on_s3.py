"""Packs from a real S3 server: measure, plan, batches behind faults, and training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mmstream as mm
from mmstream.cli import cli
from mmstream.storage import open_store
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.forked_ranks import run_starts
from tests.helpers.http_fault_proxy import FaultProxy, Faults
from tests.helpers.logged_runs import require_exact
from tests.helpers.packed_texts import write_texts
from tests.helpers.packs_pipeline import pipeline as packs_pipeline

pytestmark = pytest.mark.s3

COUNTS = [150, 150, 150, 150]
MAX_TOKENS = 128
DECODE = mm.Decode(text=mm.TextDecoder(byte_tokenizer(chat=True), max_length=MAX_TOKENS))
FAULTS = Faults(
    latency_s=0.002,
    reset=0.02,
    truncate=0.02,
    busy=0.02,
    flip=0.01,
    stall=0.003,
    retry_after_s=0,
    only=r"\.tar$",
)


@pytest.fixture(scope="module")
def corpora(s3: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same texts in a folder and on the server."""
    local = write_texts(tmp_path_factory.mktemp("texts"), COUNTS, checksums=True)
    return local, write_texts(f"{s3}/texts", COUNTS, checksums=True)


@pytest.fixture(scope="module")
def planned(corpora: tuple[str, str]) -> tuple[str, str]:
    """The same with a measure and a plan, which the command line has written."""
    for url in corpora:
        words = ("plan", url, "--max-tokens", str(MAX_TOKENS), "--tokenizer", "bytes")
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
    return corpora


def loader_of(url: str, world: mm.World | None = None, **settings: Any) -> mm.Loader:
    num_workers, grid = settings.pop("num_workers", 0), settings.pop("grid", None)
    pipeline = mm.Pipeline(
        mm.open_dataset(url),
        global_batch_size=8,
        seed=3,
        grid=grid,
        decode=DECODE,
        batching=mm.Pack(MAX_TOKENS, **settings),
    )
    return mm.Loader(pipeline, num_workers=num_workers, world=world)


def content(batch: dict[str, Any]) -> tuple[Any, ...]:
    rows = batch["__lineage__"].rows
    return batch["__key__"], rows, batch["input_ids"].tolist(), batch["position_ids"].tolist()


def files_of(url: str) -> dict[str, bytes]:
    """Return the files of measure and plan."""
    files = {}
    for folder in open_store(url).folders():
        if "mmstream." in folder:
            store = open_store(f"{url}/{folder}")
            files |= {f"{folder}/{name}": store.read(name) for name in store.list()}
    return files


def test_measure_and_plan_on_the_server_are_those_of_a_folder(
    planned: tuple[str, str],
) -> None:
    local, remote = map(files_of, planned)
    assert local.keys() == remote.keys()
    assert len({name.partition("/")[0] for name in local}) == 2
    assert [name for name in local if local[name] != remote[name]] == []


@pytest.mark.slow
def test_packs_behind_faults_are_those_of_a_local_disk(
    planned: tuple[str, str], proxy: FaultProxy
) -> None:
    local, remote = planned
    expected = [content(batch) for batch in loader_of(local)]
    proxy.set(FAULTS)
    loader = loader_of(remote, num_workers=1)
    assert [content(batch) for batch in loader] == expected
    loader.close()
    assert loader.stats.num_bad == 0
    assert loader.stats.fill == loader.stats.planned_fill
    assert sum(proxy.counts().faults.values()) > 0


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
