"""A messy corpus, as ``python -m tools.prove.messy_rows`` makes it, but smaller."""

from __future__ import annotations

import msgspec
import pytest

from mmstream.converting.rejects import REJECTS_NAME, Reject, group_rejects
from mmstream.storage import open_store
from tests.helpers.convert_corpus import run, tree
from tools.prove.messy_rows import DAMAGES, problems, write_messy_corpus


def test_every_row_is_a_sample_or_a_reject_with_the_right_reason(tmp_path):
    rows, damages = write_messy_corpus(tmp_path, 200, seed=1)
    assert {damage.name for damage in damages.values()} == {damage.name for damage in DAMAGES}
    report = run(rows, tmp_path / "out", media_root=tmp_path / "media")
    assert problems(tmp_path / "out", 200, damages) == []
    assert report.has_more_rejects_than(0.01)
    assert sum(kind.num_rows for kind in report.reject_kinds) == report.num_rejects == len(damages)
    run(rows, tmp_path / "again", media_root=tmp_path / "media", num_workers=2)
    assert tree(tmp_path / "again") == tree(tmp_path / "out")


@pytest.mark.parametrize("lost", ["reject", "sample"])
def test_a_lost_row_is_noticed(tmp_path, lost):
    rows, damages = write_messy_corpus(tmp_path, 100, seed=2)
    run(rows, tmp_path / "out", media_root=tmp_path / "media")
    path = tmp_path / "out" / ("rejects.jsonl" if lost == "reject" else "report.json")
    text = path.read_text()
    changed = (
        text[text.index("\n") + 1 :]
        if lost == "reject"
        else text.replace('samples": ', 'samples": 1')
    )
    path.write_text(changed)
    assert problems(tmp_path / "out", 100, damages)


def test_reasons_that_differ_in_names_only_are_counted_together():
    store = open_store("memory://reasons-by-kind")
    reasons = [
        *("a.jpg: no such file", "C:\\b 1.jpg: no such file"),
        *("https://host/a: status 404", "https://host/b: status 410"),
        *("to_row(): KeyError: 'a'", "to_row(): KeyError: 'b'"),
    ]
    lines = [msgspec.json.encode(Reject("rows.jsonl", 1, reason)) + b"\n" for reason in reasons]
    store.write(REJECTS_NAME, b"".join(lines))
    kinds = [group.kind for group in group_rejects(store)]
    assert kinds == ["*: no such file", "*: status *", "to_row(): KeyError: *"]
