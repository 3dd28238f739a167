"""Attacks by what samples hold: texts and conversations before a real tokenizer, image bombs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mmstream as mm
from tests.helpers import chats
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.image_bombs import BOMBS
from tools.prove.attacks.attack import Attack, train

NUM_GOOD = 12


def _trained(field: str, data: bytes) -> Callable[[Path], None]:
    """Train on a corpus in which one text is hostile."""

    def good(number: int) -> bytes:
        if field == "txt":
            return b"caption %d" % number
        turns = [("user", "What?"), ("assistant", f"It is {number}.")]
        return json.dumps(
            {"messages": [{"role": role, "content": text} for role, text in turns]}
        ).encode()

    def run(folder: Path) -> None:
        write_corpus(folder, [NUM_GOOD], lambda n: {field: data if n == 5 else good(n)})
        decoder = mm.TextDecoder(chats.tokenizer(chats.CHATML), max_length=64, field=field)
        loader = train(folder, decode=mm.Decode(text=decoder), num_samples=NUM_GOOD)
        assert loader.stats.num_steps == NUM_GOOD // 4

    return run


MESSAGE = b'{"role": "user", "content": "x"},'
TEXTS = {
    "50 MB": b"word " * 10_000_000,
    "a megabyte without a space": b"a" * 1_000_000,
    "only combining marks": "\u0301".encode() * 300_000,
    "only emoji": "\U0001f600".encode() * 200_000,
    "only NUL": bytes(100_000),
    "special tokens": b"<|im_start|><|endoftext|><image><|video_pad|>" * 1000,
    "no UTF-8": b"\xff\xfe\x80" * 100,
}
CHATS = {
    "50 MB in one turn": b'{"messages": [' + MESSAGE[:-1].replace(b"x", b"y" * 50_000_000) + b"]}",
    "a million turns": b'{"messages": [' + MESSAGE * 999_999 + MESSAGE[:-1] + b"]}",
    "nested a million times": b'{"messages": ' + b"[" * 1_000_000,
    "a template as text": b'{"messages": ['
    + MESSAGE[:-1].replace(
        b"x", b"{% for a in range(10**9) %}{{ a }}{% endfor %}{{ ''.__class__ }}"
    )
    + b"]}",
    "roles that are not roles": b'{"messages": [{"role": "\\u001b[2J", "content": "x"}]}',
    "content that is a number": b'{"messages": [{"role": "user", "content": 1e999}]}',
    "a part that nothing decodes": b'{"messages": [{"role": "user", "content": '
    b'[{"type": "video", "video": 0}]}]}',
}

NUM_GOOD_IMAGES = 100


def _write(folder: Path) -> None:
    """Write every bomb as a sample, and good samples after them."""
    bombs = list(BOMBS.values())

    def fields(number: int) -> dict[str, bytes]:
        is_bomb = number < len(bombs)
        return {"jpg": bombs[number].make() if is_bomb else jpeg(number, (320, 240))}

    write_corpus(folder, [len(bombs), NUM_GOOD_IMAGES], fields)


def _train(folder: Path) -> None:
    """Train on all of them. Each bomb that is beyond a limit must be named."""
    refused = {number for number, bomb in enumerate(BOMBS.values()) if bomb.reason is not None}
    policy = mm.BadSamplePolicy(max_fraction=1.0, max_consecutive=0, quarantine=str(folder))
    train(
        folder,
        decode=mm.Decode(image=mm.ImageDecoder(size=224)),
        bad_samples=policy,
        global_batch_size=2,
        window=8,  # of raw bytes: some bombs have 64 MiB
        grid=(1, 1),
        drop_last=False,
    )
    lines = (folder / "quarantine-rank0.jsonl").read_text().splitlines()
    named = {record["index"] for record in map(json.loads, lines)}
    assert named == refused, f"not named: {sorted(refused - named)}, {sorted(named - refused)}"


ATTACKS = (
    *(Attack(f"text: {name}", _trained("txt", data)) for name, data in TEXTS.items()),
    *(Attack(f"chat: {name}", _trained("json", data)) for name, data in CHATS.items()),
    Attack("images: all bombs in one corpus", _train, prepare=_write),
)
