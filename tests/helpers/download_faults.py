"""Rows with URLs, a fifth of which meets a fault, and what must become of each.

Faults are answers that come late, break off, ask for patience, or lead to private addresses. Those
that pass cost no row. Those that stay are rejects for their own reason.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import mmstream as mm
from tests.helpers.media_server import MediaServer
from tests.helpers.paths import PHOTOS

ALWAYS = 1 << 30
MEDIA = {path.name: path.read_bytes() for path in PHOTOS[:8]}
PAGE = {"page.jpg": b"<!DOCTYPE html><html><body>Please log in</body></html>"}


class Fault(NamedTuple):
    """What is wrong with the URL of a row."""

    name: str
    answer: str
    """What the server does, as `MediaServer` spells it. Or the URL that stands in the row."""
    reason: str = ""
    """What the reason of the reject matches. Empty: the row becomes a sample."""
    num_answers: int = ALWAYS
    """How many answers have the fault. Later ones are good."""


def _passing(name: str, answer: str) -> Fault:
    return Fault(f"{name}, once", answer, "", 1)


def _forged(url: str, reason: str) -> tuple[Fault, Fault]:
    return (
        Fault(f"the URL {url}", url, reason),
        Fault(f"a redirect to {url}", f"redirect~{url}", f"redirects to .*{reason}"),
    )


PRIVATE = r"private address 127\.0\.0\.1"

FAULTS = (
    _passing("429 with Retry-After", "status~429~1"),
    _passing("503 without Retry-After", "status~503"),
    _passing("500", "status~500"),
    _passing("a reset in mid-body", "reset"),
    _passing("closed without an answer", "close"),
    _passing("cut off", "cut"),
    _passing("cut off, with an ETag", 'cut~"v1"'),
    _passing("cut off, and another file since", 'cut~"v0"'),
    Fault("gzip", "gzip"),
    Fault("404", "status~404", "http 404$"),
    Fault("403", "status~403", "http 403$"),
    Fault("503 for ever", "status~503", "http 503$"),
    Fault("cut off for ever", "cut", "cut off: .* bytes$"),
    Fault("a reset in mid-body for ever", "reset", "cut off: .* bytes$"),
    Fault("closed for ever", "close", "closed the connection without an answer$"),
    Fault("redirects in a circle", "loop", "more than 5 redirects$"),
    Fault("a terabyte announced", "huge", "larger than 1,048,576 bytes$"),
    Fault("no end", "endless", "larger than 1,048,576 bytes$"),
    Fault("a bomb of gzip", "bomb", "larger than 1,048,576 bytes when decompressed$"),
    Fault("no HTTP", "noise", "its answer is not HTTP$"),
    Fault("a page of HTML", "http://{server}/page.jpg", "not an image "),
    Fault("noai", "header~X-Robots-Tag: noai", "says noai;"),
    Fault("TDM-Reservation", "header~TDM-Reservation: 1", "says tdm-reservation;"),
    *_forged("http://127.0.0.1:{private}/a.jpg", PRIVATE),
    *_forged("http://localhost:{private}/a.jpg", "(private address|not found in DNS)"),
    *_forged("http://2130706433:{private}/a.jpg", "(private address|not a URL)"),
    *_forged("http://[::ffff:127.0.0.1]:{private}/a.jpg", "private address"),
    *_forged("http://me@127.0.0.1:{private}/a.jpg", "has a user or password in it"),
    *_forged("http://169.254.169.254/latest/meta-data/", r"private address 169\.254\.169\.254"),
    Fault("a redirect to a file", "redirect~file:///etc/passwd", "is neither http nor https"),
)


def write_rows(
    path: Path,
    num_rows: int,
    seed: int,
    servers: Sequence[MediaServer],
    private: MediaServer,
) -> dict[int, Fault]:
    """Write rows with URLs.

    Returns:
        The fault of each row that has one, by its number from 1. All kinds occur where the rows are
        five times as many.
    """
    rng = random.Random(seed)
    faulty = sorted(rng.sample(range(1, num_rows + 1), num_rows // 5))
    faults = {number: FAULTS[i % len(FAULTS)] for i, number in enumerate(faulty)}
    with path.open("w") as file:
        for number in range(1, num_rows + 1):
            server, name = servers[number % len(servers)], _medium(number)
            fault = faults.get(number)
            url = f"{server.url(name)}?n={number}"
            if fault is not None:
                answer = fault.answer.format(server=server.host, private=private.port)
                is_answer = not answer.startswith("http")
                quoted = quote(answer, safe="~")
                url = server.url(name, quoted, fault.num_answers) if is_answer else answer
                url += f"&n={number}" if is_answer else ""
            file.write(json.dumps({"image": url, "text": f"photo {number}"}) + "\n")
    return faults


def problems(dest: Path, num_rows: int, faults: dict[int, Fault]) -> list[str]:
    """Return what is wrong with a conversion of the rows, one line each."""
    lines = (dest / "rejects.jsonl").read_text().splitlines()
    reasons = {reject["row"]: reject["reason"] for reject in map(json.loads, lines)}
    photos = {int(sample["__key__"]): sample["jpg"] for sample in mm.open_dataset(str(dest))}
    found = []
    for number in range(1, num_rows + 1):
        fault, reason = faults.get(number), reasons.get(number)
        name = f"row {number} ({fault.name if fault else 'good'})"
        if (number in photos) == (reason is not None):
            found.append(f"{name} is lost, or is both a sample and a reject")
        elif fault is not None and fault.reason:
            if reason is None or not re.search(fault.reason, reason):
                found.append(f"{name} has the reason: {reason}")
        elif reason is not None:
            found.append(f"{name} was rejected: {reason}")
        elif photos[number] != MEDIA[_medium(number)]:
            found.append(f"{name} has other bytes")
    return found


def _medium(number: int) -> str:
    return list(MEDIA)[number % len(MEDIA)]
