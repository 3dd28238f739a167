"""Batches of small corpora of all kinds are those of the golden file, tensor by tensor.

Whoever means to change them runs ``python -m tools.prove.digests --write``.
"""

from __future__ import annotations

import pytest

from tools.prove.digests.record import (
    Results,
    compare,
    differences,
    machine,
    record_case,
    run_cases,
)

HEAD = "uint8 [4, 3, 24, 32] "
OLD = {
    "batch 0: image": f"{HEAD}0123456789abcdef ~ 103.04 104.97 122.11 127.62",
    "batch 0: image_row": "int64 [4] 89abcdef01234567",
    "bad sample 0": "epoch=0 row=1 kind=DecodeError: shard-000000.tar[1]: Premature end",
}


@pytest.mark.slow
def test_batches_bad_samples_and_lengths_are_those_of_the_golden_file() -> None:
    assert list(compare(run_cases())) == []


@pytest.mark.parametrize("name", ["1 lists of PNG and JPEG", "7 a fixed shape with bad rows"])
def test_some_batches_are_those_of_the_golden_file(name: str) -> None:
    results = Results(machine(), {name: record_case(name)})
    assert list(compare(results)) == []


@pytest.mark.parametrize(
    ("place", "text", "is_near"),
    [
        ("batch 0: image", f"{HEAD}ffff456789abcdef ~ 103.5 104.97 122.11 127.62", True),
        ("batch 0: image", f"{HEAD}ffff456789abcdef ~ 105.04 104.97 122.11 127.62", False),
        ("batch 0: image", "uint8 [4, 3, 32, 24] 0123 ~ 103.04 104.97 122.11 127.62", False),
        ("batch 0: image_row", "int64 [4] ffffcdef01234567", False),
        ("bad sample 0", "epoch=0 row=1 kind=DecodeError: shard-000000.tar[1]: cut", True),
        ("bad sample 0", "epoch=0 row=1 kind=SampleError: shard-000000.tar[1]: cut", False),
        ("bad sample 1", "epoch=0 row=2 kind=DecodeError: shard-000000.tar[2]: cut", False),
    ],
)
def test_each_difference_is_told_but_roundings_of_other_machines(
    place: str, text: str, is_near: bool
) -> None:
    new = OLD | {place: text}
    line = f"{place}: {text}; it was {OLD.get(place, 'absent')}"
    assert list(differences(OLD, new)) == [line]
    assert list(differences(OLD, new, is_same_machine=False)) == ([] if is_near else [line])
