"""The examples of docs/frameworks are killed mid-epoch, and go on with other ranks."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

import mmstream as mm
from mmstream.train.demo import corpus_rows
from tests.helpers.paths import DOCS, ROOT

EXAMPLES = sorted(file.stem for file in (DOCS / "frameworks").glob("with_*.py"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The 96 photographs of the demo and a caption of each: an epoch of 6 steps of 16."""
    folder = tmp_path_factory.mktemp("frameworks") / "shards"
    mm.convert(corpus_rows(), folder, samples_per_shard=40, progress=False)
    return str(folder)


def planned(shards):
    """The keys of each step of two epochs, from the order alone."""
    dataset = mm.open_dataset(shards)
    keys = {tuple(s["__lineage__"][:2]): s["__key__"] for s in dataset[: len(dataset)]}
    order = mm.Pipeline(dataset, global_batch_size=16, seed=0).order
    keys_of_step = {}
    for epoch in range(2):
        for step in range(order.steps_per_epoch):
            shard, index, _ = order.refs(epoch, step)
            keys_of_step[epoch, step] = [
                keys[ref] for ref in zip(shard.tolist(), index.tolist(), strict=True)
            ]
    return keys_of_step


def planned_packs(file):
    """The keys of each step of two epochs of the packs that TRL's example trains on."""
    return {(epoch, step): keys for epoch, step, keys in json.loads(file.read_text())}


def trained(folder, stage):
    """The rows of each step that the ranks of a stage trained on, put together."""
    parts = {}
    for file in folder.glob(f"stage{stage}-rank*.jsonl"):
        for line in file.read_text().splitlines():
            epoch, step, start, keys = json.loads(line)
            parts.setdefault((epoch, step), {})[start] = keys
    return {at: sum((rows[start] for start in sorted(rows)), []) for at, rows in parts.items()}


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """The folder of the runs: of each example its log, its exit code, and what it trained on."""
    stages = ["2,0,6", "1,1,4", "2,0,0"]  # ranks, workers, the batch at which a rank is killed
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    examples = [name for name in EXAMPLES if name != "with_trl" or find_spec("trl")]
    folder = tmp_path_factory.mktemp("runs")
    script = [sys.executable, "-m", "tests.helpers.framework_ranks"]
    subprocess.run(
        [*script, ",".join(examples), shards, folder, *stages],
        cwd=ROOT,
        env=kept | {"HF_HUB_OFFLINE": "1"},
        check=True,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_killed_twice_and_resumed_on_other_ranks_and_workers_it_trains_on_the_plan(
    example, shards, runs
):
    if example == "with_trl":
        pytest.importorskip("trl")
    plan = planned_packs(runs / "packs.json") if example == "with_trl" else planned(shards)
    folder = runs / example
    assert (folder / "code").read_text() == "0", (folder / "log").read_text()[-3000:]
    first, second, third = (trained(folder, stage) for stage in range(3))
    assert min(first) == (0, 0)
    assert list(second) == [(0, 4), (0, 5), (1, 0)]  # a checkpoint after every second step
    assert min(third) == (1, 0)
    assert first | second | third == plan  # a repeated step counts once, the last time


def test_the_page_quotes_the_examples_as_they_are():
    page = (DOCS / "frameworks.md").read_text()
    quoted = re.findall(r"\(frameworks/(\w+)\.py\)[^`]*?\n\n```python\n(.*?)```", page, re.S)
    assert {name for name, _ in quoted} == set(EXAMPLES)
    for name, code in quoted:
        source = (DOCS / "frameworks" / f"{name}.py").read_text()
        lines = [line.strip() for line in source.splitlines()]
        wanted = [line.strip() for line in code.splitlines()]
        assert any(lines[at : at + len(wanted)] == wanted for at in range(len(lines))), code
    of_examples, _, _ = page.partition(
        "## Packs in each framework"
    )  # the others are run as they are
    assert of_examples.count("```python") == len(quoted)
