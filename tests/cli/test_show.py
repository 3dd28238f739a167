"""``mmstream show``: which samples, what of them, and a page that is safe whoever made the data."""

from __future__ import annotations

import json
import re

import pytest

import mmstream as mm
from mmstream.display.html import document
from tests.display.test_display import Page, recording
from tests.helpers.browser import open_page
from tests.helpers.corpora import jpeg, write_corpus

EVIL = (
    "<script>document.title='executed'</script><img src=http://127.0.0.1:9/x onerror=\"document."
    "title='executed'\"><svg onload=\"document.title='executed'\"></svg>"
    "<a href=\"javascript:document.title='executed'\">x</a></pre></details></div></title>"
    "<style>@import 'http://127.0.0.1:9/x.css'</style><meta http-equiv=refresh content=0>"
    "\u202e\u2066 \x00\x1b]0;x\x07 ${x} {{x}} \" ' &lt; --> ]]> \udce9"
)
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload=\"document.title='executed'\"/>"


def hostile(number):
    """A sample that would run something, load something, or break out of its place."""
    text = EVIL.encode("utf-8", "surrogateescape")
    question = [{"type": "image", "field": "0.jpg"}, {"type": "text", "text": EVIL}]
    turns = [
        {"role": EVIL, "content": question},
        {"role": "assistant", "content": EVIL},
        {"role": "user", "content": [{"type": "video", "field": "1.mp4"}, {"type": EVIL, EVIL: 1}]},
    ]
    messages = json.dumps({"messages": turns, EVIL: EVIL}).encode()
    return [
        {"jpg": jpeg(0), "txt": text, "svg": SVG, "html": text, "json": messages},
        {"0.jpg": jpeg(1), "1.mp4": SVG, "json": messages},
        {"jpg": SVG, "png": text, "txt": b"\xff\xfe" + text * 20_000, "json": b"{" + text},
        {"svg": SVG, "wav": SVG, "a\"'><script>x": text, "json": json.dumps(EVIL).encode()},
    ][number]


def addresses(text):
    """The samples that a text view shows, in its order."""
    return re.findall(r"^(\S+\[\d+\])", text, re.M)


# -- which samples --------------------------------------------------------------------------------


def test_each_choice_shows_its_samples(mmstream, corpus):
    dataset = mm.open_dataset(corpus)
    key = dataset[40]["__key__"]
    line = "W [rank 0] shard-000003.tar[9] 000040.jpg: truncated"
    for words in (["--key", key], ["--find", "shard-000003.tar[9]"], ["--find", line]):
        code, out, _ = mmstream("show", corpus, *words)
        assert code == 0
        assert addresses(out) == ["shard-000003.tar[9]"]
        assert "text: caption 40" in out
    assert "bad: W [rank 0] shard-000003.tar[9] 000040.jpg: truncated" in out


def test_without_a_choice_samples_are_spread_over_all(mmstream, corpus):
    code, out, _ = mmstream("show", corpus)
    assert code == 0
    assert len(addresses(out)) == 12
    assert {address.partition("[")[0][-5] for address in addresses(out)} == {"0", "3", "4"}


def test_random_samples_are_those_of_the_seed(mmstream, corpus):
    first, again, other = (
        addresses(mmstream("show", corpus, "--random", 10, "--seed", seed)[1]) for seed in (1, 1, 2)
    )
    assert len(set(first)) == 10
    assert first == again != other
    assert len(addresses(mmstream("show", corpus, "--random", 1000)[1])) == 97


def test_samples_of_a_mixture_say_their_source(mmstream, tmp_path):
    for name in ("a", "b"):
        write_corpus(tmp_path / name, [5])
    sources = {name: {"url": name, "weight": 1} for name in ("a", "b")}
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources, "stop": "all"}))
    url = tmp_path / "mix.json"
    _, out, _ = mmstream("show", url, "--random", 4)
    assert {address[0] for address in addresses(out)} == {"a", "b"}
    _, out, _ = mmstream("show", url, "--key", "000003")
    assert addresses(out) == ["a/shard-000000.tar[3]", "b/shard-000000.tar[3]"]
    assert "b: 000003" in out
    _, out, _ = mmstream("show", url, "--find", "b/shard-000000.tar[1] x")
    assert addresses(out) == ["b/shard-000000.tar[1]"]


def test_a_shard_that_is_gone_is_said_and_the_others_are_shown(printed, tmp_path):
    url = write_corpus(tmp_path, [3, 3])
    (tmp_path / "shard-000000.tar").unlink()
    out = printed("show", url)
    assert out.count("bad: shard-000000.tar: no such shard") == 3
    assert out.count("text: caption") == 3


def test_no_more_than_so_many_samples_are_shown(mmstream, corpus):
    _, out, _ = mmstream("show", corpus, "--random", 50, "--max-samples", 5)
    assert len(addresses(out)) == 5
    assert "50 samples of 97, random, seed 0; the first 5 are shown" in out


def test_an_empty_dataset_shows_nothing(mmstream, tmp_path):
    code, out, _ = mmstream("show", write_corpus(tmp_path, [0]))
    assert (code, addresses(out)) == (0, [])


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--key", "a", "--random", 3], 2, "use one of them"),
        (["--shard", "a"], 2, "mmstream show --shard is gone: write --find"),
        (["--key", "no such key"], 1, "no sample of"),
        (["--find", "nothing"], 2, "names no sample"),
        (["--find", "shard-000000.tar[1] 000040.jpg: x"], 2, "is of another dataset, where"),
        (["--tokenizer", "no/such/folder"], 2, "not a folder"),
        (["--step", 1], 2, "mmstream show --step is gone: the page Order"),
        (["--bad"], 2, "mmstream show --bad is gone: the page Problems"),
        (["--quarantine", "q.jsonl"], 2, "mmstream show --quarantine is gone: the page Problems"),
        (["--image-size", 16], 2, "mmstream show --image-size is gone: "),
    ],
)
def test_what_cannot_be_shown_is_one_line(mmstream, corpus, words, code, reason):
    result, out, err = mmstream("show", corpus, *words)
    assert (result, out) == (code, "")
    assert reason in err


# -- what of them ---------------------------------------------------------------------------------


def test_tokens_show_what_the_model_learns(mmstream, tmp_path):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4!"}]
    fields = {"json": json.dumps({"messages": turns}).encode()}
    url = write_corpus(tmp_path / "chat", [1], lambda _: fields)
    _, out, _ = mmstream("show", url, "--tokenizer", "bytes")
    assert "user: 2+2?" in out
    assert re.search(r"\[\[4!<\|im_end\|>", out)
    assert "<|im_start|>user\n    2+2?<|im_end|>" in out
    page = tmp_path / "page.html"
    mmstream("show", url, "--tokenizer", "bytes", "--html", page)
    assert re.search(r'<span class="learned">4!&lt;\|im_end\|&gt;', page.read_text())


def test_the_page_says_what_was_written(mmstream, corpus, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = mmstream("show", corpus, "--random", 3, "--html", page)
    assert code == 0
    assert re.search(r"3 samples of 97, random, seed 0; written to .*page.html \(0\.0 MB\)", out)
    assert len(Page(page.read_text()).images()) == 3
    code, _, err = mmstream("show", corpus, "--html", tmp_path)
    assert code == 1
    assert str(tmp_path) in err


def test_recordings_are_embedded_until_a_page_is_large(mmstream, tmp_path, monkeypatch):
    url = write_corpus(tmp_path / "d", [6], lambda _: {"wav": recording(10)})
    page = tmp_path / "page.html"
    mmstream("show", url, "--html", page)
    assert page.read_text().count("<audio") == 6
    monkeypatch.setattr("mmstream.display.samples.MAX_PAGE_CHARACTERS", 500_000)
    mmstream("show", url, "--html", page)
    assert page.read_text().count("<audio") == 2
    assert page.read_text().count("not embedded") == 4


# -- data from strangers --------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path):
    return write_corpus(tmp_path / "evil", [4], hostile)


def test_a_terminal_shows_hostile_samples_as_plain_lines(printed, evil):
    out = printed("show", evil, "--tokenizer", "bytes")
    assert len(addresses(out)) == 4
    assert out.replace("\n", "").isprintable()
    assert max(map(len, out.splitlines())) < 1500


def test_a_page_of_hostile_samples_has_no_tag_or_address_of_theirs(mmstream, evil, tmp_path):
    path = tmp_path / "page.html"
    mmstream("show", evil, "--tokenizer", "bytes", "--html", path)
    text = path.read_text("utf-8")
    page = Page(text.replace("<!DOCTYPE html>", ""))
    assert page.open == []
    own = "html head meta title style body div b span img video audio table tr td th pre"
    assert set(page.tags) <= {*own.split(), "details", "summary"}
    assert page.tags.count("style") == 1
    names = "lang charset http-equiv content name style class alt title width height src controls"
    assert {name for _, name, _ in page.attributes} <= {*names.split(), "preload", "aria-label"}
    for _, name, value in page.attributes:
        if name == "src":
            assert re.match(r"data:(image/(jpeg|png)|audio/wav|video/mp4);base64,[\w+/=]+$", value)
        if name == "style":
            assert not re.search(r"url|@|\\|expression", value)
    assert len(text) < 400_000
    assert not {"\u202e", "\u2066", "\x00", "\x1b"} & set(text)
    assert (
        text.index("<meta charset") < text.index("Content-Security-Policy") < text.index("<title")
    )


@pytest.mark.slow
def test_a_real_browser_runs_and_loads_nothing_of_hostile_samples(evil, tmp_path):
    dataset = mm.open_dataset(evil)
    samples = [dataset[n] for n in range(4)]
    shown = [mm.show(value).html for value in (*samples, samples, dataset, dataset[:3])]
    page = tmp_path / "page.html"
    page.write_text(document(EVIL, *shown), "utf-8")
    opened = open_page(page, tmp_path / "profile")
    assert opened.messages == []
    assert "executed" not in re.search(r"<title>(.*?)</title>", opened.dom, re.S)[1][:9]
    assert "<script" not in opened.dom
    assert opened.dom.count("<img") == len(Page(page.read_text()).images())


@pytest.mark.slow
def test_the_browser_would_tell_if_the_page_let_a_script_in(evil, tmp_path):
    page = tmp_path / "page.html"
    unescaped = EVIL.replace("http-equiv=refresh", "")
    page.write_text(document("t", unescaped), "utf-8", "replace")
    opened = open_page(page, tmp_path / "profile")
    assert any("Content Security Policy" in message for message in opened.messages)
    assert "<title>t</title>" in opened.dom  # the policy alone has kept the script from running


@pytest.mark.slow
def test_a_real_browser_shows_pictures_and_plays_recordings(tmp_path):
    sample = {"__key__": "a", "jpg": jpeg(0, (200, 100)), "wav": recording(2), "txt": "é ∑ \u05d0"}
    path = mm.show(sample).save(tmp_path / "page.html")
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text("utf-8"))
    script = (
        "addEventListener('load', () => setTimeout(() => document.title = JSON.stringify(["
        "[...document.images].map(i => i.naturalWidth), document.querySelector('audio').duration,"
        "document.body.innerText.includes('é ∑ \\u05d0')]), 1000))"
    )
    path.write_text(text.replace("</head>", f"<script>{script}</script></head>"), "utf-8")
    opened = open_page(path, tmp_path / "profile")
    assert json.loads(re.search(r"<title>(.*?)</title>", opened.dom)[1]) == [[200], 2, True]
