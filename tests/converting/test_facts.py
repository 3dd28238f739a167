"""``convert(facts=True)``: the same facts as of an index, also of shards that were there before."""

from __future__ import annotations

import json
from pathlib import Path

import mmstream as mm
from mmstream.dataset.facts import write_facts
from tests.helpers.corpora import jpeg


def facts_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.facts"))}


def test_facts_are_written_with_the_shards(tmp_path: Path) -> None:
    rows = [{"image": f"{i}.jpg", "text": f"caption {i}"} for i in range(5)]
    for i in range(5):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dest = tmp_path / "out"
    mm.convert(path, dest, samples_per_shard=2, progress=False, facts=True)
    written = facts_in(dest)
    assert list(written) == [f"shard-{i:06d}.tar.facts" for i in range(3)]
    write_facts(mm.open_dataset(dest), overwrite=True, progress=False)
    assert facts_in(dest) == written
    (dest / "shard-000001.tar.facts").unlink()
    mm.convert(path, dest, samples_per_shard=2, progress=False, facts=True)
    assert facts_in(dest) == written
    mm.convert(path, dest, samples_per_shard=3, progress=False, rerun=mm.Rerun(overwrite=True))
    assert facts_in(dest) == {}
