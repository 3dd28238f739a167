"""``--pipeline module:object``: what it takes, and what somebody reads whose module is wrong."""

from __future__ import annotations

import json

import pytest

from tests.helpers.corpora import jpeg, write_corpus

MODULE = """
import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

text = mm.TextDecoder(byte_tokenizer(), field="json.caption", max_length=40)
decode = mm.Decode(image=mm.ImageDecoder(size=32), text=text)

def pipeline(dataset):
    return mm.Pipeline(dataset, global_batch_size=4, decode=decode)

def fails(dataset):
    raise KeyError("no such thing")

def counts(dataset):
    return len(dataset)

number = 7
"""


@pytest.fixture
def url(tmp_path, monkeypatch):
    """Captions in a key of their own, in a folder with modules beside it."""
    (tmp_path / "user_pipelines.py").write_text(MODULE)
    (tmp_path / "user_broken.py").write_text("import mmstream\nwanted = mmstream.no_such_name\n")
    (tmp_path / "user_needs.py").write_text("import no_such_package\n")
    (tmp_path / "user_syntax.py").write_text("def pipeline(:\n")
    monkeypatch.chdir(tmp_path)

    def fields(number):
        return {"jpg": jpeg(number), "json": json.dumps({"caption": f"{number}"}).encode()}

    return write_corpus(tmp_path / "captions", [9, 8], fields)


def trained(mmstream, url, name):
    options = ["--image-size", 32, "--max-steps", 2, "--num-workers", 0, "--device", "cpu"]
    return mmstream("train", url, "--out", "run", "--pipeline", name, "--log-keys", *options)


def test_a_function_from_the_dataset_to_a_pipeline_is_trained_on(mmstream, url, tmp_path):
    code, out, _ = trained(mmstream, url, "user_pipelines:pipeline")
    assert (code, out.startswith("2 steps, last loss ")) == (0, True)
    lines = (tmp_path / "run" / "metrics-rank0.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["keys"]) for line in lines] == [4, 4]


@pytest.mark.parametrize(
    ("name", "reason", "line_of_user"),
    [
        ("user_absent:pipeline", "no module 'user_absent' here or among the installed ones", ""),
        ("user_pipelines:absent", "the module has no 'absent'", ""),
        ("user_pipelines", "is not a name such as module:function", ""),
        ("user_pipelines:number", "is int, and no mm.Pipeline or function from a dataset", ""),
        ("user_pipelines:counts", "is int, and no mm.Pipeline or function from a dataset", ""),
        ("user_pipelines:fails", "raised KeyError: 'no such thing'", "raise KeyError("),
        ("user_broken:pipeline", "raised AttributeError: ", "wanted = mmstream.no_such_name"),
        ("user_needs:pipeline", "raised ModuleNotFoundError: ", "import no_such_package"),
        ("user_syntax:pipeline", "raised SyntaxError: ", "def pipeline(:"),
    ],
)
def test_a_wrong_object_is_one_line_behind_the_traceback_of_the_users_code(
    mmstream, url, name, reason, line_of_user
):
    code, out, err = trained(mmstream, url, name)
    *traceback, last = [line for line in err.splitlines() if not line.startswith("I [rank")]
    assert (code, out) == (2, "")
    assert last.startswith(f"usage: {name}: {reason}")
    assert bool(traceback) == bool(line_of_user)
    assert not line_of_user or any(line_of_user in line for line in traceback)
    assert not any("shared.py" in line or "importlib" in line for line in traceback)
