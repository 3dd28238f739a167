"""The functions of torch on a CPU, which may be coarse in the first call of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mmstream as mm
from mmstream.decoding import step

FIRST_CALLS = """
import torch
from mmstream.decoding.threaded_calls import resolve_vector_math
resolve_vector_math()
torch.set_num_threads(2)
values = torch.linspace(0.001, 1, 262_144)
for name in ("sin", "log10", "exp"):
    function = getattr(torch, name)
    exact = function(values.double()).float()
    assert torch.allclose(function(values), exact, rtol=1e-6, atol=1e-7), name
"""


@pytest.mark.slow
def test_the_first_results_of_a_process_with_two_threads_are_exact() -> None:
    """Without the call, up to one process in four fails here where torch has MKL 2024.2."""
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True, timeout=500)


@pytest.mark.parametrize(("num_threads", "expected"), [(1, 0), (2, 1)])
def test_threads_that_decode_start_behind_the_first_call(
    corpus: str, num_threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(step, "resolve_vector_math", lambda: calls.append(None))
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=4, decode=mm.Decode())
    for _ in mm.Loader(pipeline, num_workers=0, num_threads=num_threads):
        pass
    assert len(calls) == expected
