"""Rows with URLs, a fifth of which meets a fault, and what must become of each.

Faults are answers that come late, break off, ask for patience, or lead to private addresses. Those
that pass cost no row. Those that stay are rejects for their own reason.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import mmstream as mm
from tests.helpers.convert_corpus import rejects, write_rows
from tests.helpers.media_server import MediaServer
from tests.helpers.paths import PHOTOS

ALWAYS = 1 << 30
MEDIA = {path.name: path.read_bytes() for path in PHOTOS[:8]}
OTHERS = {"page.jpg": b"<!DOCTYPE html><html><body>Please log in</body></html>", "empty.jpg": b""}


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
    Fault("302 without a target", "status~302", "http 302$"),
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
    Fault("brotli", "header~Content-Encoding: br", "content-encoding 'br' is not supported$"),
    Fault("a page of HTML", "http://{server}/page.jpg", "not an image "),
    Fault("no content", "http://{server}/empty.jpg", "has no content$"),
    Fault("noai", "header~X-Robots-Tag: noai", "says noai;"),
    Fault("TDM-Reservation", "header~TDM-Reservation: 1", "says tdm-reservation;"),
    *_forged("http://127.0.0.1:{private}/a.jpg", PRIVATE),
    *_forged("http://localhost:{private}/a.jpg", "(private address|not found in DNS)"),
    *_forged("http://2130706433:{private}/a.jpg", "(private address|not a URL)"),
    Fault("a redirect without a scheme", "redirect~//127.0.0.1:{private}/a.jpg", PRIVATE),
    *_forged("http://[::ffff:127.0.0.1]:{private}/a.jpg", "private address"),
    *_forged("http://me@127.0.0.1:{private}/a.jpg", "has a user or password in it"),
    *_forged("http://169.254.169.254/latest/meta-data/", r"private address 169\.254\.169\.254"),
    Fault("a redirect to a file", "redirect~file:///etc/passwd", "is neither http nor https"),
)


GOOD = Fault("good", "")
NUM_ROWS = 200


def write_faulty_rows(path: Path, server: MediaServer, private: MediaServer) -> dict[int, Fault]:
    """Write rows with URLs. Return the fault of each row that has one, by its number from 1."""
    faulty = sorted(random.Random(0).sample(range(1, NUM_ROWS + 1), NUM_ROWS // 5))
    faults = {number: FAULTS[i % len(FAULTS)] for i, number in enumerate(faulty)}
    rows = []
    for number in range(1, NUM_ROWS + 1):
        fault, name = faults.get(number, GOOD), _medium(number)
        answer = fault.answer.format(server=server.host, private=private.port)
        url = f"{server.url(name)}?n={number}"
        if answer.startswith("http"):
            url = answer
        elif answer:
            url = f"{server.url(name, quote(answer, safe='~'), fault.num_answers)}&n={number}"
        rows.append({"image": url, "text": f"photo {number}"})
    write_rows(path, rows)
    return faults


def problems(dest: Path, faults: dict[int, Fault]) -> list[str]:
    """Return a line for each row of a conversion that is not what it must be."""
    reasons = rejects(dest)
    photos = {int(sample["__key__"]): sample["jpg"] for sample in mm.open_dataset(dest)}
    wrong = []
    for number in range(1, NUM_ROWS + 1):
        fault, reason, photo = faults.get(number, GOOD), reasons.get(number), photos.get(number)
        if fault.reason:
            is_right = photo is None and re.search(fault.reason, reason or "")
        else:
            is_right = reason is None and photo == MEDIA[_medium(number)]
        if not is_right:
            wrong.append(f"row {number} ({fault.name}) is {photo and 'a sample'}, reason: {reason}")
    return wrong


def _medium(number: int) -> str:
    return list(MEDIA)[number % len(MEDIA)]
