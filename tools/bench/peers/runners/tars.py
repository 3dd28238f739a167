"""Part of the runners: the same tars for every loader that reads tars."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["link_tars", "prepare_energon", "tars_in"]


def link_tars(corpus: str, folder: str) -> list[str]:
    """Give a loader that reads tars a folder of its own with the same tars; return their paths."""
    for path in sorted(Path(corpus).glob("*.tar")):
        os.link(path, Path(folder, path.name))
    return tars_in(folder)


def tars_in(folder: str) -> list[str]:
    """Return the paths of a folder's tars, in order."""
    return sorted(str(path) for path in Path(folder).glob("*.tar"))


def prepare_energon(corpus: str, folder: str) -> None:
    """Index the tars with energon's command."""
    link_tars(corpus, folder)
    tool = str(Path(sys.executable).parent / "energon")
    options = "--non-interactive --no-progress --split-ratio 1,0,0 --sample-type CaptioningSample"
    fields = '{"image": "jpg", "caption": "txt"}'
    command = [tool, "prepare", *options.split(), "--field-map", fields, folder]
    subprocess.run(command, check=True, stdout=sys.stderr)
