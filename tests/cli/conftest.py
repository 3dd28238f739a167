"""What all tests of the command line use."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def printed(mmstream: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run a command that succeeds; return what it prints."""

    def run(*words: object) -> str:
        code, out, err = mmstream(*words)
        assert code == 0, out + err
        return out

    return run
