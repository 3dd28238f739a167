"""The C JPEG decoder under sanitizers, fuzzed by tools/prove/fuzz_jpeg.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import DATA, ROOT

COMPILER = os.environ.get("CC", "gcc")

NUM_INPUTS = 4000
"""Inputs without a failure."""

UNTIL_FOUND = 1_000_000
"""Inputs that end at the first failure, after a second or two."""


def has_sanitizers(folder: Path) -> bool:
    source, program = folder / "empty.c", folder / "empty"
    source.write_text("int main(void) { return 0; }\n")
    compile_command = [COMPILER, "-fsanitize=address,undefined", source, "-o", program]
    return all(
        subprocess.run(command, capture_output=True, check=False).returncode == 0
        for command in (compile_command, [program])
    )


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves the builds for the others."""
    folder = tmp_path_factory.mktemp("fuzz_jpeg")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler ({COMPILER})")
    if not has_sanitizers(folder):
        pytest.skip(f"{COMPILER} has no sanitizers that work here")
    return folder


def fuzz(
    builds: Path, num_inputs: int, *files: Path, planted_bug: str = ""
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "tools/prove/fuzz_jpeg.sh"), "1000", *map(str, files)]
    settings = {"OUT": str(builds), "INPUTS": str(num_inputs), "PLANTED_BUG": planted_bug}
    return subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False
    )


def value(output: str, build: str, key: str) -> int:
    match = re.search(rf"^{build}: {key} (\d+)$", output, re.MULTILINE)
    assert match, output
    return int(match[1])


@pytest.mark.slow
def test_mutated_files_never_make_the_decoder_fail(builds: Path) -> None:
    run = fuzz(builds, NUM_INPUTS)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("no failures\n")
    inputs, pictures = (value(run.stdout, "sse2", key) for key in ("inputs", "pictures"))
    assert inputs == NUM_INPUTS
    assert pictures >= inputs / 20, "nearly all mutated files are refused by their headers"
    assert value(run.stdout, "portable", "inputs") == inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted_bug", "num_inputs", "message"),
    [
        ("overread", UNTIL_FOUND, "\nREAD of size 1"),
        ("overwrite", UNTIL_FOUND, "\nWRITE of size 1"),
        ("undefined", UNTIL_FOUND, "runtime error: shift exponent"),
        ("hang", UNTIL_FOUND, "FAILED: an input takes too long"),
        ("unwritten", 200, "FAILED: pixels differ between the builds"),  # compared at the end
        ("leak", 200, "LeakSanitizer: detected memory leaks"),
    ],
)
def test_a_planted_bug_is_caught(
    builds: Path, planted_bug: str, num_inputs: int, message: str
) -> None:
    run = fuzz(builds, num_inputs, planted_bug=planted_bug)
    assert run.returncode != 0
    assert message in run.stderr, run.stdout + run.stderr


@pytest.mark.slow
def test_a_saved_input_repeats_the_failure(builds: Path, tmp_path: Path) -> None:
    fuzz(builds, UNTIL_FOUND, planted_bug="overwrite")
    failing = next(builds.glob("*/failure-sse2.jpg")).read_bytes()
    assert failing not in [path.read_bytes() for path in DATA.glob("*/*.jpg")]
    (tmp_path / "saved.jpg").write_bytes(failing)
    run = fuzz(builds, 0, tmp_path / "saved.jpg", planted_bug="overwrite")
    assert run.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr
