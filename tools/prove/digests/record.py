"""What a case gives, as short texts: a digest of each field of each batch, bad samples, lengths.

A field of numbers also has the means of its four quarters: other versions of a library, or another
processor, may round in another way, and then these tell a rounding from a mistake. The golden file
is written from all cases, and compared with what they give now.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import mmstream as mm
from tools.prove.digests.cases import CASES, Run

Record = dict[str, str]
"""Digests and texts by place, such as ``"batch 0: image"`` or ``"bad sample 3"``."""

LINEAGE = ("epoch", "step", "start", "planned", "valid", "shown", "rows", "order_rows",
           "num_cut_texts", "num_dropped_parts")  # fmt: skip
"""What is compared of ``batch["__lineage__"]``."""


def record(name: str, folder: Path) -> Record:
    """Run a case without workers and with one, and return what it gives.

    Raises:
        AssertionError: A worker gives something else.
    """
    run = CASES[name](folder / "corpus")
    first, *others = (_read(run, folder, number) for number in run.num_workers)
    for other in others:
        lines = list(differences(first, other))
        assert not lines, f"{name}: other batches with a worker: {lines[:3]}"
    return first | _lengths(run.pipeline)


def differences(expected: Record, actual: Record, *, is_same_machine: bool = True) -> Iterator[str]:
    """Yield a line for each place that differs.

    Args:
        expected: A record of the golden file.
        actual: The same of now.
        is_same_machine: False: pixels may differ by a level, and libraries may word their errors
            in another way.
    """
    for place in dict.fromkeys([*expected, *actual]):
        old, new = expected.get(place, "absent"), actual.get(place, "absent")
        if old != new and (is_same_machine or not _are_near(old, new)):
            yield f"{place}: {new}; it was {old}"


def _are_near(old: str, new: str) -> bool:
    """Tell whether two digests have means that are near, or two bad samples differ in words."""
    (head, means), (new_head, new_means) = _split(old), _split(new)
    tolerance = 1.0 if "uint8" in head or "int16" in head else 1e-3
    return head == new_head and np.allclose(means, new_means, rtol=1e-3, atol=tolerance)


def _split(text: str) -> tuple[str, list[float]]:
    """Return what must be equal, and the means of a digest."""
    digest, _, means = text.partition(" ~ ")
    if means:
        return digest.rpartition(" ")[0], [float(mean) for mean in means.split()]
    return text.partition(": ")[0], []


def _read(run: Run, folder: Path, num_workers: int) -> Record:
    """Read an epoch on all ranks."""
    texts: Record = {}
    quarantine = folder / f"quarantine-{num_workers}"
    policy = replace(run.pipeline.bad_samples, quarantine=str(quarantine))
    num_ranks = len(run.rows_per_rank or [0])
    for rank in range(num_ranks):
        loader = mm.Loader(
            replace(run.pipeline, bad_samples=policy),
            num_workers=num_workers,
            num_threads=1 if num_workers else 3,
            multiprocessing_context="fork",
            rows_per_rank=run.rows_per_rank,
            world=mm.World(rank, num_ranks),
            stall_warning_s=run.stall_warning_s,
        )
        prefix = f"rank {rank} " if num_ranks > 1 else ""
        with closing(loader):
            for number, batch in enumerate(loader):
                for field in sorted(batch):  # their order is not promised
                    value = _comparable(field, batch[field])
                    texts[f"{prefix}batch {number}: {field}"] = _digest(value)
        path = quarantine / f"quarantine-rank{rank}.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        texts |= {f"{prefix}bad sample {i}": _bad(json.loads(line)) for i, line in enumerate(lines)}
    return texts


def _comparable(field: str, value: Any) -> Any:
    """Return what is compared of a field: the folder of a corpus is another one each time."""
    if field == "__lineage__":
        return [getattr(value, name) for name in LINEAGE]
    return [url.rpartition("/")[2] for url in value] if field == "__url__" else value


def _bad(line: Mapping[str, Any]) -> str:
    """Return a line of the quarantine file: what must be equal, and the reason in words.

    The stamp of its shard depends on the size of encoded files, so it is left out.
    """
    parts = [f"{name}={line[name]}" for name in line if name not in ("reason", "stamp")]
    return f"{' '.join(parts)}: {line['reason']}"


def _lengths(pipeline: mm.Pipeline) -> Record:
    """Measure the lengths of a corpus with texts."""
    decode = pipeline.decode
    if not isinstance(pipeline.dataset, mm.Dataset) or decode is None or decode.text is None:
        return {}
    measure = mm.plan(pipeline, measure_only=True, epochs=(0,), num_workers=1, progress=False)
    return {
        f"lengths: {name}": " ".join(map(str, column.tolist()))
        for name, column in sorted(measure.columns.items())
    }


def _digest(value: Any) -> str:
    """Return the kind, a hash and, of numbers that a library may round, the means of a value."""
    arrays: list[Any] = []
    hashed = hashlib.sha256(repr(_without_arrays(value, arrays)).encode())
    for array in arrays:
        hashed.update(array.tobytes())
    kind = f"{arrays[0].dtype} {[*arrays[0].shape]}" if arrays else type(value).__name__
    count = f"{len(value)} x " if isinstance(value, list) else ""
    text = f"{count}{kind} {hashed.hexdigest()[:16]}"
    if not arrays or (arrays[0].dtype.kind not in "uf" and arrays[0].dtype != np.int16):
        return text
    numbers = np.concatenate([array.ravel().astype(np.float64) for array in arrays])
    means = (part.mean() if part.size else 0.0 for part in np.array_split(numbers, 4))
    return f"{text} ~ {' '.join(f'{mean:.5g}' for mean in means)}"


def _without_arrays(value: Any, arrays: list[Any]) -> Any:
    """Return a value with the kind of each array in its place; the arrays join the list."""
    if isinstance(value, torch.Tensor | np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return f"{arrays[-1].dtype} {arrays[-1].shape}"
    if isinstance(value, list | tuple):
        return [_without_arrays(part, arrays) for part in value]
    if isinstance(value, Mapping):
        return [(name, _without_arrays(value[name], arrays)) for name in sorted(value)]
    return bytes(value) if isinstance(value, memoryview) else value


# -- the golden file -------------------------------------------------------------------------------

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
