"""Rows whose sound is a member of a tar beside their file. Part of step 2 of a conversion.

    tarred_audio_manifest.json  audio_0.tar  audio_1.tar             NeMo's tarred data sets
        {"audio_filepath": "a.wav", "text": "...", "duration": 3.2, "shard_id": 1}
    cuts.000007.jsonl.gz  recording.000007.tar                       Shar of Lhotse
        {"id": "c1", "recording": {"sources": [{"type": "shar", "source": ""}]}, ...}

Neither row names its tar. Here it gets the name, as ``tar://MEMBER::TAR``; `speech` and `spans` do
the rest.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from mmstream.converting.draft import RowError

__all__ = ["names_tars", "with_tar"]

_SHAR_CUTS = re.compile(r"cuts\.(\d+)\.jsonl(\.\w+)?")
_MANIFEST = re.compile(r"tarred_audio_manifest.*\.json")
_MANIFEST_FOLDER = "sharded_manifests"
"""Where NeMo keeps the manifest of each tar. The tars lie beside this folder."""
_SECOND_ROW = re.compile(r"-sub\d+(?=\.\w+$)")
"""NeMo's mark of a second row about one file, which the tar has once, without the mark."""


def names_tars(name: str) -> bool:
    """Tell whether a file of rows has a name that says that the tars beside it hold its media."""
    return bool(_SHAR_CUTS.fullmatch(name) or _MANIFEST.fullmatch(name))


def with_tar(row: dict[str, Any], file: str) -> dict[str, Any]:
    """Return a row with the place of its sound in a tar. Other rows are returned as they are.

    Args:
        row: A parsed row.
        file: Name of its file, which may begin with folders. Tars lie in its folder.

    Raises:
        RowError: A cut of Shar whose file has no number.
    """
    if "shard_id" in row:
        return _of_nemo(row, file)
    recording = row.get("recording")
    if isinstance(recording, dict) and recording.get("sources"):
        return _of_shar(row, recording, file)
    return row


def _of_nemo(row: dict[str, Any], file: str) -> dict[str, Any]:
    path, shard = row.get("audio_filepath"), row["shard_id"]
    if not isinstance(path, str) or not re.fullmatch(r"\d{1,9}", str(shard)) or ":" in path:
        return row
    folder = PurePosixPath(file).parent
    if folder.name == _MANIFEST_FOLDER:
        folder = folder.parent
    member = _SECOND_ROW.sub("", path)
    return {**row, "audio_filepath": f"tar://{member}::{folder / f'audio_{shard}.tar'}"}


def _of_shar(row: dict[str, Any], recording: dict[str, Any], file: str) -> dict[str, Any]:
    sources = recording["sources"]
    source = sources[0] if isinstance(sources, list) and len(sources) == 1 else None
    if not isinstance(source, dict) or source.get("type") != "shar":
        return row
    name = _SHAR_CUTS.fullmatch(PurePosixPath(file).name)
    if name is None:
        raise RowError(
            "a cut of Shar in a file that is not named cuts.NUMBER.jsonl: the number is that of "
            "recording.NUMBER.tar, which holds its sound"
        )
    if not isinstance(row.get("id"), str):
        raise RowError("a cut of Shar without id, by which its sound is named in the tar")
    tar = PurePosixPath(file).with_name(f"recording.{name[1]}.tar")
    in_tar = {**source, "type": "file", "source": f"tar://{row['id']}.*::{tar}"}
    # The tar holds what the cut holds, and no more: so times of the cut are those of its file.
    return {**row, "start": 0, "recording": {**recording, "sources": [in_tar]}}
