"""Attacks by image bombs: all of them in one corpus, beside good samples."""

from __future__ import annotations

import json
from pathlib import Path

import mmstream as mm
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.image_bombs import BOMBS
from tools.prove.attacks.attack import Attack, train

NUM_GOOD = 100


def _write(folder: Path) -> None:
    """Write every bomb as a sample, and good samples after them."""
    bombs = list(BOMBS.values())

    def fields(number: int) -> dict[str, bytes]:
        is_bomb = number < len(bombs)
        return {"jpg": bombs[number].make() if is_bomb else jpeg(number, (320, 240))}

    write_corpus(folder, [len(bombs), NUM_GOOD], fields)


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


ATTACKS = (Attack("images: all bombs in one corpus", _train, prepare=_write),)
