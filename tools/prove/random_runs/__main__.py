"""Read random corpora by random runs that end and go on in random ways, and judge all they show.

    python -m tools.prove.random_runs --minutes 10
    python -m tools.prove.random_runs --remote 0.4 --s3         # half of these on S3, with faults
    python -m tools.prove.random_runs --seed 1234 --trials 1    # one that has failed

A trial writes one to three datasets with bad samples, some as unions of folders, and draws a
pipeline: rows, repeated rows, buckets, flat batches or packs, of a dataset or a mixture, with any
grid and window; weights of mixtures are set during some runs. Most that are not packs are of views:
slices, random parts, complements and lists of samples. It reads two epochs, which must keep the
promises of docs/guarantees.md. Then it reads them in parts: each on other ranks, workers, threads
and storage, with and without a node cache. Parts end anywhere, some with killed workers, and some
change the settings, the view or the number of shards. All must show the same rows, and states of
another selection are refused mid-epoch. Between parts, samples may be taken down: no later part
shows them, other rows of the epoch stay, and new epochs have all other samples. The exit code is 1
if a trial fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from mmstream.families.family import import_torchvision
from tests.helpers.http_fault_proxy import Faults, fault_proxy
from tools.s3_server import s3_server


def main() -> int:
    """Run trials, print what they counted and which failed, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--trials", type=int, default=1 << 40)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument(
        "--remote", type=float, default=0.1, help="share of parts as from a network"
    )
    parser.add_argument("--workers", type=float, default=0.2, help="share of parts with workers")
    parser.add_argument("--s3", action="store_true", help="half of these: S3 behind faults")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", UserWarning)  # of torch: more workers than cores
    torch.set_num_threads(1)
    import_torchvision()
    from tools.prove.random_runs.trial import run_trial

    counts, num_failures, end = Counter[str](), 0, time.monotonic() + 60 * arguments.minutes
    with _faulty_s3() if arguments.s3 else nullcontext("") as s3_prefix:
        for seed in range(arguments.seed, arguments.seed + arguments.trials):
            if time.monotonic() > end:
                break
            with tempfile.TemporaryDirectory(prefix="random-runs-") as folder:
                try:
                    trial = run_trial(
                        Path(folder),
                        seed,
                        remote=arguments.remote,
                        workers=arguments.workers,
                        s3_prefix=s3_prefix,
                    )
                except AssertionError as error:
                    num_failures += 1
                    cause = error.__cause__
                    lines = traceback.format_tb(cause.__traceback__)[-2:] if cause else []
                    print(f"FAILED: {error}\n{''.join(lines)}", flush=True)
                else:
                    counts.update(trial.counts)
            counts["trials"] += 1
    print(", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))
    print(f"{counts['trials']} trials, {num_failures} failed")
    return 1 if num_failures else 0


@contextmanager
def _faulty_s3() -> Iterator[str]:
    """Start an S3 server behind a proxy that breaks off some answers; yield a URL there."""
    faults = Faults(reset=0.03, truncate=0.03, busy=0.03, retry_after_s=0)
    with s3_server() as server, fault_proxy(server.endpoint, faults) as proxy:
        os.environ.update(server.env | {"AWS_ENDPOINT_URL": proxy.endpoint})
        yield f"s3://{server.bucket}/random-runs"


if __name__ == "__main__":
    sys.exit(main())
