"""The main job from end to end, on the embedded corpus: what ``mmstream demo`` runs.

convert -> verify -> train undisturbed -> train with two processes and kill -9 one half way ->
resume on one process -> prove from the training logs that every sample was seen exactly once and
that the global batches are those of the undisturbed run -> report.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmstream.audit.compare_runs import prove, read_history
from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.converting.convert import convert
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.open import open_dataset
from mmstream.dataset.verify import verify
from mmstream.demo.report import Evidence, html_report, markdown_report
from mmstream.errors import MMStreamError
from mmstream.order import Order
from mmstream.storage import join_url, open_store

__all__ = ["corpus_rows", "run_demo"]

GLOBAL_BATCH_SIZE, EPOCHS, CHECKPOINT_EVERY, KILL_AT, LR = 16, 6, 20, 95, 5e-4
TIMEOUT_S = 600


def corpus_rows() -> str:
    """Return the path of the embedded corpus: 96 photographs with five captions each."""
    return str(Path(__file__).parent / "corpus" / "rows.jsonl")


def run_demo(out: str, shards: str | None = None, *, say: Callable[[str], None]) -> bool:
    """Run the main job and write ``report.html``, ``.md`` and ``.json`` to `out`.

    Args:
        out: local folder of logs and results.
        shards: folder or ``s3://`` prefix of shards and checkpoints; None: `out`.
        say: gets a line for each stage.

    Returns:
        Whether the proof holds.

    Raises:
        MMStreamError: a stage failed; names its log.
    """
    root = open_store(shards or out).url
    data, folder = join_url(root, "shards"), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("undisturbed", "disturbed"):
        _clear(join_url(root, f"{name}/checkpoints"), folder / name)

    report = convert(corpus_rows(), data, captions="each", samples_per_shard=20)
    say(f"1 convert: {report.num_rows} rows -> {report.num_samples} samples, "
        f"{report.num_shards} shards in {data}")  # fmt: skip
    dataset = open_dataset(data)
    problems = list(verify(dataset, progress=False))
    if problems:
        raise MMStreamError(f"verify: {problems[0].reason}")
    say(f"2 verify: checksums, indexes and all {len(dataset)} samples are good")

    started = time.perf_counter()
    _train(data, root, folder, "undisturbed", world_size=1)
    undisturbed = read_history(folder / "undisturbed")
    seconds = time.perf_counter() - started
    say(f"3 train, undisturbed: {len(undisturbed.lines)} steps in one process, {seconds:.0f} s")

    _train(data, root, folder, "disturbed", world_size=2, kill_at=KILL_AT)
    killed = read_history(folder / "disturbed").lines
    say(f"4 train with two processes: rank 1 killed (kill -9) at step {len(killed)}")

    _train(data, root, folder, "disturbed", world_size=1)
    disturbed = read_history(folder / "disturbed")
    worlds = [line["world_size"] for _, line in sorted(disturbed.lines.items())]
    say(f"5 resume on one process: steps {worlds.count(2)} to {len(worlds) - 1}")

    order = Order.from_counts(
        dataset.counts,
        names=[shard.name for shard in dataset.manifest.shards],
        num_bytes=dataset.manifest.num_bytes,
        global_batch_size=GLOBAL_BATCH_SIZE,
    )
    proof = prove(order, disturbed, undisturbed, EPOCHS)
    batch = _first_batch(dataset)
    evidence = Evidence(report, proof, undisturbed.lines, killed, disturbed.lines, batch)
    text = markdown_report(evidence)
    (folder / "report.md").write_text(text)
    (folder / "report.html").write_text(html_report(evidence))
    (folder / "report.json").write_text(json.dumps(proof.__dict__ | {"holds": proof.holds}))
    say("\n" + text + f"\nwritten to {folder / 'report.html'}")
    return proof.holds


def _train(
    data: str, root: str, folder: Path, name: str, *, world_size: int, kill_at: int | None = None
) -> None:
    """Run ``mmstream train`` as torchrun would; with `kill_at`, kill -9 rank 1 at that step."""
    logs = folder / name
    logs.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "mmstream", "train", data,
        "--out", join_url(root, name), "--log-dir", str(logs), "--log-keys",
        "--epochs", str(EPOCHS), "--global-batch-size", str(GLOBAL_BATCH_SIZE),
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--lr", str(LR),
        "--num-workers", "1", "--device", "cpu",
    ]  # fmt: skip
    port = _free_port()
    ranks = [_start(command, logs, rank, world_size, port) for rank in range(world_size)]
    try:
        if kill_at is not None:
            _wait_for_step(logs / "metrics-rank1.jsonl", kill_at, ranks)
            ranks[1].send_signal(signal.SIGKILL)
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if kill_at is None and any(codes):
        raise MMStreamError(f"training failed with exit codes {codes}; see {logs}/rank*.log")


def _start(
    command: list[str], logs: Path, rank: int, world_size: int, port: int
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    with (logs / f"rank{rank}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _wait_for_step(path: Path, num_steps: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or len(path.read_bytes().splitlines()) < num_steps:
        if any(rank.poll() is not None for rank in ranks) or time.monotonic() > deadline:
            raise MMStreamError(f"training ended before step {num_steps}; see {path.parent}")
        time.sleep(0.02)


def _clear(checkpoints: str, logs: Path) -> None:
    """Remove what an earlier demo left."""
    store = open_store(checkpoints)
    for name in store.list():
        store.remove(name)
    for path in logs.glob("*.*"):
        path.unlink()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_batch(dataset: Dataset) -> dict[str, Any]:
    """Return the run's first global batch, with pictures large enough to look at."""
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.sample import Decode
    from mmstream.loader.loader import Loader
    from mmstream.pipeline import Pipeline
    from mmstream.world import World

    pipeline = Pipeline(
        dataset,
        global_batch_size=GLOBAL_BATCH_SIZE,
        decode=Decode(image=ImageDecoder(size=144)),
        bad_samples=BadSamplePolicy(quarantine=None),
    )
    return next(iter(Loader(pipeline, world=World())))
