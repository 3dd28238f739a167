"""Decoded samples a second beside other loaders: ``python -m tools.bench decoded``.

Photographs of 0.2 and 4 megapixels become 224x224, and their captions 128 tokens. Each measurement
is a new process (`tools.bench.loaders`); rounds are interleaved, and the tables have medians.
webdataset and Hugging Face datasets are in the environment of the tests. The others are installed
into ``build/peers`` first. SPDL needs the libraries of FFmpeg 4 to 8 on the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tools.bench.corpus import LARGE, SMALL, write_corpus, write_tokenizer
from tools.bench.loaders import LOADERS

ROOT = Path(__file__).resolve().parents[2]
CORPORA = {"0.2 megapixels": (SMALL, 24_000, 64), "4 megapixels": (LARGE, 1_200, 16)}
"""Size of the images, samples, and batch size."""

PEERS = {
    "webdataset": (f"webdataset=={version('webdataset')}",),
    "HF datasets": (f"datasets=={version('datasets')}",),
    "NVIDIA DALI": (
        *("nvidia-dali-cuda120==2.4.0", "nvidia-libnvcomp-cu12==5.3.0.16", "wheel==0.48.0"),
        *("nvidia-nvimgcodec-cu12==0.9.0.20", "nvtx==0.2.17", "optree==0.20.0", "six==1.17.0"),
        *("astunparse==1.6.3", "gast==0.7.0", "makefun==1.16.0"),
    ),
    "SPDL": ("spdl==0.8.0", "spdl_core==0.8.0", "spdl_io==0.8.0"),
    "Lhotse": (
        *("lhotse==1.33.0", "cytoolz", "toolz", "intervaltree", "sortedcontainers", "tabulate"),
        *("audioread", "lilcom"),
    ),
}
"""The distributions of each loader. The first one is named in the table."""


def compare(num_rounds: int, num_samples: int | None = None, only: list[str] | None = None) -> None:
    """Print a table for each size of photographs.

    Args:
        num_rounds: Runs of each loader.
        num_samples: Of each corpus. None: as many as the published tables have.
        only: Names of loaders. None: all.
    """
    names = only or list(LOADERS)
    for title, (size, usual_samples, batch_size) in CORPORA.items():
        with tempfile.TemporaryDirectory() as folder:
            count = num_samples or usual_samples
            write_corpus(Path(folder), count, -(-count // 8), size)
            write_tokenizer(Path(folder))
            words = [folder, str(batch_size), str(count // batch_size - 2)]
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for number in range(num_rounds):
                for name in names[:: -1 if number % 2 else 1]:
                    runs[name].append(run(name, words))
        print_table(f"{title}, {num_rounds} rounds", runs)


def run(name: str, words: list[str]) -> dict[str, float]:
    """Measure a loader once, in a process of its own."""
    paths = [str(ROOT), *([str(installed(name))] if name in ("NVIDIA DALI", "SPDL") else [])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    own |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "tools.bench.loaders", name, *words],
            env=os.environ | own | {"HF_HOME": scratch},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{name}: {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def installed(name: str) -> Path:
    """Return the folder with the packages of a loader, which are installed at the first use."""
    folder = ROOT / "build" / "peers" / PEERS[name][0]
    if not folder.exists():
        # Without --no-deps, a loose requirement of torch could install gigabytes for CUDA.
        options = ["--quiet", "--no-deps", "--target", str(folder)]
        command = [sys.executable, "-m", "pip", "install", *options, *PEERS[name]]
        subprocess.run(command, check=True)
    return folder


def print_table(title: str, runs: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of each loader, with its version."""
    print(f"\n{title}\n")
    print("| | samples/s (min-max) | CPU s per 1,000 | first batch, s | memory, MB |")
    print("|---|---:|---:|---:|---:|")
    for name, each in runs.items():
        speeds = [run["samples_per_s"] for run in each]
        cpu_s, first_s, memory = (
            statistics.median(run[figure] for run in each)
            for figure in ("cpu_s_per_1000", "first_batch_s", "peak_bytes")
        )
        label = f"{name} {PEERS[name][0].partition('==')[2]}" if name in PEERS else name
        print(
            f"| {label} | {statistics.median(speeds):,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f}) "
            f"| {cpu_s:.2f} | {first_s:.1f} | {memory / 1e6:,.0f} |",
            flush=True,
        )
