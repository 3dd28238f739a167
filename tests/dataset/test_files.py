"""A manifest, a bad list or a marker that is there but is no file is an error, not missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import BAD_NAME
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME
from mmstream.errors import ManifestError
from tests.helpers.convert_corpus import make_corpus, run
from tests.helpers.corpora import write_corpus

KINDS = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that leads nowhere": lambda path: path.symlink_to(path.with_name("gone")),
    "Too many levels": lambda path: path.symlink_to(path.name),  # a loop
}
"""What may stand there, by what the error calls it."""
NAMES = [MANIFEST_NAME, BAD_NAME, MARKER_NAME]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_says_what_a_dataset_is_and_is_no_file_is_named(tmp_path, name, kind):
    folder = tmp_path / "corpus"
    write_corpus(folder, [3, 4])
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    for call in (mm.open_dataset, lambda url: index_tars(url, progress=False)):
        with pytest.raises(ManifestError, match=f"{name}: {kind}") as caught:
            call(folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(ManifestError, match=f"{name}: {kind}"):
        mm.open_dataset(folder / "shard-000000.tar")


@pytest.mark.parametrize("name", NAMES)
def test_convert_does_not_pass_over_it_either(tmp_path, name):
    rows, folder = make_corpus(tmp_path), tmp_path / "out"
    run(rows, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ManifestError, match=f"{name}: a FIFO"):
        run(rows, folder)


def test_a_link_to_a_manifest_is_followed(tmp_path):
    folder = tmp_path / "corpus"
    write_corpus(folder, [3, 4])
    shutil.move(folder / MANIFEST_NAME, tmp_path / "elsewhere.json")
    (folder / MANIFEST_NAME).symlink_to(tmp_path / "elsewhere.json")
    assert len(mm.open_dataset(folder)) == 7
