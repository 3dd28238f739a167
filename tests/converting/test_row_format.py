"""Columns that are mapped, and functions of the caller's for rows."""

from __future__ import annotations

import json
import pickle
import re
import sys
from functools import partial

import pytest

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.formats.formats import RowParser
from tests.helpers.convert_corpus import rejects, run, write_files, write_rows
from tests.helpers.corpora import jpeg
from tests.helpers.paths import DOCS


def caption(row):
    if row["words"] == "drop":
        return None
    if row["words"] == "typo":
        return undefined_name  # noqa: F821
    return {"image": row["photo"], "text": row["words"]}


def parse(row):
    return json.loads(row["text"])


def odd(row):
    values = {"sound": "\ud800", "object": object(), "key": {(1, 2): 3}}
    return {"text": "x", "more": values[row["key"]]}


@pytest.mark.parametrize("key", ["sound", "object", "key"])
def test_a_function_that_returns_what_is_not_json_makes_rejects(key):
    with pytest.raises(RowError, match=r"^odd\(\): returned what is not JSON: "):
        RowParser(function=odd).draft({"key": key})


@pytest.mark.parametrize(
    ("row_format", "row", "path", "text", "unread"),
    [
        (
            RowParser(columns=(("image", "photo"), ("text", "alt"))),
            {"photo": "a.jpg", "alt": "a cat", "image": 3},
            *("a.jpg", ("a cat",), ("row_image",)),
        ),
        (
            RowParser("labels", (("text", "Alt Text"),)),
            {"image": "a.jpg", "Alt Text": "x"},
            *("a.jpg", (), ("Alt Text",)),
        ),
        (
            RowParser("laion", (("URL", "image_url"), ("TEXT", "caption"))),
            {"image_url": "https://host/a", "caption": "a cat"},
            *("https://host/a", ("a cat",), ()),
        ),
        (
            RowParser(columns=(("enCap", "chCap"),)),
            {"videoID": "x_0_9", "enCap": ["one"], "chCap": ["一", "二"]},
            *("x_0_9.mp4", ("一", "二"), ("row_enCap",)),
        ),
    ],
    ids=["unknown names", "a format that reads no text", "a known name under another one", "VATEX"],
)
def test_columns_are_read_under_the_names_that_formats_know(row_format, row, path, text, unread):
    draft = row_format.draft(row)
    assert ([ref.path for ref in draft.media], draft.texts, draft.unread) == ([path], text, unread)


def test_a_column_that_no_row_has_is_refused_before_the_first_shard(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("Photo;Words\na.jpg;a cat\n;a dog\n")
    with pytest.raises(
        mm.ConfigError,
        match=r"no row has the column photo \(as image\); row 1 has Photo, Words",
    ):
        run(path, tmp_path / "out", columns={"text": "Words", "image": "photo"})
    assert not (tmp_path / "out").exists()


def test_a_row_may_lack_a_mapped_column_that_another_row_has(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    rows = [
        {"words": "a dog"},
        {"photo": "a.jpg", "words": "a cat"},
        {"image": "a.jpg", "text": "x"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    report = run(path, tmp_path / "out", columns={"image": "photo", "text": "words"})
    assert report.formats == {"captions": 2, "text": 1}


@pytest.mark.parametrize(
    ("function", "row", "line"),
    [
        (parse, {"text": "{"}, " (test_row_format.py, line 30)"),  # not that of json's own code
        (lambda row: parse(row), {"text": "{"}, ", line 30)"),
        (partial(int, base=10), {"text": "x"}, ""),
    ],
)
def test_a_reject_of_a_function_says_the_line_of_its_own_file(function, row, line):
    with pytest.raises(RowError) as raised:
        RowParser(function=function).draft(row)
    assert str(raised.value).endswith(line)
    assert ("line 30" in str(raised.value)) == bool(line)


@pytest.mark.parametrize("options", [{"function": caption}, {"name": f"{__name__}:caption"}])
def test_a_function_makes_rows_of_a_known_format(options):
    row_format = pickle.loads(pickle.dumps(RowParser(**options)))
    assert row_format.draft({"photo": "a.jpg", "words": "a cat"}).texts == ("a cat",)
    with pytest.raises(RowError, match=r"^left out by caption\(\)$"):
        row_format.draft({"photo": "a.jpg", "words": "drop"})
    with pytest.raises(RowError, match=r"^caption\(\): KeyError: 'words'"):
        row_format.draft({"photo": "a.jpg"})
    with pytest.raises(NameError, match="undefined_name"):
        row_format.draft({"photo": "a.jpg", "words": "typo"})


def test_rows_that_a_function_leaves_out_are_listed_and_count_as_no_fault(tmp_path, caplog):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    rows = [{"photo": "a.jpg", "words": "a cat"}] * 9 + [{"photo": "a.jpg", "words": "drop"}] * 3
    path = write_rows(tmp_path / "rows.jsonl", [*rows, {"photo": "a.jpg"}])
    report = run(path, tmp_path / "out", row=caption)
    line = caption.__code__.co_firstlineno + 1
    assert (report.num_samples, report.num_rejects, report.num_left_out) == (9, 4, 3)
    assert [kind.kind for kind in report.reject_kinds] == [
        "left out by caption()",
        "caption(): KeyError: * (test_row_format.py, line *)",
    ]
    assert report.has_more_rejects_than(0)
    assert not report.has_more_rejects_than(1)
    assert "1 of 13 rows were rejected" in caplog.text
    assert json.loads((tmp_path / "out" / "report.json").read_bytes())["num_left_out"] == 3
    assert list(rejects(tmp_path / "out").values())[2:] == [
        "left out by caption()",
        f"caption(): KeyError: 'words' (test_row_format.py, line {line})",
    ]
    report = run(path, tmp_path / "splits", row=caption, splits={"a": 0.5, "b": 0.5})
    assert report.num_left_out == 3 == sum(part.num_left_out for part in report.splits.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "captoins"}, "must be one of captions, .* or a function of yours"),
        ({"name": "no_such_module:f"}, "no module 'no_such_module'"),
        ({"name": f"{__name__}:nothing"}, "the module has no 'nothing'"),
        ({"name": f"{__name__}:caption.nothing"}, "the module has no 'caption.nothing'"),
        ({"name": f"{__name__}:"}, "is not a name such as module:function"),
        ({"name": ":caption"}, "is not a name such as module:function"),
        ({"name": ".relative:caption"}, "is not a name such as module:function"),
        ({"name": f"{__name__}:__name__"}, "is str, and no function"),
        ({"name": f"{__name__}:caption", "function": caption}, "give one"),
        ({"columns": (("bild", "image"),)}, "comes first: image=bild"),
        ({"columns": (("image", "a"), ("images", "a"))}, "'a' is not a column's name, or twice"),
    ],
)
def test_impossible_options_are_refused_before_the_first_row(options, message):
    with pytest.raises(mm.ConfigError, match=message):
        RowParser(**options)


def test_an_error_of_the_module_itself_is_not_called_a_wrong_name(tmp_path, monkeypatch):
    (tmp_path / "fails_when_imported.py").write_text("int('seven')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"invalid literal for int.*'seven'"):
        RowParser(name="fails_when_imported:f")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package with a row format of the docs, with further functions that return nonsense."""
    page = (DOCS / "row-formats.md").read_text()
    module = re.search(r"<!-- file: riddles.py -->\n```python\n(.*?)```", page, re.S)[1]
    names = {**NONSENSE, "captions": "to_row", "gone": "nothing"}
    entries = "".join(f"{name} = riddles:{function}\n" for name, function in names.items())
    entries += re.search(r'row_formats"\]\n(.*?)```', page, re.S)[1].replace('"', "")
    files = {
        "riddles.py": f"{module}\n{NONSENSE_MODULE}",
        "riddles-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: riddles\nVersion: 1.0\n",
        "riddles-1.0.dist-info/entry_points.txt": f"[mmstream.row_formats]\n{entries}",
    }
    monkeypatch.syspath_prepend(write_files(tmp_path / "site", files))
    monkeypatch.delitem(sys.modules, "riddles", raising=False)
    return tmp_path / "site"


NONSENSE_MODULE = """
def raises(row): raise AssertionError("not me")
def no_row(row): return [row]
def unknown(row): return {"a": 1}
def no_json(row): return {"text": "x", "more": object()}
def itself(row): row["text"] = "x"; row["row"] = row; return row
"""
NONSENSE = {name: name for name in ("raises", "no_row", "unknown", "no_json", "itself")}


def test_an_installed_package_adds_a_row_format(tmp_path, installed):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    riddle = {"picture": "a.jpg", "riddle": "What purrs?", "solution": "A cat."}
    path = write_rows(tmp_path / "rows.jsonl", [riddle, {"riddle": None}, {"riddle": "?"}])
    report = run(path, tmp_path / "out", format="riddles", num_workers=2)
    assert (report.formats, report.num_left_out) == ({"vqa": 1}, 1)
    assert rejects(tmp_path / "out") == {
        2: "left out by riddles",
        3: "riddles: KeyError: 'picture' (riddles.py, line 4)",
    }
    assert RowParser("captions").draft({"image": "a.jpg", "text": "t"}).texts == ("t",)
    with pytest.raises(mm.ConfigError, match="'gone': riddles:nothing cannot be imported: Attrib"):
        RowParser("gone")


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_of_a_package_is_the_reject_of_its_row(installed, name):
    with pytest.raises(RowError, match=f"^{name}: "):
        RowParser(name).draft({"text": "t"})


def test_a_package_of_the_current_folder_adds_no_row_format(installed, monkeypatch):
    monkeypatch.chdir(installed)
    with pytest.raises(mm.ConfigError, match="must be one of captions"):
        RowParser("riddles")
    assert "riddles" not in sys.modules


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(mm.ConfigError, match=r"cannot import it .* or use num_workers=1"):
        RowParser(function=lambda row: row).require_portable()
    RowParser(function=caption).require_portable()


INFO = {
    "alpaca_like": {
        "file_name": "a.json",
        "columns": {"prompt": "ask", "query": "more", "response": "say", "images": "pics"},
    },
    "chats": {
        "file_name": "chats.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "rules"},
        "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "me", "assistant_tag": "it"},
    },
    "pairs": {
        "file_name": "data/pairs.json",
        "ranking": True,
        "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"},
    },
    "verdicts": {
        "file_name": "kto.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "kto_tag": "ok"},
    },
    "tools": {
        "file_name": "tools.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "rules", "tools": "functions"},
        "tags": {
            "role_tag": "who",
            "content_tag": "said",
            "user_tag": "me",
            "assistant_tag": "it",
            "observation_tag": "world",
            "function_tag": "call",
            "system_tag": "law",
        },
    },
    "earlier": {
        "file_name": "earlier.json",
        "columns": {
            "prompt": "ask",
            "response": "say",
            "system": "rules",
            "history": "before",
            "videos": "clips",
            "audios": "sounds",
        },
    },
    "on_the_hub": {"hf_hub_url": "who/what"},
}


@pytest.fixture
def info(tmp_path):
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(INFO))
    return str(path)


def said(value):
    """Return the words and calls of turns, and any other value as it is."""
    if not isinstance(value, list):
        return value
    turns = []
    for message in value:
        words = [part.get("text", part["type"]) for part in message["content"]]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        turns.append((message["role"], words + calls))
    return turns


CALL = '{"name": "weather", "arguments": {}}'
FUNCTIONS = '[{"name": "weather", "parameters": {}}]'
ROWS_WITH_INFO = {
    "columns of one's own, and a key that no format reads": (
        "a.json",
        {"ask": "Q", "more": "<image>", "say": "A", "pics": ["a.jpg"], "input": "mine"},
        {"messages": [("user", ["Q", "image"]), ("assistant", ["A"])]},
        ["a.jpg"],
        ("row_input",),
    ),
    "tags of one's own, and the name of a file in a folder": (
        "somewhere/chats.jsonl",
        {"talk": [{"who": "me", "said": "hi"}, {"who": "it", "said": "hello"}], "rules": "r"},
        {"messages": [("system", ["r"]), ("user", ["hi"]), ("assistant", ["hello"])]},
        [],
        (),
    ),
    "pairs": (
        "pairs.json",
        {"ask": "Q", "good": "+", "bad": "-"},
        {"messages": [("user", ["Q"])], "rejected": [("assistant", ["-"])]},
        [],
        (),
    ),
    "verdicts": (
        "kto.json",
        {
            "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
            "ok": False,
        },
        {"completion": [("assistant", ["A"])], "label": False},
        [],
        (),
    ),
    # glaive_toolcall_en_demo, under tags of one's own
    "tools and what they answer": (
        "tools.json",
        {
            "talk": [
                {"who": "law", "said": "Be short."},
                {"who": "me", "said": "Rain?"},
                {"who": "call", "said": CALL},
                {"who": "world", "said": '{"rain": true}'},
                {"who": "it", "said": "Yes."},
            ],
            "functions": FUNCTIONS,
        },
        {
            "messages": [
                ("system", ["Be short."]),
                ("user", ["Rain?"]),
                ("assistant", [{"name": "weather", "arguments": {}}]),
                ("tool", ['{"rain": true}']),
                ("assistant", ["Yes."]),
            ],
            "tools": FUNCTIONS,
        },
        [],
        (),
    ),
    "earlier turns and media": (
        "earlier.json",
        {
            "ask": "<video><audio>Now?",
            "say": "Yes.",
            "rules": "Be short.",
            "before": [["Then?", "No."]],
            "clips": ["a.mp4"],
            "sounds": ["a.wav"],
        },
        {
            "messages": [
                ("system", ["Be short."]),
                ("user", ["Then?"]),
                ("assistant", ["No."]),
                ("user", ["video", "audio", "Now?"]),
                ("assistant", ["Yes."]),
            ]
        },
        ["a.mp4", "a.wav"],
        (),
    ),
}


@pytest.mark.parametrize("name", ROWS_WITH_INFO)
def test_dataset_info_says_which_columns_and_tags_the_rows_of_a_file_have(info, name):
    """LLaMA-Factory's data/README.md and its own parser"""
    file, row, expected, paths, unread = ROWS_WITH_INFO[name]
    draft = pickle.loads(pickle.dumps(RowParser(dataset_info=info))).draft(row, file)
    found = {key: said(draft.content[key]) for key in expected}
    assert (found, draft.unread) == (expected, unread)
    assert [ref.path for ref in draft.media] == paths


def test_an_entry_of_dataset_info_can_be_named(info):
    row_format = RowParser(dataset_info=f"{info}#chats")
    with pytest.raises(RowError, match="turn 1: who 'you' is none of the tags"):
        row_format.draft({"talk": [{"who": "you", "said": "hi"}]}, "other.jsonl")
    assert RowParser(dataset_info=info).plan() != row_format.plan()
    with pytest.raises(mm.ConfigError, match=r"no entry with the file_name other.jsonl; .*#NAME"):
        RowParser(dataset_info=info).draft({"text": "x"}, "other.jsonl")


@pytest.mark.parametrize(
    ("entry", "name", "message"),
    [
        ({"file_name": "x", "formatting": "parquet"}, "", "formatting 'parquet' is not alpaca or"),
        ({"file_name": "x", "columns": {"prmpt": "a"}}, "", "no column is called 'prmpt'"),
        ({"file_name": "x", "tags": {"tag": "a"}}, "", "no tag is called 'tag'"),
        ({"file_name": "x", "columns": 5}, "", "Expected `object \\| null`, got `int`"),
        ({"file_name": "x"}, "#nothing", "has no entry 'nothing', but name"),
    ],
)
def test_a_wrong_dataset_info_is_refused(tmp_path, entry, name, message):
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"name": entry}))
    with pytest.raises(mm.ConfigError, match=message):
        RowParser(dataset_info=f"{path}{name}")


def test_a_file_that_is_no_dataset_info_is_refused(tmp_path):
    path = tmp_path / "dataset_info.json"
    with pytest.raises(FileNotFoundError, match=r"no such dataset_info\.json"):
        RowParser(dataset_info=str(path))
    path.write_text("[]")
    with pytest.raises(mm.ConfigError, match=r"not LLaMA-Factory's dataset_info\.json"):
        RowParser(dataset_info=str(path))
