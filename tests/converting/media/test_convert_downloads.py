"""Conversions of rows with URLs: what becomes of each row, and when nobody answers any more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.converting.media import retries
from tests.helpers.media_server import MediaServer
from tools.prove import downloads as proof
from tools.prove.downloads import MEDIA

NAMES = list(MEDIA)
NUM_ROWS = 200
KINDS = [fault for fault in proof.FAULTS if fault.answer not in ("silence", "dribble")]
"""Faults that need no time-out, so that the result does not depend on how busy the machine is."""


def write_rows(folder: Path, urls: list[str]) -> Path:
    path = folder / "rows.jsonl"
    rows = [{"image": url, "text": f"photo {number}"} for number, url in enumerate(urls)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def downloads(*servers: MediaServer, **changes: object) -> mm.DownloadOptions:
    hosts = tuple(server.host for server in servers)
    values = {"allow_hosts": hosts, "timeout_s": 2, "idle_timeout_s": 0.5, **changes}
    return mm.DownloadOptions(**values)  # type: ignore[arg-type]


def rejects(folder: Path) -> dict[int, str]:
    lines = (folder / "rejects.jsonl").read_text().splitlines()
    return {row["row"] - 1: row["reason"] for row in map(json.loads, lines)}


@pytest.fixture
def servers() -> Iterator[list[MediaServer]]:
    """A server of media, and one that nobody may reach."""
    with MediaServer({**MEDIA, **proof.PAGE}) as server, MediaServer(MEDIA) as private:
        yield [server, private]


def problems(folder: Path, servers: list[MediaServer], allowed: list[MediaServer]) -> list[str]:
    """Convert rows of which a fifth has faults, and return what is wrong."""
    rows, out = folder / "rows.jsonl", folder / "out"
    faults = proof.write_rows(rows, NUM_ROWS, 0, servers[:1], servers[1], KINDS)
    assert set(faults.values()) == set(KINDS)
    hosts = tuple(server.host for server in allowed)
    options = mm.DownloadOptions(allow_hosts=hosts, max_bytes=1 << 20)
    mm.convert(rows, out, downloads=options, progress=False)
    return proof.problems(out, NUM_ROWS, faults)


def test_every_row_with_a_url_is_a_sample_or_a_named_reject(
    tmp_path: Path, servers: list[MediaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "MAX_WAIT_S", 0.02)
    assert problems(tmp_path, servers, allowed=servers[:1]) == []
    assert servers[1].num_connections == 0


def test_a_forged_request_is_noticed(
    tmp_path: Path, servers: list[MediaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof above fails where the private server may be reached."""
    monkeypatch.setattr(retries, "MAX_WAIT_S", 0.02)
    found = problems(tmp_path, servers, allowed=servers)
    assert found
    assert all("127.0.0.1" in line for line in found)
    assert servers[1].num_connections > 0


def test_a_conversion_whose_server_dies_stops_and_goes_on_later(tmp_path: Path) -> None:
    with MediaServer(MEDIA) as server:
        urls = [f"{server.url(NAMES[number % 8])}?n={number}" for number in range(40)]
        urls[7] = server.url("none.jpg")
        urls[25] = server.url(NAMES[0], "stop")
        rows = write_rows(tmp_path, urls)
        options = downloads(server, num_connections=1, num_tries=1)

        def run(dest: str, **changes: object) -> mm.ConvertReport:
            return mm.convert(
                rows,
                tmp_path / dest,
                samples_per_shard=10,
                downloads=options,
                progress=False,
                **changes,  # type: ignore[arg-type]
            )

        with pytest.raises(mm.StorageError, match="run the same command again to continue"):
            run("shards")
        server.revive()
        assert not (tmp_path / "shards" / "mmstream.json").exists()
        report = run("shards")
        assert run("quiet").num_rejects == report.num_rejects == 1
    files = {path.name: path.read_bytes() for path in (tmp_path / "quiet").glob("shard-*")}
    assert len(files) >= 12
    for name, data in files.items():
        assert (tmp_path / "shards" / name).read_bytes() == data


def test_the_command_line_has_every_option_of_downloads(
    tmp_path: Path, mmstream: Callable[..., tuple[int, str, str]]
) -> None:
    with MediaServer(MEDIA, {"X-Robots-Tag": "noai"}) as server:
        options = downloads(
            server,
            num_connections=8,
            num_connections_per_host=2,
            num_tries=2,
            max_bytes=1_000_000,
            max_redirects=1,
            max_unanswered=7,
            honor_robots=False,
        )
        rows = write_rows(tmp_path, [server.url(name) for name in NAMES])
        words = *options.words(), "--num-workers", 1
        code, out, _ = mmstream("convert", rows, tmp_path / "shards", *words)
        assert code == 0
        assert server.max_open <= 2
    assert "8 rows -> 8 samples" in out
    assert list(mm.DownloadOptions().words()) == []
