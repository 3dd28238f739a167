"""Conversions of rows with URLs: what becomes of each row, and when nobody answers any more."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

import mmstream as mm
from mmstream.cli import main
from tests.helpers.media_server import MediaServer
from tests.helpers.paths import PHOTOS

MEDIA = {path.name: path.read_bytes() for path in PHOTOS[:8]}
NAMES = list(MEDIA)


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


def test_every_row_with_a_url_is_a_sample_or_a_named_reject(tmp_path: Path) -> None:
    passing = ["status~429~1", "status~503", "silence", "reset", "cut", "close"]
    staying = {
        "status~404": "http 404",
        "redirect~http://10.0.0.3/x": "private address 10.0.0.3",
        "redirect~http://127.0.0.1:{secret}/": "private address 127.0.0.1",
        "header~X-Robots-Tag: noai": "says noai",
        "huge": "larger than",
        "bomb": "larger than",
        "cut": "cut off",
    }
    with MediaServer(MEDIA) as server, MediaServer({"": b"secret"}) as secret:
        urls, expected = [], {}
        for number in range(100):
            name = NAMES[number % len(NAMES)]
            if number % 5:
                urls.append(f"{server.url(name)}?n={number}")
            elif number % 10:
                urls.append(server.url(name, quote(passing[number // 10 % 6], safe="~"), 1))
            else:
                fault, reason = list(staying.items())[number // 10 % 7]
                fault = fault.format(secret=secret.port)
                urls.append(server.url(name, quote(fault, safe="~")))
                expected[number] = reason
        rows = write_rows(tmp_path, urls)
        options = downloads(server, max_bytes=1 << 20)
        report = mm.convert(
            rows,
            tmp_path / "shards",
            num_workers=2,
            samples_per_shard=40,
            downloads=options,
            progress=False,
        )
        assert secret.num_connections == 0
    assert (report.num_samples, report.num_rejects) == (100 - len(expected), len(expected))
    reasons = rejects(tmp_path / "shards")
    assert reasons.keys() == expected.keys()
    assert all(expected[number] in reasons[number] for number in expected)
    dataset = mm.open_dataset(str(tmp_path / "shards"))
    stored = {sample["txt"].decode(): sample["jpg"] for sample in dataset}
    for number in range(100):
        if number not in expected:
            assert stored[f"photo {number}"] == MEDIA[NAMES[number % len(NAMES)]]


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
        words = ["convert", str(rows), str(tmp_path / "shards"), *options.words()]
        monkeypatch.setattr(sys, "argv", ["mmstream", *words, "--num-workers", "1"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert server.max_open <= 2
    assert "8 rows -> 8 samples" in capsys.readouterr().out
    assert list(mm.DownloadOptions().words()) == []
