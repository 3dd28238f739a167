"""One conversion by one system, in a process of its own: ``python systems.py SYSTEM ROWS ...``.

It runs with the Python that has the system installed, so it imports nothing of this repository but
mmstream. Each system gets the same rows: the picture's bytes, the text and the id. With several
workers, the writers that have no workers of their own run in as many processes, each with its own
rows and folder. mmstream gives a worker whole shards, so its shards are small enough for all.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert: SYSTEM ROWS MEDIA OUT WORKERS."""
    system, rows, media, out, workers = sys.argv[1:6]
    systems: dict[str, Callable[[Path, Path, Path, int], None]] = {
        "cp -r": copy,
        "mmstream": with_mmstream,
        "mmstream, no sidecar": partial(with_mmstream, sidecar=False),
        "wds.ShardWriter": partial(by_processes, shard_writer),
        "MDSWriter": partial(by_processes, mds_writer),
        "litdata optimize": litdata_optimize,
    }
    systems[system](Path(rows), Path(media), Path(out), int(workers))


def copy(rows: Path, media: Path, out: Path, workers: int) -> None:  # noqa: ARG001 - cp has one
    """Copy the folder of media and the file of rows."""
    out.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(media), str(rows), str(out)], check=True)


def with_mmstream(rows: Path, media: Path, out: Path, workers: int, sidecar: bool = True) -> None:
    """`mm.convert` with its defaults, or without the sidecar."""
    import mmstream as mm

    options: dict[str, Any] = {"num_workers": workers, "progress": False, "sidecar": sidecar}
    if workers > 1:
        with rows.open("rb") as lines:
            options["samples_per_shard"] = min(5000, -(-sum(1 for _ in lines) // workers))
    mm.convert(rows, out, media_root=media, **options)


def by_processes(writer: Any, rows: Path, media: Path, out: Path, workers: int) -> None:
    """Run a writer that has no workers of its own, in as many processes."""
    with rows.open() as lines:
        all_rows = [json.loads(line) for line in lines]
    size = -(-len(all_rows) // workers)
    jobs = [
        (all_rows[i * size : (i + 1) * size], media, out / str(i) if workers > 1 else out)
        for i in range(workers)
    ]
    if workers == 1:
        writer(*jobs[0])
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.starmap(writer, jobs)


def shard_writer(rows: list[dict[str, Any]], media: Path, out: Path) -> None:
    """Write as webdataset's documentation does."""
    import webdataset as wds

    out.mkdir(parents=True)
    with wds.ShardWriter(str(out / "shard-%06d.tar"), maxcount=5000, maxsize=1e12) as sink:
        for number, row in enumerate(rows):
            sample = {"__key__": f"{number:09d}", "txt": row["text"]}
            if "image" in row:
                sample["jpg"] = (media / row["image"]).read_bytes()
                sample["json"] = {"id": row["id"], "captions": [row["text"]]}
            sink.write(sample)


def mds_writer(rows: list[dict[str, Any]], media: Path, out: Path) -> None:
    """Write as MosaicML's documentation does: no compression, no hashes."""
    from streaming import MDSWriter

    columns = {"text": "str"}
    if "image" in rows[0]:
        columns |= {"image": "bytes", "id": "str"}
    with MDSWriter(out=str(out), columns=columns) as sink:
        for row in rows:
            sample = dict(row)
            if "image" in row:
                sample["image"] = (media / row["image"]).read_bytes()
            sink.write(sample)


def litdata_optimize(rows: Path, media: Path, out: Path, workers: int) -> None:
    """Write as LitData's documentation does."""
    import litdata

    with rows.open() as lines:
        all_rows = [json.loads(line) for line in lines]
    litdata.optimize(
        fn=partial(litdata_sample, str(media)),
        inputs=all_rows,
        output_dir=str(out),
        chunk_bytes="64MB",
        num_workers=workers,
    )


def litdata_sample(media: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return what one row becomes."""
    if "image" not in row:
        return row
    return {**row, "image": Path(media, row["image"]).read_bytes()}


if __name__ == "__main__":
    shutil.rmtree(sys.argv[4], ignore_errors=True)
    main()
