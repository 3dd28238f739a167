"""Destinations of conversions of each kind, for one test each."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def dest(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "out")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
