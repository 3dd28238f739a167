"""The golden file: written from all cases, and compared with what they give now."""

from __future__ import annotations

import json
import logging
import platform
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.prove.digests.cases import CASES
from tools.prove.digests.record import Record, differences, record

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "digests.json"
LIBRARIES = ("av", "numpy", "pillow", "simplejpeg", "soundfile", "soxr", "torch", "tokenizers",
             "transformers")  # fmt: skip
"""Libraries that decide what a digest is."""


class Results(NamedTuple):
    """What this checkout gives on this machine."""

    made_with: dict[str, str]
    """Versions, and the kind of processor."""
    records: dict[str, Record]
    """By case."""


def run_cases(word: str = "") -> Results:
    """Record the cases whose name has a word, two at a time, in processes that do nothing else."""
    names = [name for name in CASES if word in name]
    with ProcessPoolExecutor(2, get_context("spawn"), initializer=_set_up) as pool:
        records = dict(zip(names, pool.map(record_case, names), strict=True))
    return Results(machine(), records)


def _set_up() -> None:
    torch.set_num_threads(1)
    logging.getLogger("mmstream").addHandler(logging.NullHandler())  # bad samples are meant


def record_case(name: str) -> Record:
    """Record a case."""
    with tempfile.TemporaryDirectory(prefix="digests-") as folder:
        return record(name, Path(folder))


def machine() -> dict[str, str]:
    """Return the versions and the kind of processor that decide how values are rounded."""
    versions = {name: version(name) for name in LIBRARIES}
    return versions | {"cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}


def write(results: Results) -> None:
    """Write the golden file."""
    content = {"made with": results.made_with, "cases": results.records}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    GOLDEN.write_text(f"{text}\n", "utf-8")


def compare(results: Results) -> Iterator[str]:
    """Yield a line for each field of a case that differs from the golden file."""
    golden: dict[str, Any] = json.loads(GOLDEN.read_text("utf-8"))
    is_same = results.made_with == golden["made with"]
    for name, actual in results.records.items():
        for line in differences(golden["cases"].get(name, {}), actual, is_same_machine=is_same):
            yield f"{name}: {line}"
