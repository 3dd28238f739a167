"""Destinations of conversions of each kind, and conversions that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fsspec
import pytest

from tests.converting.pausing import PausedConversions
from tests.helpers.convert_corpus import make_corpus, run, tree


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def dest(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "out")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


@pytest.fixture
def corpus(tmp_path):
    """Forty rows, of which two will be rejected."""
    return make_corpus(tmp_path)


@pytest.fixture
def whole(corpus, tmp_path):
    """The files of the corpus that one call has converted, undisturbed."""
    run(corpus, tmp_path / "whole")
    return tree(tmp_path / "whole")


@pytest.fixture
def out(corpus, tmp_path):
    """The folder of the corpus that has been converted."""
    run(corpus, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def memory():
    """fsspec's file system in memory; what lies in its ``/bucket`` is gone after the test."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/bucket", recursive=True)


@pytest.fixture
def paused(corpus, dest) -> Iterator[Callable]:
    """Start a conversion in another process. Yield it when it is in the middle of a shard."""
    conversions = PausedConversions(corpus, dest)
    yield conversions.start
    conversions.end()
