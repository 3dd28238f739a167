"""A small corpus to convert, and views of the output for the tests of the converter."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path

import pytest

from mmstream.converting import shard
from mmstream.converting.convert import convert
from mmstream.converting.options import Duplicates, Rerun, RowReading, Splitting
from mmstream.converting.rows.detect import RowOptions
from mmstream.converting.rows.open import open_rows
from mmstream.dataset.open import open_dataset
from mmstream.storage import open_store
from tests.helpers.corpora import jpeg


def make_corpus(folder):
    """Write forty rows and ten images. Rows 7 and 23 will be rejected."""
    (folder / "images").mkdir()
    for i in range(10):
        (folder / "images" / f"{i}.jpg").write_bytes(jpeg(i))
    rows = [{"id": f"r{i}", "image": f"images/{i % 10}.jpg", "text": f"row {i}"} for i in range(40)]
    rows[6]["image"] = "images/absent.jpg"
    rows[22]["text"] = ""
    return write_rows(folder / "rows.jsonl", rows)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def grouped(**options):
    """Return arguments of `convert`, with single options such as `limit` put into their groups."""
    if options.get("splits", {}) is None:
        del options["splits"]
    groups = {"reading": RowReading, "splitting": Splitting, "rerun": Rerun}
    for argument, group in groups.items():
        names = [field.name for field in fields(group) if field.name in options]
        if names:
            options[argument] = group(**{name: options.pop(name) for name in names})
    exact, near = options.pop("duplicates", None), options.pop("near_duplicates", None)
    if exact is not None or near is not None:
        options["duplicates"] = Duplicates(exact, near)
    return options


def run(rows, dest, **options):
    return convert(rows, dest, **grouped(**{"samples_per_shard": 8, "progress": False, **options}))


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
    with open_rows(rows, RowOptions(**options)) as source:
        return [row.value for row in source.select(range(source.num_rows)).read()]


def pictures(folder, *paths):
    """Write pictures, and return their folder."""
    for number, path in enumerate(paths):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(jpeg(number))
    return folder


def shards(folder):
    return {name: data for name, data in tree(folder).items() if ".tar" in name}


def keys(folder):
    dataset = open_dataset(folder)
    return [dataset[i]["__key__"] for i in range(len(dataset))]


def rejects(folder):
    lines = (Path(folder) / "rejects.jsonl").read_bytes().splitlines()
    return {line["row"]: line["reason"] for line in map(json.loads, lines)}


def interrupted(monkeypatch, corpus, dest, after, **options):
    """Convert until `after` shards are committed, then fail as Ctrl-C would."""
    real, calls = shard._samples, []

    def samples(job, *others):
        calls.append(job.name)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(job, *others)

    with monkeypatch.context() as patch:
        patch.setattr(shard, "_samples", samples)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, dest, **options)


def after_files(row):
    """Return a row once all files of its ``waits_for`` are there. For `convert(row=)`."""
    deadline = time.monotonic() + 500
    while not all(Path(path).exists() for path in row.get("waits_for", ())):
        if time.monotonic() > deadline:
            raise RuntimeError(f"still missing: {row['waits_for']}")
        time.sleep(0.01)
    return {"text": row["text"]}


def write_rows_of_a_slow_shard(folder, dest):
    """Write eight rows for four shards. The first shard ends only after the three others."""
    others = [f"{dest}/shard-{i:06d}.tar" for i in (1, 2, 3)]
    rows = [{"text": f"row {i}", "waits_for": others if i == 1 else []} for i in range(8)]
    return write_rows(folder / "slow.jsonl", rows)
