"""Write the lock files from constraints.txt: ``pip install uv && python tools/lock.py``.

    requirements.lock       every package of constraints.txt, with the hashes of all its files
    requirements-cuda.lock  what a CUDA build of torch needs beside it

`tools/env.sh` installs from them and accepts no other file. Hashes come from the package index that
pip uses. Where pip would take another build on this machine, such as a CPU build of torch from
another index, the hash of that build is added. Run it again after a change of constraints.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_VERSION = "3.11.5"


def main() -> None:
    """Write both lock files."""
    pins = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:60]
    ]
    pins = [pin for pin in pins if not pin.startswith("#")]
    locked = compiled(pins, "--no-deps")
    for name, digest in hashes_of_this_machine(pins).items():
        if digest not in locked[name]:
            locked[name] += f" \\\n    --hash=sha256:{digest}"
    write("requirements.lock", locked)
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    with_cuda = compiled([torch], "--python-platform", "x86_64-manylinux_2_28")
    write("requirements-cuda.lock", {k: v for k, v in with_cuda.items() if k not in locked})


def compiled(pins: list[str], *options: str) -> dict[str, str]:
    """Return the lock entry of each package: its pin and its hashes."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "lock")
        command = ["uv", "pip", "compile", "-", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--quiet", "--python-version", PYTHON_VERSION, "--output-file", str(lock)]
        subprocess.run([*command, *options], input="\n".join(pins), text=True, check=True)
        entries = re.split(r"\n(?=\S)", lock.read_text().strip())
    return {canonical(entry.partition("==")[0]): entry for entry in entries}


def hashes_of_this_machine(pins: list[str]) -> dict[str, str]:
    """Return the sha256 of the file that pip takes for each package on this machine."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--report", "-", *pins]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {
        canonical(entry["metadata"]["name"]): entry["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for entry in report["install"]
    }


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write(name: str, entries: dict[str, str]) -> None:
    """Write a lock file, one package after the other, sorted by name."""
    head = "# Made by tools/lock.py from constraints.txt. Do not edit.\n"
    (ROOT / name).write_text(head + "\n".join(entries[key] for key in sorted(entries)) + "\n")


if __name__ == "__main__":
    main()
