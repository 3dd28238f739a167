"""What ``mmstream demo`` runs, on the embedded corpus. It uses all folders below.

1. Convert the corpus, and verify the shards.
2. Train without disturbance, in one process.
3. Train with two processes. ``kill -9`` one of them half way, and resume with one process.
4. Prove from the training logs that every sample was seen exactly once per epoch, that the global
   batches are those of the plan, and that the losses are the same as without disturbance.
5. Write a report.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from mmstream.audit import check_logs, read_history
from mmstream.converting.convert import convert
from mmstream.converting.options import RowReading
from mmstream.dataset.open import open_dataset
from mmstream.dataset.verify import verify
from mmstream.errors import MMStreamError
from mmstream.order import Order
from mmstream.processes.workers import safe_environment
from mmstream.storage import join_url, open_store

if TYPE_CHECKING:
    from mmstream.audit import Check
    from mmstream.converting.convert import ConvertReport


GLOBAL_BATCH_SIZE = 16
EPOCHS = 6
CHECKPOINT_EVERY = 20
LR = 5e-4
KILL_STEP = 95
"""Rank 1 is killed after this many steps: inside epoch 3, and between two checkpoints."""
TIMEOUT_S = 600

MAX_LOSS_DIFFERENCE = 1e-3
"""Limit for rounding: the sums of two ranks round differently from those of one."""


def corpus_rows() -> str:
    """Return the path of ``rows.jsonl`` of the embedded corpus.

    It has 96 photographs with five captions each.
    """
    return str(Path(__file__).parent / "corpus" / "rows.jsonl")


def run_demo(out: str, shards: str | None = None, *, say: Callable[[str], None]) -> bool:
    """Run the demo. Write ``report.md`` to `out`.

    Args:
        out: Local folder for logs and results.
        shards: Folder or URL prefix for shards and checkpoints. Default: `out`.
        say: Called with one line per stage.

    Returns:
        Whether the proof holds.

    Raises:
        MMStreamError: A stage failed. The message names its log.
    """
    root = open_store(shards or out).url
    data = join_url(root, "shards")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("undisturbed", "disturbed"):
        _clear(join_url(root, f"{name}/checkpoints"), folder / name)

    reading = RowReading(captions="each")
    report = convert(corpus_rows(), data, reading=reading, samples_per_shard=20)
    say(
        f"1 convert: {report.num_rows} rows -> {report.num_samples} samples, "
        f"{report.num_shards} shards in {data}"
    )
    dataset = open_dataset(data)
    problems = list(verify(dataset, progress=False))
    if problems:
        raise MMStreamError(f"verify: {problems[0].reason}; remove {data} and run the demo again")
    say(f"2 verify: all checksums, indexes and {len(dataset)} samples are good")

    started = time.perf_counter()
    _train(data, root, folder, "undisturbed", world_size=1)
    undisturbed = read_history(folder / "undisturbed")
    seconds = time.perf_counter() - started
    say(f"3 train undisturbed: {len(undisturbed.lines)} steps in one process, {seconds:.0f} s")

    _train(data, root, folder, "disturbed", world_size=2, kill_step=KILL_STEP)
    killed = read_history(folder / "disturbed").lines
    say(f"4 train with two processes: rank 1 killed (kill -9) at step {len(killed)}")

    _train(data, root, folder, "disturbed", world_size=1)
    disturbed = read_history(folder / "disturbed")
    world_sizes = [line["world_size"] for _, line in sorted(disturbed.lines.items())]
    say(f"5 resume with one process: steps {world_sizes.count(2)} to {len(world_sizes) - 1}")

    order = Order.from_counts(
        dataset.counts,
        names=[shard.name for shard in dataset.manifest.shards],
        num_bytes=dataset.manifest.num_bytes,
        global_batch_size=GLOBAL_BATCH_SIZE,
    )
    plan = [(epoch, step) for epoch in range(EPOCHS) for step in range(order.steps_per_epoch)]
    check = check_logs(order, disturbed.rows, plan)
    text = markdown_report(report, check, undisturbed.lines, killed, disturbed.lines)
    (folder / "report.md").write_text(text)
    say("\n" + text + f"\nwritten to {folder / 'report.md'}")
    return holds(check, undisturbed.lines, disturbed.lines)


def _train(
    data: str, root: str, folder: Path, name: str, *, world_size: int, kill_step: int | None = None
) -> None:
    """Run ``mmstream train`` as torchrun would. With `kill_step`, kill -9 rank 1 at that step."""
    logs = folder / name
    logs.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "mmstream", "train", data),
        *("--out", join_url(root, name)),
        *("--log-dir", str(logs)),
        "--log-keys",
        *("--epochs", str(EPOCHS)),
        *("--global-batch-size", str(GLOBAL_BATCH_SIZE)),
        *("--checkpoint-every", str(CHECKPOINT_EVERY)),
        *("--lr", str(LR)),
        *("--num-workers", "1"),
        *("--device", "cpu"),
    ]
    port = free_port()
    ranks = [_start(command, logs, rank, world_size, port) for rank in range(world_size)]
    try:
        if kill_step is not None:
            _wait_for_step(logs / "metrics-rank1.jsonl", kill_step, ranks)
            ranks[1].send_signal(signal.SIGKILL)
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if kill_step is None and any(codes):
        raise MMStreamError(f"training failed with exit codes {codes}; see {logs}/rank*.log")


def _start(
    command: list[str], logs: Path, rank: int, world_size: int, port: int
) -> subprocess.Popen[bytes]:
    environment = os.environ | safe_environment()
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with (logs / f"rank{rank}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _wait_for_step(path: Path, num_steps: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or len(path.read_bytes().splitlines()) < num_steps:
        if any(rank.poll() is not None for rank in ranks):
            raise MMStreamError(f"training ended before step {num_steps}; see {path.parent}")
        if time.monotonic() > deadline:
            raise MMStreamError(
                f"training has not come to step {num_steps} in {TIMEOUT_S} s; see {path.parent}"
            )
        time.sleep(0.02)


def _clear(checkpoints: str, logs: Path) -> None:
    """Remove the checkpoints and logs of an earlier demo."""
    store = open_store(checkpoints)
    for name in store.list():
        store.remove(name)
    for path in logs.glob("*.*"):
        path.unlink()


def free_port() -> int:
    """Return a port that nobody listens on, below those that Linux gives to outgoing connections.

    One of the latter could be taken before rank 0 has started.
    """
    while True:
        port = random.randrange(10_000, 12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# -- the report ------------------------------------------------------------------------------------

MetricsLines = Mapping[tuple[int, int], Mapping[str, Any]]
"""(epoch, step) -> line of the metrics."""


def markdown_report(
    report: ConvertReport,
    check: Check,
    undisturbed: MetricsLines,
    killed: MetricsLines,
    disturbed: MetricsLines,
) -> str:
    """Return the table, for a terminal and ``report.md``.

    Args:
        report: of the conversion.
        check: the logs of the disturbed run, compared with its plan.
        undisturbed: the metrics of the undisturbed run.
        killed: those of the disturbed run, up to the kill.
        disturbed: those of the disturbed run after its resume, from the first step to the last.
    """
    world_sizes = [line["world_size"] for _, line in sorted(disturbed.items())]
    epochs = sorted({epoch for epoch, _ in disturbed})
    batch_size = len(next(iter(undisturbed.values()))["keys"])
    first_loss, last_loss = (_mean_loss(disturbed, epoch) for epoch in (epochs[0], epochs[-1]))
    speed = median(line["samples_per_s"] for line in undisturbed.values())
    wait = median(line["wait_fraction"] for line in undisturbed.values())
    facts = {
        "corpus": f"{report.num_rows} rows -> {report.num_samples} samples, "
        f"{report.num_shards} shards, {report.num_bytes / 1e6:.1f} MB, "
        f"{report.num_rejects} rejected",
        "steps": f"{check.num_steps} of {batch_size} samples, {len(epochs)} epochs",
        "disturbed run": f"two processes, one of them killed at step {len(killed)}; "
        f"resumed with one process from the checkpoint of step {world_sizes.count(2)}",
        "samples lost / repeated per epoch": f"{check.lost} / {check.repeated}",
        "global batches unlike the plan": f"{check.unplanned}",
        "loss of the two runs": "largest relative difference of a step "
        f"{loss_difference(undisturbed, disturbed):.1e}",
        "mean loss of the first and the last epoch": f"{first_loss:.3f}, {last_loss:.3f}",
        "speed of the undisturbed run": f"{speed:.0f} samples/s, {100 * wait:.0f} % of a step "
        "waiting for data (medians)",
    }
    verdict = "holds" if holds(check, undisturbed, disturbed) else "DOES NOT HOLD"
    lines = [f"# mmstream demo: the proof {verdict}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def holds(check: Check, undisturbed: MetricsLines, disturbed: MetricsLines) -> bool:
    """Tell whether the data was exact, and the losses agree but for rounding."""
    return check.holds and loss_difference(undisturbed, disturbed) < MAX_LOSS_DIFFERENCE


def loss_difference(undisturbed: MetricsLines, disturbed: MetricsLines) -> float:
    """Return the largest relative difference of a step's loss between the two runs."""
    differences = [
        abs(disturbed[step]["loss"] - line["loss"]) / max(abs(line["loss"]), 1e-9)
        for step, line in undisturbed.items()
        if step in disturbed
    ]
    return max(differences, default=float("inf"))


def _mean_loss(steps: MetricsLines, epoch: int) -> float:
    return float(mean(line["loss"] for step, line in steps.items() if step[0] == epoch))
