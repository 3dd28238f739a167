"""The same tars for every loader that reads tars."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["index_energon", "link_tars", "prepare_energon", "tars_in"]


def link_tars(corpus: str, folder: str) -> list[str]:
    """Link the tars of a corpus into the folder of one loader and return their paths."""
    for path in sorted(Path(corpus).glob("*.tar")):
        os.link(path, Path(folder, path.name))
    return tars_in(folder)


def tars_in(folder: str) -> list[str]:
    """Return the sorted paths of a folder's tars."""
    return sorted(str(path) for path in Path(folder).glob("*.tar"))


def prepare_energon(corpus: str, folder: str) -> None:
    """Link the tars and prepare them with Energon's command."""
    link_tars(corpus, folder)
    index_energon(folder)


def index_energon(folder: str) -> None:
    """Prepare the tars of a folder with Energon's command."""
    tool = str(Path(sys.executable).parent / "energon")
    options = "--non-interactive --no-progress --split-ratio 1,0,0 --sample-type CaptioningSample"
    fields = '{"image": "jpg", "caption": "txt"}'
    command = [tool, "prepare", *options.split(), "--field-map", fields, folder]
    subprocess.run(command, check=True, stdout=sys.stderr)
