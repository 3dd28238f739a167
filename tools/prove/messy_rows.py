"""Prove that every row of a messy corpus is a sample or a reject with the right reason.

    python -m tools.prove.messy_rows                 # 20,000 rows, 36 kinds of damage
    python -m tools.prove.messy_rows --rows 500      # a short one

A quarter of the rows is damaged, by all kinds in turn. The corpus is converted by the command line,
with worker processes. Then: rows = samples + rejects, no good row was rejected, every damaged row
was, for its own reason, and the exit code follows `--max-rejects`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

JPEG_HEAD = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"


class Damage(NamedTuple):
    """One way in which a row is wrong."""

    name: str
    row: Any
    """What the line holds: bytes as they are, anything else as JSON."""
    reason: str
    """What the reason must match, as a regular expression."""


def _photo(path: Any, **others: Any) -> dict[str, Any]:
    return {"image": path, "text": "a brown bear", **others}


def _chat(*turns: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"messages": list(turns), **others}


USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A bear."}

DAMAGES = (
    Damage("an empty line", b"", "^empty row$"),
    Damage("JSON that is cut", b'{"text": "a bear', "^not JSON: "),
    Damage("no JSON", b"a bear on grass", "^not JSON: "),
    Damage("two objects in a line", b'{"text": "a"} {"text": "b"}', "^not JSON: "),
    Damage("bytes that are not UTF-8", b'{"text": "a \xff\xfe bear"}', "^not UTF-8: "),
    Damage("a list", [1, 2], "^row: expected an object, found a list$"),
    Damage("a number", 7, "^row: expected an object, found a number$"),
    Damage("null", None, "^row: expected an object, found null$"),
    Damage("an empty object", {}, "^empty row$"),
    Damage("lists in lists", b"[" * 3000 + b"]" * 3000, "^not JSON: nested too deeply$"),
    Damage("unknown keys", {"column7": "a bear"}, "^no known format has the keys column7"),
    Damage("no such file", _photo("absent.jpg"), "^absent.jpg: no such file$"),
    Damage("an empty file", _photo("empty.jpg"), "^empty.jpg: empty file$"),
    Damage("a page of HTML", _photo("page.jpg"), "^page.jpg: not an image "),
    Damage("a sound as an image", _photo("sound.jpg"), "^sound.jpg: not an image but wav$"),
    Damage("a folder as a file", _photo("folder"), "^folder: not a file$"),
    Damage("a FIFO", _photo("fifo.jpg"), "^fifo.jpg: not a file$"),
    Damage("a way out by dots", _photo("../secret.jpg"), "lies outside the media root;"),
    Damage("an absolute path", _photo("/etc/passwd"), "lies outside the media root;"),
    Damage(
        "a link that leads out",
        _photo("link.jpg"),
        "^link.jpg: lies outside the media root, behind a link;",
    ),
    Damage("NUL in a path", _photo("a\0.jpg"), "not a path$"),
    Damage("a header that is cut", _photo("cut.jpg"), "^cut.jpg: "),
    Damage("a store that is not allowed", _photo("s3://bucket/1.jpg"), "^s3://bucket/1.jpg: "),
    Damage("an unknown scheme", _photo("gopher://host/1.jpg"), "^gopher://host/1.jpg: "),
    Damage("base64 that is none", _photo("data:image/jpeg;base64,%%%"), "^data:image/jpeg"),
    Damage("a number as a path", _photo(7), "^image: expected a path or a list of paths"),
    Damage("a blank text", _photo("good.jpg", text="  "), "^text is empty$"),
    Damage("no captions", {"image": "good.jpg", "captions": []}, "^captions is empty$"),
    Damage(
        "a number as a caption",
        {"image": "good.jpg", "captions": ["a", 7]},
        r"^captions\[1\]: expected a string, found a number$",
    ),
    Damage("no turns", {"messages": []}, "^messages is empty$"),
    Damage("an unknown role", _chat({"role": "ghost", "content": "Boo."}), "unknown role 'ghost'"),
    Damage("a turn that is not an object", {"messages": ["hello"]}, "^turn 1: expected an object"),
    Damage(
        "a turn without content", _chat({"role": "user"}), "^turn 1: (content|value): expected "
    ),
    Damage(
        "more tokens than images",
        _chat({"role": "user", "content": "<image><image>What?"}, ANSWER, images=["good.jpg"]),
        "^2 <image> tokens but 1 image files$",
    ),
    Damage(
        "a part of an unknown type",
        _chat({"role": "user", "content": [{"type": "smell", "smell": "sweet"}]}),
        "parts of type 'smell' are not supported",
    ),
    Damage("a blank answer", {"instruction": "What?", "output": " "}, "^output is empty$"),
)

GOOD: tuple[Callable[[int], dict[str, Any]], ...] = (
    lambda i: {"id": i, **_photo("good.jpg")},
    lambda i: {"id": i, "text": f"text {i}"},
    lambda i: _chat(USER, ANSWER, images=["good.jpg"], id=i),
    lambda i: {"id": i, "instruction": "What is it?", "output": "A bear."},
    lambda i: {"id": i, "image": "good.jpg", "captions": ["one", "two"]},
)


def write_messy_corpus(folder: Path, num_rows: int, seed: int) -> tuple[Path, dict[int, Damage]]:
    """Write rows and media.

    Returns:
        The file of rows, and the damage of each row that has one, by its number from 1.
    """
    rng = random.Random(seed)
    media = folder / "media"
    (media / "folder").mkdir(parents=True)
    _write_media(folder, media)
    damaged = set(rng.sample(range(1, num_rows + 1), max(len(DAMAGES), num_rows // 4)))
    damages: dict[int, Damage] = {}
    lines = []
    for number in range(1, num_rows + 1):
        row: Any = rng.choice(GOOD)(number)
        if number in damaged:
            damages[number] = DAMAGES[len(damages) % len(DAMAGES)]
            row = damages[number].row
        lines.append(row if isinstance(row, bytes) else json.dumps(row).encode())
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path, damages


def _write_media(folder: Path, media: Path) -> None:
    from PIL import Image

    Image.new("RGB", (32, 24), (90, 60, 30)).save(media / "good.jpg")
    (media / "empty.jpg").write_bytes(b"")
    (media / "page.jpg").write_bytes(b"<!DOCTYPE html><html><body>404</body></html>")
    (media / "sound.jpg").write_bytes(b"RIFF\x24\0\0\0WAVEfmt " + bytes(28))
    (media / "cut.jpg").write_bytes(JPEG_HEAD)
    (folder / "secret.jpg").write_bytes((media / "good.jpg").read_bytes())
    (media / "link.jpg").symlink_to(folder / "secret.jpg")
    os.mkfifo(media / "fifo.jpg")


def problems(dest: Path, num_rows: int, damages: dict[int, Damage]) -> list[str]:
    """Return what is wrong with a conversion of the corpus, one line each."""
    report = json.loads((dest / "report.json").read_text())
    rejects = [json.loads(line) for line in (dest / "rejects.jsonl").read_text().splitlines()]
    faults = []
    if report["num_rows"] != num_rows or num_rows != report["num_samples"] + len(rejects):
        faults.append(f"{num_rows} rows, {report['num_samples']} samples, {len(rejects)} rejects")
    if report["num_rejects"] != len(rejects) or len({r["row"] for r in rejects}) != len(rejects):
        faults.append("report.json and rejects.jsonl differ, or a row was rejected twice")
    if sum(kind["num_rows"] for kind in report["reject_kinds"]) != len(rejects):
        faults.append("the kinds of rejects do not sum to the rejects")
    reasons = {reject["row"]: reject["reason"] for reject in rejects}
    for number in sorted(damages.keys() | reasons.keys()):
        damage, reason = damages.get(number), reasons.get(number)
        if damage is None:
            faults.append(f"row {number} is good, and was rejected: {reason}")
        elif reason is None:
            faults.append(f"row {number} ({damage.name}) was not rejected")
        elif not re.search(damage.reason, reason):
            faults.append(f"row {number} ({damage.name}) has the reason: {reason}")
    return faults


def main() -> int:
    """Convert a messy corpus, print what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, damages = write_messy_corpus(folder, arguments.rows, arguments.seed)
        faults = []
        for limit, expected in (("1%", 1), ("100%", 0), (str(len(damages)), 0)):
            dest = folder / f"out-{limit}"
            words = ["convert", rows, dest, "--media-root", folder / "media"]
            words += ["--max-rejects", limit, "--num-workers", arguments.workers]
            command = [sys.executable, "-m", "mmstream", *map(str, words)]
            code = subprocess.run(command, capture_output=True, check=False).returncode
            if code != expected:
                faults.append(f"--max-rejects {limit}: exit code {code}, not {expected}")
        faults += problems(folder / "out-1%", arguments.rows, damages)
    kinds = Counter(damage.name for damage in damages.values())
    print(f"{arguments.rows:,} rows, {len(damages):,} of them damaged in {len(kinds)} ways")
    for line in faults[:50]:
        print(f"  {line}")
    print(f"{len(faults):,} problems")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
