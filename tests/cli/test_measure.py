"""``mmstream measure`` and ``mmstream index --facts``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmstream.packing.measure_file import measure_folder, open_measure
from tests.helpers.corpora import captioned, write_corpus

DECODERS = """
import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))

def make():
    return decode

def shout(sample):
    return {**sample, "txt": sample["txt"] + b"!"}
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "decoders_of_test.py").write_text(DECODERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return write_corpus(tmp_path / "corpus", [4, 3])


def test_it_measures_by_the_decoders_that_are_named(mmstream, corpus, caplog) -> None:
    lengths = [len(captioned(number)["txt"]) + 2 for number in range(7)]
    for name, extra in (("decode", 0), ("make", 0), ("decode --before decoders_of_test:shout", 1)):
        words = f"{corpus} --name {len(name)} --decode decoders_of_test:{name}".split()
        code, out, err = mmstream("measure", *words)
        assert code == 0, err
        measured = open_measure(measure_folder(corpus, str(len(name))))
        assert measured.column("num_tokens").tolist() == [length + extra for length in lengths]
        total = sum(lengths) + 7 * extra
        assert out.startswith(f"{total:,} tokens in 7 samples, ")
        assert "7 samples to measure, " in caplog.text


def test_it_measures_text_by_a_tokenizer(mmstream, corpus) -> None:
    code, _, err = mmstream("measure", corpus, "--tokenizer", "bytes", "--image-size", "28")
    assert code == 0, err
    assert open_measure(measure_folder(corpus, "default")).column("patches").tolist() == [4] * 7


def test_facts_are_written_once(mmstream, corpus) -> None:
    code, out, _ = mmstream("index", corpus, "--facts")
    assert code == 0
    assert out.endswith("facts of 2 tars written\n")
    assert len(list(Path(corpus).glob("*.tar.facts"))) == 2
    assert mmstream("index", corpus, "--facts")[1].endswith("facts of 0 tars written\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "give one of --decode, --processor and --tokenizer"),
        ("--tokenizer bytes --decode a:b", "give one of --decode"),
        ("--decode a:b --image-size 8", "--image-size goes with --tokenizer"),
        ("--decode a:b --field txt", "--field goes with --tokenizer or --processor"),
        ("--decode no_such_module:b", "no module 'no_such_module' here"),
        ("--decode decoders_of_test:shorn", "the module has no 'shorn'"),
        ("--decode decoders_of_test", "is no name such as module:function"),
        ("--decode json:loads", "json:loads: is a function with arguments, and no mm.Decode"),
        ("--decode json:__name__", "is str, and no mm.Decode"),
        ("--processor no_such", "no_such/config.json: No such file or directory"),
        ("--tokenizer bytes --epochs 2-1", "--epochs 2-1: give numbers such as 0-2"),
        ("--tokenizer bytes --epochs x", "--epochs x: give numbers such as 0-2"),
    ],
)
def test_wrong_words_are_refused(mmstream, corpus, words: str, reason: str) -> None:
    code, _, err = mmstream("measure", corpus, *words.split())
    assert code == 2
    assert reason in err
