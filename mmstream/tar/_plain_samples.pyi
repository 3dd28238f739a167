"""Samples out of the bytes of tars, compiled (mmstream/csrc/); `plain_samples.py` describes it."""

from typing import Any

def plain_samples(
    data: memoryview, starts: list[int], stops: list[int], urls: list[str]
) -> list[dict[str, Any] | None]: ...
