"""Other loaders to compare with, each in its own virtual environment.

``python -m tools.bench.peers.environments`` installs all of them and prints their versions. The
benchmarks call `peer_python`, which installs an environment at its first use.

An environment has the packages of ``pins/NAME.txt``. A .pth file adds the packages of the running
interpreter (torch, torchvision, pillow) and this project behind them. So all peers use the same
torch, and five environments need little more than 1 GB. If a peer needs another version of a
package, such as an older numpy, its pin comes first.

DALI is built for CUDA and runs on a machine without a GPU too. SPDL and torchcodec need the
libraries of FFmpeg 4 to 8 on the machine (Debian: ``apt install ffmpeg``). torchcodec 0.13 is the
last one that loads beside a CPU build of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
    "s3torchconnector": ("webdataset", "s3torchconnector"),
    "dali": ("nvidia-dali-cuda120",),
    "spdl": ("spdl",),
    "media": ("torchcodec", "qwen-vl-utils", "librosa"),
}
"""Environment -> the packages that reports name, with their versions."""


def main() -> None:
    """Install environments and print their versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DISTRIBUTIONS))
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the peers")
    options = parser.parse_args()
    for name in options.names or DISTRIBUTIONS:
        if name not in DISTRIBUTIONS:
            parser.error(f"no peer {name!r}; the peers are {', '.join(DISTRIBUTIONS)}")
        print(f"{peer_python(name, options.cache)}: {version(name)}")


def peer_python(name: str, cache: Path = CACHE) -> Path:
    """Return the Python of a peer's environment, which is installed or updated if necessary."""
    pins = PINS / f"{name}.txt"
    folder = cache / name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    shared_packages = sysconfig.get_path("purelib")
    digest = hashlib.sha256(f"{shared_packages}\n{pins.read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    own_packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(own_packages, "_shared.pth").write_text(f"{shared_packages}\n{ROOT}\n")
    # The pins are complete. Without --no-deps, a peer's loose requirement of torch could install
    # the newest build with several GB of CUDA packages.
    _call(
        *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
        *("--disable-pip-version-check", "--ignore-installed", "--no-deps"),
        *("--requirement", str(pins)),
    )
    stamp.write_text(digest)
    return python


def run_again_in(name: str, module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a program anew in a peer's environment, in place of this process."""
    print(f"beside {version(name)}", flush=True)
    python = str(peer_python(name))
    os.execve(python, [python, "-m", module, *arguments], process_variables())


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
    """Return the names and pinned versions of an environment's `DISTRIBUTIONS`."""
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
