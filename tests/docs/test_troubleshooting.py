"""The page of troubleshooting has an entry for every message of the library, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from tests.helpers.messages import HOLE, Message, errors_of, messages_in, messages_of
from tests.helpers.paths import DOCS

PAGE = DOCS / "troubleshooting.md"
PATTERN = re.compile(r"^- `(.+)`$", re.M)
FEW_LETTERS = 12
"""Patterns with fewer of them could be anywhere."""
LEAST_WORDS = 15
"""Words that say why a message comes and what to do."""


@dataclass(frozen=True)
class Entry:
    """A heading of the page, the messages that it is about, and what it says."""

    title: str
    patterns: list[str]
    """Words of messages, with ``...`` for anything."""
    text: str


def entries_of(page: str) -> list[Entry]:
    entries = []
    for section in re.split(r"^### ", page, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        body = body.partition("\n## ")[0]
        entries.append(Entry(title, PATTERN.findall(body), PATTERN.sub("", body).strip()))
    return entries


def covers(pattern: str, message: Message) -> bool:
    """Tell whether a message is one of a pattern."""
    return matcher_of(pattern)(message.text.replace("`", "")) is not None


@cache  # there are more patterns than the cache of `re` holds
def matcher_of(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Return the function that matches a text with a pattern.

    - ``words: ...`` is all messages that begin so.
    - A pattern with few letters is the whole message, with ``...`` for the holes.
    - Any other pattern is words that stand in the message, in their order.
    """
    words = [re.escape(word) for word in pattern.split("...")]
    if pattern.endswith(": ...") and not pattern.startswith("..."):
        return re.compile("[^.]*".join(words[:-1])).match
    if len(re.sub(r"[^a-zA-Z]", "", pattern)) < FEW_LETTERS:
        return re.compile(f"{HOLE}+".join(words)).fullmatch
    return re.compile(".*".join(words).replace(r"\ .*", ".*")).search


ENTRIES = entries_of(PAGE.read_text())
MESSAGES = messages_of()


def test_every_message_of_the_library_has_an_entry():
    patterns = [pattern for entry in ENTRIES for pattern in entry.patterns]
    missing = [
        str(message)
        for message in MESSAGES
        if not any(covers(pattern, message) for pattern in patterns)
    ]
    assert missing == [], "add a line to an entry of docs/troubleshooting.md, or an entry"


def test_every_pattern_is_of_a_message_that_there_is():
    stale = [
        f"{entry.title}: {pattern}"
        for entry in ENTRIES
        for pattern in entry.patterns
        if not any(covers(pattern, message) for message in MESSAGES)
    ]
    assert stale == []


def test_there_are_many_messages_and_each_entry_says_what_to_do():
    assert len(MESSAGES) > 400
    assert len(ENTRIES) > 60
    for entry in ENTRIES:
        assert entry.patterns, entry.title
        assert len(entry.text.split()) >= LEAST_WORDS, entry.title
        for pattern in entry.patterns:
            assert len(re.sub(r"[^a-zA-Z_]", "", pattern)) >= 3, pattern


# -- the mechanism itself -------------------------------------------------------------------------

MODULE = """
class ConfigError(ValueError): ...
class StateError(ConfigError): ...
HINT = "see the docs"

def why(value) -> str:
    if value:
        return f"neither {value} nor tars"
    return "no folder"

def check(value, logger):
    if value:
        raise ConfigError(f"value={value}: must be above zero" + ("" if value else f"; {HINT}"))
    logger.warning("%d of %s", 1, 2)
    logger.info("no message")
    require(value, f"{value} do not fill one step")
    raise ConfigError(f"{value}: {why(value)}")
    return StateError("a" if value else f"bb {value}")
"""


def planted():
    tree = ast.parse(MODULE)
    return list(messages_in(tree, "planted.py", errors_of([tree])))


def test_messages_are_read_with_holes_branches_and_functions_of_text():
    texts = [message.text for message in planted()]
    assert texts == [
        f"value={HOLE}: must be above zero",
        f"value={HOLE}: must be above zero; see the docs",
        f"{HOLE} of {HOLE}",
        f"{HOLE} do not fill one step",
        f"{HOLE}: neither {HOLE} nor tars",
        f"{HOLE}: no folder",
        f"bb {HOLE}",
    ]


@pytest.mark.parametrize(
    ("pattern", "is_covered"),
    [
        ("must be above zero", True),
        ("value=...: must ... above zero", True),
        ("value=...: ...", True),
        ("must be below zero", False),
        ("above zero ... value=...: must be", False),
        ("zero", False),
    ],
)
def test_a_pattern_is_words_in_their_order(pattern, is_covered):
    assert covers(pattern, planted()[0]) is is_covered
