"""The main job: the README's first command, and a proof that can fail."""

import copy
import os
import re
import subprocess
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.demo import EPOCHS, GLOBAL_BATCH_SIZE, corpus_rows
from mmstream.proof import prove

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "shards"
    mm.convert(corpus_rows(), folder, captions="each", samples_per_shard=20, progress=False)
    return mm.open_dataset(folder)


@pytest.fixture
def run(shards):
    """The order, and the history that a faultless run would log."""
    pipeline = mm.Pipeline(shards, global_batch_size=GLOBAL_BATCH_SIZE)
    order, steps = pipeline.order, {}
    for epoch in range(EPOCHS):
        for step in range(order.steps_per_epoch):
            refs = order.refs(epoch, step)
            keys = [shards.read(s, i)["__key__"] for s, i in zip(refs.shard, refs.index)]
            steps[epoch, step] = {"loss": 2.0, "keys": keys}
    return order, steps


def test_a_faultless_history_is_proven(shards, run):
    order, steps = run
    assert prove(shards, order, steps, copy.deepcopy(steps), EPOCHS).holds


@pytest.mark.parametrize("fault", ["lost", "repeated", "moved", "loss", "missing"])
def test_a_faulty_history_is_not_proven(shards, run, fault):
    order, steps = run
    faulty = copy.deepcopy(steps)
    if fault == "lost":
        faulty[1, 3]["keys"][0] = faulty[1, 4]["keys"][0]
    elif fault == "repeated":
        faulty[1, 3]["keys"].append(faulty[1, 3]["keys"][0])
    elif fault == "moved":
        faulty[1, 3]["keys"], faulty[1, 4]["keys"] = faulty[1, 4]["keys"], faulty[1, 3]["keys"]
    elif fault == "loss":
        faulty[2, 1]["loss"] = 2.1
    else:
        del faulty[0, 7]
    assert not prove(shards, order, faulty, steps, EPOCHS).holds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arguments", [[], ["--s3"]])
def test_the_readmes_first_command_does_the_main_job(tmp_path, arguments):
    command = re.search(r"^bash (tools/quickstart\.sh)", (ROOT / "README.md").read_text(), re.M)[1]
    if not (ROOT / ".venv" / ".mmstream-dev").exists():
        pytest.skip("this environment was not made by tools/test.sh")
    done = subprocess.run(
        ["bash", ROOT / command, *arguments, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "proven: holds" in report
    assert "| samples lost / repeated in an epoch | 0 / 0 |" in report
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The proof holds" in page
    assert page.count("<img ") == GLOBAL_BATCH_SIZE


def test_the_embedded_corpus_names_its_photographers():
    table = (Path(corpus_rows()).parent / "ATTRIBUTION.md").read_text()
    images = sorted(path.name for path in (Path(corpus_rows()).parent / "images").iterdir())
    assert len(images) == 96
    assert all(f"| {name} | " in table for name in images)
