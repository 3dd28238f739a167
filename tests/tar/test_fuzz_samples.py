"""Mutated tars for the compiled parser: tools/prove/fuzz_samples, for a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmstream.errors import SampleError
from mmstream.tar.samples import parse_sample
from tools.prove.fuzz_samples import fuzz

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_compiled_parser_reads_nothing_outside_a_tar() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "tools/prove/fuzz_samples.sh"), "1"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("samples made: no failure\n")


def test_a_sample_that_is_not_the_one_of_the_careful_parser_is_noticed() -> None:
    def with_another_key(data: memoryview, starts: Any, stops: Any, urls: Any) -> list[Any]:
        try:
            sample = parse_sample(bytes(data[starts[0] : stops[0]]), urls[0])
        except SampleError:
            return [None]
        return [sample | {"__key__": "another"}]

    module: Any = SimpleNamespace(plain_samples=with_another_key)
    with pytest.raises(SystemExit, match=r"another sample \(seed 0, tar \d+\)"):
        fuzz(module, 60, 0)
