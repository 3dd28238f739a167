"""Columns that are mapped, and functions of the caller's for rows."""

from __future__ import annotations

import pickle

import pytest

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.formats.row_format import RowFormat


def caption(row):
    if row["words"] == "drop":
        return None
    if row["words"] == "typo":
        return undefined_name  # noqa: F821
    return {"image": row["photo"], "text": row["words"]}


def test_columns_are_read_under_the_names_that_formats_know():
    row_format = RowFormat(columns=(("image", "photo"), ("text", "alt")))
    draft = row_format.draft({"photo": "a.jpg", "alt": "a cat", "image": 3})
    assert (draft.media[0].path, draft.texts) == ("a.jpg", ("a cat",))
    assert draft.unread == ("row_image",)


@pytest.mark.parametrize("options", [{"function": caption}, {"name": f"{__name__}:caption"}])
def test_a_function_makes_rows_of_a_known_format(options):
    row_format = pickle.loads(pickle.dumps(RowFormat(**options)))
    assert row_format.draft({"photo": "a.jpg", "words": "a cat"}).texts == ("a cat",)
    with pytest.raises(RowError, match=f"{__name__}:caption: left out"):
        row_format.draft({"photo": "a.jpg", "words": "drop"})
    with pytest.raises(RowError, match="caption: KeyError: 'words'"):
        row_format.draft({"photo": "a.jpg"})
    with pytest.raises(NameError, match="undefined_name"):
        row_format.draft({"photo": "a.jpg", "words": "typo"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "captoins"}, "must be one of captions, .* or a function of yours"),
        ({"name": "no_such_module:f"}, "no module 'no_such_module'"),
        ({"name": f"{__name__}:nothing"}, "has no function 'nothing'"),
        ({"name": f"{__name__}:caption", "function": caption}, "give one"),
        ({"columns": (("image", "a"), ("images", "a"))}, "'a' is no name of a column, or twice"),
    ],
)
def test_impossible_options_are_refused_before_the_first_row(options, message):
    with pytest.raises(mm.ConfigError, match=message):
        RowFormat(**options)


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(mm.ConfigError, match=r"cannot import it .* or use num_workers=1"):
        RowFormat(function=lambda row: row).require_portable()
    RowFormat(function=caption).require_portable()
