"""Who names a folder of pictures hears which page makes tars of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmstream as mm
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.picture_hint import picture_hint

HINT = r"; it holds pictures: docs/classification\.md .*, and docs/your-own-data\.md"


@pytest.mark.parametrize("picture", ["bear/1.JPEG", "1.png"])
def test_errors_about_a_folder_of_pictures_name_the_pages(tmp_path: Path, picture: str) -> None:
    path = tmp_path / picture
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(mm.ManifestError, match=f"neither mmstream.json nor tars in it{HINT}"):
        mm.open_dataset(tmp_path)
    with pytest.raises(mm.ConfigError, match=f"no tars to index{HINT}"):
        index_tars(tmp_path)


def test_other_folders_have_no_hint(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "png.txt").touch()
    assert picture_hint(tmp_path) == ""
    assert picture_hint(tmp_path / "absent") == ""
    assert picture_hint(None) == ""
