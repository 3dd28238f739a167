"""A small corpus to convert, and views of the output for the tests of the converter."""

from __future__ import annotations

import csv
import io
import json
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmstream as mm
from mmstream.converting import shard
from mmstream.converting.rows.open import open_rows
from mmstream.storage import open_store
from tests.helpers.corpora import jpeg
from tests.helpers.wait import wait_until


def make_corpus(folder):
    """Write forty rows and ten images. Rows 7 and 23 will be rejected."""
    pictures(folder, *(f"images/{i}.jpg" for i in range(10)))
    rows = [{"id": f"r{i}", "image": f"images/{i % 10}.jpg", "text": f"row {i}"} for i in range(40)]
    rows[6]["image"] = "images/absent.jpg"
    rows[22]["text"] = ""
    return write_rows(folder / "rows.jsonl", rows)


def write_rows(path, rows):
    path.write_bytes(jsonl(rows))
    return path


def grouped(**options):
    """Return arguments of `convert`, with single options such as `limit` put into their groups."""
    if options.get("splits", {}) is None:
        del options["splits"]
    groups = {"reading": mm.RowReading, "splitting": mm.Splitting, "rerun": mm.Rerun}
    for argument, group in groups.items():
        names = [field.name for field in fields(group) if field.name in options]
        if names:
            options[argument] = group(**{name: options.pop(name) for name in names})
    exact, near = options.pop("duplicates", None), options.pop("near_duplicates", None)
    if exact is not None or near is not None:
        options["duplicates"] = mm.Duplicates(exact, near)
    return options


def run(rows, dest, **options):
    return mm.convert(
        rows, dest, **grouped(**{"samples_per_shard": 8, "progress": False, **options})
    )


def tree(folder):
    """Return {relative path: bytes} of all files of a destination, hidden ones too."""
    files = (p for p in sorted(Path(folder).rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def objects(dest):
    """Return {name: bytes} of a destination on any store, with its reports."""
    names = open_store(dest).list()
    reports = [f"reports/{name}" for name in open_store(f"{dest}/reports").list()]
    return {name: open_store(dest).read(name) for name in [*names, *reports]}


def values(rows, **options):
    """Return the rows of a file or a folder as they are read."""
    with open_rows(rows, mm.RowReading(**options)) as source:
        return [row.value for row in source.select(range(source.num_rows)).read()]


def write_files(folder, files):
    """Write {path: text or bytes} into a folder, and return the folder."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def pictures(folder, *paths):
    """Write pictures, and return their folder."""
    return write_files(folder, {path: jpeg(number) for number, path in enumerate(paths)})


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows, delimiter=","):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def parquet(rows, compression="snappy"):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=9, compression=compression)
    return file.getvalue()


def shards(folder):
    return {name: data for name, data in tree(folder).items() if ".tar" in name}


def keys(folder):
    dataset = mm.open_dataset(folder)
    return [dataset[i]["__key__"] for i in range(len(dataset))]


def rejects(folder):
    lines = (Path(folder) / "rejects.jsonl").read_bytes().splitlines()
    return {line["row"]: line["reason"] for line in map(json.loads, lines)}


@contextmanager
def before_shard(monkeypatch, number, action):
    """Do something when a conversion begins its shard of this number, from 1."""
    real, names = shard._samples, []

    def samples(job, *others):
        names.append(job.name)
        if len(names) == number:
            action()
        return real(job, *others)

    with monkeypatch.context() as patch:
        patch.setattr(shard, "_samples", samples)
        yield


def interrupted(monkeypatch, corpus, dest, after, **options):
    """Convert until `after` shards are committed, then fail as Ctrl-C would."""

    def interrupt():
        raise KeyboardInterrupt

    with before_shard(monkeypatch, after + 1, interrupt), pytest.raises(KeyboardInterrupt):
        run(corpus, dest, **options)


def after_files(row):
    """Return a row once all files of its ``waits_for`` are there. For `convert(row=)`."""
    wait_until(lambda: all(Path(path).exists() for path in row.get("waits_for", ())))
    return {"text": row["text"]}


def write_rows_of_a_slow_shard(folder, dest):
    """Write eight rows for four shards. The first shard ends only after the three others."""
    others = [f"{dest}/shard-{i:06d}.tar" for i in (1, 2, 3)]
    rows = [{"text": f"row {i}", "waits_for": others if i == 1 else []} for i in range(8)]
    return write_rows(folder / "slow.jsonl", rows)
