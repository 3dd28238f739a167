"""Messages: one printable line, whoever wrote the data that they speak of."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.errors import (
    MAX_DATA_CHARACTERS,
    MAX_MESSAGE_CHARACTERS,
    MMStreamError,
    escaped,
    where,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()))
OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("new\nline", r"new\nline"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\x7f\x9b", r"a\x7f\x9b"),
        ("left\u202eright", r"left\u202eright"),
        ("a\u2028b\u2029c\x85", r"a\u2028b\u2029c\x85"),
        ("\udcff", r"\udcff"),
        ("\ufeff\u200b", r"\ufeff\u200b"),
        ("\U000e0041", r"\U000e0041"),
        ("猫 grüße 🐈 C:\\n", "猫 grüße 🐈 C:\\n"),
        (b"bytes\n", "b'bytes\\n'"),
    ],
)
def test_what_a_terminal_would_obey_becomes_visible(text: object, shown: str) -> None:
    assert escaped(text) == shown


@given(ANY_TEXT)
def test_any_text_becomes_one_printable_line_that_can_be_encoded(text: str) -> None:
    shown = escaped(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(char) for char in shown} & OBEYED
    assert escaped(shown) == shown


def test_a_long_text_loses_its_middle_and_says_so() -> None:
    shown = escaped("x" * 500 + "y" * 500)
    assert len(shown) <= MAX_DATA_CHARACTERS
    assert shown == "x" * 120 + "[840 characters left out]" + "y" * 40
    assert escaped(shown) == shown
    assert escaped("x" * 1000, limit=None) == "x" * 1000


def test_addresses_are_one_line_whatever_the_names_are() -> None:
    assert where("s\n.tar", 3, "\x1b[2J", "j\u202epg") == r"s\n.tar[3] \x1b[2J.j\u202epg"
    assert len(where("s" * 1000, 3, "k" * 1000, "f" * 1000)) < 4 * MAX_DATA_CHARACTERS


@pytest.mark.parametrize(
    "kind", [mm.SampleError, mm.errors.StorageError, mm.StateError, MMStreamError]
)
def test_the_message_of_every_error_is_one_printable_line(kind: type[MMStreamError]) -> None:
    error = kind("shard\nline \udcff \x1b[2J" + "x" * 10_000)
    assert str(error).startswith(r"shard\nline \udcff \x1b[2Jxxx")
    assert len(str(error)) <= MAX_MESSAGE_CHARACTERS


def test_the_reference_has_every_error() -> None:
    """Each class stands in the table of errors, with its base classes."""
    rows = (Path(__file__).parent.parent / "docs/api/index.md").read_text().splitlines()
    table = "\n".join(row for row in rows if row.startswith("| "))
    for name, kind in vars(mm.errors).items():
        if isinstance(kind, type) and issubclass(kind, MMStreamError):
            (row,) = (row for row in table.splitlines() if f"`{name}`" in row.split("|")[1])
            assert kind is MMStreamError or f"`{kind.__base__.__name__}`" in row.split("|")[3], name
