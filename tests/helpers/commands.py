"""The command line, in the process of a test."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import pytest

from mmstream.cli import main


def run_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run ``mmstream WORDS`` in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["mmstream", *words])
    logger = logging.getLogger("mmstream")
    level = logger.level  # a command sets it for its process, which ends with it
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
    finally:
        logger.setLevel(level)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code
