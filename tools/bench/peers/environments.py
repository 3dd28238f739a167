"""Other loaders to measure against, each in an environment of its own.

``python -m tools.bench.peers.environments`` installs all of them and prints their versions. The
benchmarks call `peer_python`, which installs an environment at its first use.

Each environment holds the versions of ``pins/NAME.txt`` and nothing else of its own: what this
interpreter has already (torch, torchvision, pillow) is laid under it by a .pth file, as is this
project. So all peers run on the same torch, and five of them need little more than 1 GB. Where a
peer wants another version (an older numpy) its pin lies in its own folder and comes first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PINS = Path(__file__).resolve().parent / "pins"
ROOT = PINS.parents[3]
CACHE = ROOT / "build" / "peers"
RUNNERS = "tools.bench.peers.runners"
"""Package of the programs that run in these environments."""

DISTRIBUTIONS = {
    "webdataset": ("webdataset", "torchdata"),
    "energon": ("megatron-energon",),
    "mosaicml": ("mosaicml-streaming",),
    "litdata": ("litdata",),
    "datasets": ("datasets",),
}
"""What each environment is made for; the first one names it in reports."""


def main() -> None:
    """Make the environments and print their versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DISTRIBUTIONS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    for name in options.names or DISTRIBUTIONS:
        if name not in DISTRIBUTIONS:
            parser.error(f"{name}: no such peer; there are {', '.join(DISTRIBUTIONS)}")
        print(f"{peer_python(name, options.cache)}: {version(name)}")


def peer_python(name: str, cache: Path = CACHE) -> Path:
    """Return the Python of a peer's environment, made or brought up to date when needed."""
    pins = PINS / f"{name}.txt"
    folder = cache / name
    python, stamp = folder / "bin" / "python", folder / "made-of"
    ground = sysconfig.get_path("purelib")
    made_of = hashlib.sha256(f"{ground}\n{pins.read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == made_of:
        return python
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(own, "_ground.pth").write_text(f"{ground}\n{ROOT}\n")
    # The pins are all that a peer needs beyond the ground; without --no-deps, a peer's own loose
    # request for torch could take the newest build with several GB of CUDA packages.
    _call(
        sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
        "--disable-pip-version-check", "--ignore-installed", "--no-deps",
        "--requirement", str(pins),
    )  # fmt: skip
    stamp.write_text(made_of)
    return python


def process_variables() -> dict[str, str]:
    """Return the environment variables of a peer's process.

    The process can import this project, does not use the network and prints no warnings.
    """
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    return {**os.environ, **own}


def version(name: str) -> str:
    """Return the pinned versions of what an environment is made for, in words."""
    pinned = dict(
        line.split("==") for line in (PINS / f"{name}.txt").read_text().split() if "==" in line
    )
    return ", ".join(f"{package} {pinned[package]}" for package in DISTRIBUTIONS[name])


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
