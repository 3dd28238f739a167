"""``mmstream view``: what its pages show, whom they answer, and what hostile data can do."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote_plus

import numpy as np
import PIL.Image
import pytest
import soundfile
import uvicorn
from starlette.testclient import TestClient

import mmstream as mm
from mmstream.dataset.bad_list import take_down, write_bad
from mmstream.display.html import decibels, spectrogram_of
from mmstream.errors import StorageError
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.view import content as view_content
from mmstream.view.app import application
from mmstream.view.charts import Line, read_metrics, starts_of
from mmstream.view.content import Content
from mmstream.view.order import shares_of
from tests.cli.test_show import EVIL, SVG, hostile
from tests.helpers.browser import open_page
from tests.helpers.corpora import captioned, jpeg, write_corpus
from tests.helpers.media_files import audio_file, video_file

TOKEN = "a-secret"
PORT = 8765
ADDRESS = f"http://127.0.0.1:{PORT}"


def fields_of(number):
    """Pictures of two languages, and one recording of each 8 samples."""
    fields = captioned(number)
    content = {"id": number, "lang": "zh" if number % 3 == 0 else "en", "a key": number % 2 == 0}
    fields["json"] = json.dumps(content).encode()
    if number % 8 == 7:
        fields["wav"] = audio_file(seconds=1 + number / 8)
    return fields


def pipeline_of(data):
    text = mm.TextDecoder(byte_tokenizer())
    return mm.Pipeline(
        data, global_batch_size=8, decode=mm.Decode(image=mm.ImageDecoder(size=32), text=text)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("view"), [20, 12], fields_of, checksums=True)
    from mmstream.converting.sidecar import write_sidecars

    write_sidecars(mm.open_dataset(folder), progress=False)
    return folder


def client_of(url, *, pipeline=None, order=None, run=None, known=True, opened=None, against=()):
    others = [
        Content(other, partial(mm.open_dataset, other), path=("against", number))
        for number, other in enumerate(against)
    ]
    opened = opened or (lambda: mm.open_dataset(url))
    content = Content(url, opened, pipeline, order, run, others=others)
    client = TestClient(application(content, TOKEN, PORT), ADDRESS, follow_redirects=False)
    if known:
        client.cookies.set(f"mmstream-{PORT}", TOKEN)
    return client


@pytest.fixture(scope="module")
def client(folder):
    return client_of(folder, pipeline=pipeline_of)


class Tags(HTMLParser):
    """The names of the tags and attributes of a page."""

    def __init__(self, html):
        super().__init__()
        self.names, self.attributes = set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def text_of(client, address, status=200):
    answer = client.get(address)
    assert answer.status_code == status, answer.text
    return answer.text


# -- who may ask -----------------------------------------------------------------------------------


def test_the_address_with_the_token_is_the_page_and_gives_a_cookie(folder):
    client = client_of(folder, known=False)
    assert client.get("/").status_code == 403
    first = client.get(f"/?token={TOKEN}")
    assert (first.status_code, first.headers["set-cookie"]) == (
        200,
        f"mmstream-{PORT}={TOKEN}; Path=/; HttpOnly; SameSite=Strict",
    )
    assert client.get("/order?step=0").status_code == 400  # it is known now, and there is no order
    assert client.get("/?token=another").status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": f"evil.example:{PORT}"},
        {"Host": "127.0.0.1:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
def test_other_hosts_and_origins_are_refused(client, headers):
    assert client.get("/", headers=headers).status_code == 403
    assert client.get("/", headers={"Origin": ADDRESS}).status_code == 200


def test_every_answer_forbids_scripts_and_all_that_is_from_elsewhere(client):
    for address in ("/", "/sample/0/0", "/file/0/0/jpg", "/nowhere", "/order?step=x"):
        headers = client.get(address).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'; img-src 'self'")
        assert "script-src" not in headers["content-security-policy"]


# -- samples ---------------------------------------------------------------------------------------


def test_the_grid_shows_samples_columns_and_a_choice(client):
    page = text_of(client, "/")
    assert page.count('<article class="tile">') == 24
    assert page.count("<audio") == 3
    assert "1 to 24 of 32" in page
    assert "25 to 32 of 32" in text_of(client, "/?start=24")
    (zh,) = re.findall(r'href="([^"]*json.lang[^"]*zh[^"]*)"', page)
    assert "of 11" in text_of(client, zh.replace("&amp;", "&"))
    (quoted,) = re.findall(r'href="([^"]*a\+key[^"]*true[^"]*)"', page)
    assert "of 16" in text_of(client, quoted.replace("&amp;", "&"))


def test_counts_of_a_large_corpus_go_on_behind_the_page(tmp_path, monkeypatch):
    from mmstream.converting.sidecar import write_sidecars

    url = write_corpus(tmp_path, [1] * 40, fields_of, checksums=True)
    write_sidecars(mm.open_dataset(url), progress=False)
    monkeypatch.setattr(view_content, "MAX_SECONDS", -1.0)
    counts_of, reads = view_content.Facets._counts_of, threading.Event()

    def held(self, shard):
        if self.num_counted:
            assert reads.wait(500)
        return counts_of(self, shard)

    monkeypatch.setattr(view_content.Facets, "_counts_of", held)
    client = client_of(url)
    assert "Counts of 1 of 40 samples so far" in text_of(client, "/")
    reads.set()
    facets = client.app.state.content.facets("", "", "")
    facets.thread.join()
    page = text_of(client, "/")
    assert "so far" not in page
    assert '<td class="count">14</td>' in page  # in Chinese


def test_a_wrong_condition_says_why_and_shows_all(client):
    page = text_of(client, "/?where=widht+%3C+3")
    assert "the nearest is width" in page
    assert "of 32" in page
    assert "no samples" in text_of(client, "/?where=width+%3C+3")


def test_one_sample_says_where_it_lies_what_is_learned_and_when_it_is_shown(client, folder):
    dataset = mm.open_dataset(folder)
    order = pipeline_of(dataset).order
    page = text_of(client, "/sample/1/4?ranks=2&epoch=1")
    step, rank, row = map(
        int, re.search(r"step (\d+)</a>, rank (\d) of 2, row (\d)", page).groups()
    )
    shards, indexes, _ = order.refs(1, step)
    assert (shards[row], indexes[row], row // 4) == (1, 4, rank)
    assert '<span class="learned">' in page
    assert "uint8 [3, 32, 32]" in page
    checksum = dataset.shards.indexes.columns(1).checksums[4]
    assert f"{int(checksum):08x}" in page
    assert client.get("/find?q=000024").headers["location"] == "/sample/1/4"
    assert client.get("/find?q=shard-000001.tar[4]").headers["location"] == "/sample/1/4"
    assert "names no sample" in text_of(client, "/find?q=nothing", 400)


def test_files_are_served_as_what_they_are_and_never_run(client, tmp_path):
    picture = client.get("/file/0/0/jpg")
    assert (picture.headers["content-type"], picture.content) == ("image/jpeg", jpeg(0))
    sound = audio_file(seconds=1 + 7 / 8)
    part = client.get("/file/0/7/wav", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, sound[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(sound)}"
    beyond = client.get("/file/0/7/wav", headers={"Range": f"bytes={len(sound)}-"})
    assert beyond.status_code == 416
    evil = client_of(write_corpus(tmp_path, [4], hostile))
    assert evil.get("/file/0/0/svg").headers["content-type"] == "text/plain; charset=utf-8"
    assert evil.get("/file/0/0/svg").content == SVG
    html = evil.get("/file/0/0/html").headers
    assert html["content-disposition"] == "attachment"  # it holds a zero byte
    assert evil.get("/file/0/0/__url__").status_code == 400
    assert evil.get("/file/0/9/jpg").status_code == 400


def test_a_selection_is_written_after_a_question_with_the_token(folder):
    client = client_of(folder)
    question = text_of(client, "/select?where=json.lang+%3D+%27zh%27")
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', question))
    assert fields["token"] == TOKEN
    form = {"where": "json.lang = 'zh'", "name": "chinese", "token": TOKEN}
    assert client.post("/select", data={**form, "token": "x"}).status_code == 403
    assert "no such selection" in text_of(client, "/?select=chinese")
    assert "Written to" in client.post("/select", data=form).text
    assert len(mm.open_dataset(folder).select("chinese")) == 11
    two_words = client.post("/select", data={**form, "name": "in chinese"}).text
    assert "--select &#39;in chinese&#39;" in two_words
    other = {**form, "where": "json.lang = 'en'"}
    assert "is taken by" in client.post("/select", data=other).text
    assert "cannot stand" in client.post("/select", data={**form, "name": "../x"}).text
    assert "of 11" in text_of(client, "/?select=chinese")


def bad_of(folder):
    return [tuple(ref) for ref in mm.open_dataset(folder).bad.tolist()]


def test_the_bad_list_is_written_after_a_question_with_the_token(tmp_path):
    from mmstream.converting.sidecar import write_sidecars

    folder = write_corpus(tmp_path / "data", [8, 4], fields_of, checksums=True)
    folder_of_one = write_corpus(tmp_path / "other", [1], fields_of, checksums=True)
    write_sidecars(mm.open_dataset(folder), progress=False)
    client = client_of(folder)
    assert "/bad?shard=1&amp;index=2" in text_of(client, "/sample/1/2")
    question = text_of(client, "/bad?shard=1&index=2")
    assert "shard-000001.tar[2]" in question
    assert bad_of(folder) == []
    form = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', question))
    assert client.post("/bad", data={**form, "token": "x"}).status_code == 403
    assert bad_of(folder) == []
    assert "has 1 bad sample." in client.post("/bad", data=form).text
    zh = "json.lang = 'zh' and json.id < 7"
    assert "3 samples where" in text_of(client, "/bad?where=" + quote_plus(zh))
    assert "has 4 bad samples." in client.post("/bad", data={"where": zh, "token": TOKEN}).text
    assert bad_of(folder) == [(0, 0), (0, 3), (0, 6), (1, 2)]
    assert "Take it off the bad list" in text_of(client, "/sample/1/2")
    client.post("/bad", data={**form, "off": "1"})
    assert bad_of(folder) == [(0, 0), (0, 3), (0, 6)]
    for wrong in ("", "shard=9&index=0", "shard=0&index=8", "where=widht+%3C+3", "off=1"):
        text_of(client, f"/bad?{wrong}", 400)
    union = client_of("both", opened=lambda: mm.open_dataset([folder, folder_of_one]))
    assert "several folders" in text_of(union, "/bad?shard=0&index=0", 400)
    path = Path(folder, "mmstream.bad.json")
    path.write_text(path.read_text()[:-20])
    assert 'class="problem"' in client.post("/bad", data=form).text
    assert len(path.read_text()) < 150


# -- order, problems, statistics, run --------------------------------------------------------------


def test_the_order_page_holds_the_rows_of_each_rank(client, folder):
    page = text_of(client, "/order?step=1&ranks=4")
    shards, indexes, _ = pipeline_of(mm.open_dataset(folder)).order.refs(0, 1)
    wanted = [f"/sample/{s}/{i}" for s, i in zip(shards.tolist(), indexes.tolist())]
    links = re.findall(r'href="(/sample/\d+/\d+)">', page)
    assert links == wanted
    assert page.count("<h2>") == 4
    assert text_of(client, "/order?step=1&ranks=4&rank=3").count("<h2>") == 1
    for wrong in ("step=99", "ranks=9", "rank=1", "epoch=-1"):
        text_of(client, f"/order?{wrong}", 400)


def test_an_order_that_is_not_that_of_the_run_is_named(folder, tmp_path):
    def run_order(data):
        return replace(pipeline_of(data), global_batch_size=4).order

    other = client_of(folder, pipeline=pipeline_of, order=run_order, run=tmp_path)
    for address, status in (("/order", 200), ("/order?step=7", 400), ("/sample/0/0", 200)):
        note = "this is not the order of the run, which differs in global_batch_size"
        assert note in text_of(other, address, status)
    same = client_of(folder, pipeline=pipeline_of, order=lambda d: pipeline_of(d).order)
    assert "not the order" not in text_of(same, "/order")
    assert "8 steps of 4 rows" in text_of(client_of(folder, order=run_order), "/order")


def test_the_step_of_a_sample_is_found_where_steps_differ_in_rows(folder):
    def buckets(data):
        edges = mm.Buckets("num_text_bytes", edges=[15, 25, 60], rows={15: 4, 25: 8, 60: 4})
        return replace(pipeline_of(data), batching=edges)

    client = client_of(folder, pipeline=buckets)
    page = text_of(client, "/sample/0/5?ranks=2")
    assert "As the model gets it, at this step" in page
    assert "another sample takes its row" not in page
    assert "Shares of the buckets, over the steps of epoch 0" in text_of(client, "/order?step=1")
    order = buckets(mm.open_dataset(folder)).order
    shares = shares_of(order, 0, 1)
    counts = Counter(f"up to {order.edge(0, step)}" for step in range(order.steps_per_epoch))
    counted = {
        band["name"]: round(band["share"] * order.steps_per_epoch) for band in shares["bands"]
    }
    assert counted == counts
    heights = [height for band in shares["bands"] for *_, height in band["bars"]]
    assert sum(heights) == pytest.approx(120 * order.steps_per_epoch)


def test_the_shares_of_a_mixture_are_drawn_over_the_run(folder, corpus):
    a, b = mm.open_dataset(folder), mm.open_dataset(corpus)
    changes = {30: {"a": 1, "b": 1}, 50: {"a": 0, "b": 1}}
    mixture = mm.Mixture({"a": (a, 3), "b": (b, 1)}, epoch_steps=20, changes=changes)
    shares = shares_of(pipeline_of(mixture).order, 2, 0)
    assert (shares["last"], shares["at"]) == (60, 560 * 40 / 60)
    first, second = shares["bands"]
    assert (first["name"], first["share"], second["share"]) == ("a", 0.5, 0.5)
    assert first["bars"] == [(0, 30, 280, 90), (280, 60, 186.67, 60)]
    assert second["bars"] == [(0, 0, 280, 30), (280, 0, 186.67, 60), (466.67, 0, 93.33, 120)]
    client = client_of("mixture.json", pipeline=pipeline_of, opened=lambda: mixture)
    page = text_of(client, "/order?epoch=2")
    assert "50.0%" in page
    assert page.count("<title>") == 3
    many = mm.Mixture({f"s{n}": (a, 1 + n % 2) for n in range(50)}, epoch_steps=4)
    bands = shares_of(pipeline_of(many).order, 0, 0)["bands"]
    assert (len(bands), bands[-1]["name"]) == (40, "11 others")
    assert sum(band["share"] for band in bands) == pytest.approx(1)
    assert shares_of(pipeline_of(a).order, 0, 0) is None


def test_problems_are_counted_and_shown(tmp_path):
    url = write_corpus(tmp_path / "data", [8, 4], lambda n: captioned(n % 10), checksums=True)
    from mmstream.converting.sidecar import write_sidecars

    dataset = mm.open_dataset(url)
    write_sidecars(dataset, progress=False)
    write_bad(dataset, [(0, 3)])
    take_down(dataset, [(1, 0)], f"request 17 {EVIL}")
    reject = {"file": "rows.jsonl", "row": 17, "reason": f"image: truncated {EVIL[:-1]}"}
    Path(url, "rejects.jsonl").write_text(json.dumps(reject) + "\n")
    run = tmp_path / "run"
    run.mkdir()
    record = {"epoch": 0, "step": 2, "row": 1, "shard": "shard-000001.tar", "index": 1}
    lines = [{**record, "reason": "no picture"}, {**record, "shard": "gone.tar"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "quarantine-rank0.jsonl").write_text(text + '{"cut')
    client = client_of(url, run=run)
    counts = re.findall(r'<td class="count">(\d+)</td>', text_of(client, "/problems"))
    assert counts == ["1", "2", "1", "1", "0"]
    assert "image: truncated" in text_of(client, "/problems?kind=rejects&row=17")
    assert "no rejects" in text_of(client, "/problems?kind=rejects&row=1")
    quarantine = text_of(client, "/problems?kind=quarantine")
    assert "no picture (epoch 0, step 2, row 1)" in quarantine
    assert "gone.tar" in quarantine
    assert "/sample/0/3" in text_of(client, "/problems?kind=bad")
    assert "request 17" in text_of(client, "/problems?kind=takedowns")
    pairs = text_of(client, "/problems?kind=duplicates&of=pair")
    links = re.findall(r'href="(/sample/\d+/\d+)">', pairs)
    assert links == ["/sample/0/0", "/sample/1/2", "/sample/0/1", "/sample/1/3"]
    assert "was taken down" in text_of(client, "/sample/1/0")


def test_leaks_are_shown_side_by_side_with_another_dataset(folder, tmp_path):
    from mmstream.converting.sidecar import write_sidecars

    other = write_corpus(tmp_path, [3], lambda number: captioned(number + 30), checksums=True)
    client = client_of(folder, against=[other])
    assert "mmstream index" in text_of(client, "/problems?kind=leaks&against=0", 400)
    write_sidecars(mm.open_dataset(other), progress=False)
    client = client_of(folder, against=[other])
    assert "shared with" in text_of(client, "/problems")
    page = text_of(client, "/problems?kind=leaks&of=media&against=0")
    links = re.findall(r'href="([^"]*/sample/\d+/\d+)">', page)
    assert links == [
        "/sample/1/10",
        "/against/0/sample/0/0",
        "/sample/1/11",
        "/against/0/sample/0/1",
    ]
    assert 'aria-current="true">the same picture' in page
    sample = text_of(client, "/against/0/sample/0/2")
    assert "/against/0/file/0/2/jpg" in sample
    assert "What the model gets" not in sample
    assert "bad list" not in sample
    assert client.get("/against/0/file/0/2/jpg").content == jpeg(32)
    for wrong in ("against=1", "against=0&of=pair", "against=../x"):
        text_of(client, f"/problems?kind=leaks&{wrong}", 400)
    assert "--against URL" in text_of(client_of(folder), "/problems")
    text_of(client_of(folder), "/against/0/sample/0/0", 400)


def test_statistics_are_drawn(client):
    page = text_of(client, "/statistics?where=json.lang+%3D+%27zh%27")
    assert "11 of 11 samples measured" in page
    assert page.count("<svg") >= 3


def test_a_run_shows_its_curves_waits_and_resumes(folder, tmp_path):
    before = {"epoch": 0, "loss": 2.5, "wait_fraction": 0.1, "num_bytes": 3, "world_size": 2}
    after = {**before, "num_bytes": 0, "wait_fraction": 0.9, "world_size": 1, "loss": None}
    lines = [{**before, "num_steps": 1, "lineage": [{"order": {"seed": 0}, "planned": [[0, 1]]}]}]
    lines += [{**before, "num_steps": 2, "step": 1}]
    after |= {"read_s": 1.0, "decode_s": 3.0}
    lines += [{**after, "num_steps": 3, "step": 2, "lineage": [{"order": {"seed": 1}}]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = tmp_path / "metrics-rank0.jsonl"
    path.write_text(text + '{"num_st')
    (first, _), (second, changes) = starts_of(read_metrics(path))
    assert (first.num_steps, second.num_steps) == (1, 3)
    assert changes == ["ranks: 2 before, 1 now", "seed: 0 before, 1 now"]
    page = text_of(client_of(folder, run=tmp_path), "/run")
    assert "<td>90.0%</td><td>decoding</td>" in page
    assert "reading 25%, decoding 75%, collating 0%" in page
    assert "seed: 0 before, 1 now" in page
    assert len(starts_of([Line(1, num_bad=2), Line(2, num_bad=2), Line(3)])) == 2


class Names(HTMLParser):
    """What of a page has no name for those who cannot see it."""

    def __init__(self, html):
        super().__init__()
        self.unnamed, self.num_titles, self.labels = [], 0, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.labels += [tag] if tag == "label" else []
        self.num_titles += tag == "h1"
        is_named = "aria-label" in given or (tag == "img" and "alt" in given)
        is_control = tag in ("input", "select") and given.get("type") != "hidden"
        is_shown = tag == "svg" and "aria-hidden" not in given
        needs_name = is_control or is_shown or tag in ("img", "nav", "audio", "video")
        if needs_name and not is_named and not (is_control and self.labels):
            self.unnamed.append(self.get_starttag_text())

    def handle_endtag(self, tag):
        self.labels = self.labels[:-1] if tag == "label" else self.labels


def test_every_picture_and_control_has_a_name_for_those_who_cannot_see_it(client):
    addresses = ["/", "/sample/0/7", "/order", "/problems", "/problems?kind=rejects", "/statistics"]
    for address in [*addresses, "/select?where=width+%3E+3", "/bad?shard=0&index=1"]:
        names = Names(text_of(client, address))
        assert (names.unnamed, names.num_titles) == ([], 1), address
    assert Names("<img><label><input></label><input><nav>").unnamed == ["<img>", "<input>", "<nav>"]


# -- what is missing, broken or hostile ------------------------------------------------------------


def test_without_sidecars_run_and_order_the_pages_say_so(corpus):
    client = client_of(corpus)
    page = text_of(client, "/")
    assert "No counts of columns" in page
    assert "mmstream index" in page
    assert page.count('<article class="tile">') == 24
    assert "mmstream index" in text_of(client, "/?where=width+%3C+3")
    sample = text_of(client, "/sample/0/0")
    assert "the order is not known" in sample
    assert "no such sidecar" in sample
    assert "--run FOLDER" in text_of(client, "/run", 400)
    assert "--pipeline" in text_of(client, "/order", 400)
    assert "mmstream index" in text_of(client, "/problems?kind=duplicates", 400)


def test_a_store_that_is_away_is_named_and_comes_back(folder):
    answers = [StorageError("s3://bucket: no answer"), mm.open_dataset(folder)]

    def opened():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client = client_of("s3://bucket", opened=opened)
    assert "no answer" in text_of(client, "/", 503)
    assert "of 32" in text_of(client, "/")


def test_a_broken_sample_is_a_card_that_says_why(tmp_path):
    url = write_corpus(tmp_path, [3], captioned, checksums=True)
    path = Path(url, "shard-000000.tar")
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
    client = client_of(url, pipeline=pipeline_of)
    page = text_of(client, "/")
    assert page.count('<article class="tile">') == 3
    assert 'class="problem"' in page
    assert "checksum" in text_of(client, "/sample/0/0")


def test_hostile_data_is_shown_as_text(tmp_path):
    client = client_of(write_corpus(tmp_path, [4], hostile))
    addresses = [
        "/",
        "/?where=" + EVIL[:80].replace("&", ""),
        "/find?q=%3Cscript%3E",
        "/statistics",
    ]
    for address in [*addresses, *(f"/sample/0/{index}" for index in range(4))]:
        page = Tags(client.get(address).text)
        assert page.names.isdisjoint({"script", "iframe", "object", "embed", "base", "style"})
        assert [name for name in page.attributes if name.startswith("on") or name == "style"] == []


@contextmanager
def serving(folder):
    """A real server in a thread; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    content = Content(folder, lambda: mm.open_dataset(folder), pipeline_of)
    server = uvicorn.Server(
        uvicorn.Config(application(content, TOKEN, port), log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.slow
def test_a_browser_shows_the_pages_and_forbids_nothing_of_them(folder, tmp_path):
    with serving(folder) as port:
        for number, page in enumerate(("", "sample/0/7", "order", "problems", "statistics")):
            address = f"http://127.0.0.1:{port}/{page}?token={TOKEN}"
            opened = open_page(address, tmp_path / str(number))
            assert opened.messages == []
            assert "<main" in opened.dom


@pytest.mark.slow
def test_a_browser_runs_nothing_of_hostile_data(tmp_path):
    with serving(write_corpus(tmp_path / "data", [4], hostile)) as port:
        for page in ("", "sample/0/0", "sample/0/3"):  # the first one shows all four
            address = f"http://127.0.0.1:{port}/{page}?token={TOKEN}"
            opened = open_page(address, tmp_path / f"profile{page[-1:]}")
            assert [line for line in opened.messages if "Refused" in line] == []
            assert "<title>executed" not in opened.dom


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_its_address_and_ends_at_sigterm(folder):
    command = [sys.executable, "-m", "mmstream", "view", folder, "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
        with urllib.request.urlopen(address) as answer:
            assert (answer.status, b"<article" in answer.read()) == (200, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143


def test_a_taken_port_and_a_missing_extra_are_one_line(mmstream, folder, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = mmstream("view", folder, "--no-browser", "--port", port)
    assert (code, out, f"port {port}: " in err) == (2, "", True), err
    assert err.count("\n") == 1, err
    for name in [name for name in sys.modules if name.startswith("mmstream.view")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.requests", None)
    code, out, err = mmstream("view", folder, "--no-browser")
    assert (code, out) == (2, "")
    assert "pip install 'mmstream[view]'" in err


def test_video_has_a_player_and_frames(tmp_path):
    url = write_corpus(tmp_path, [1], lambda _: {"mp4": video_file(), "txt": b"a clip"})
    page = text_of(client_of(url), "/")
    assert 'src="/file/0/0/mp4"></video>' in page
    assert page.count("data:image/") >= 2
    assert np.frombuffer(client_of(url).get("/file/0/0/mp4").content, np.uint8).size > 1000


def test_a_sound_is_drawn_with_axes_and_a_broken_one_says_why(folder, client, tmp_path):
    page = text_of(client, "/sample/0/7")
    (picture,) = re.findall(r'<image href="data:image/png;base64,([^"]+)"', page)
    image = PIL.Image.open(io.BytesIO(base64.b64decode(picture)))
    assert image.size == (720, 180)
    assert "spectrogram of wav, 1.9 s" in page
    assert re.findall(r">([\d,.]+)</text>", page)[:5] == ["0", "2,000", "4,000", "6,000", "8,000"]
    sounds = {0: audio_file(seconds=1), 1: audio_file(seconds=1)[:2000]}
    other = client_of(write_corpus(tmp_path, [2], lambda number: {"wav": sounds[number]}))
    assert text_of(other, "/").count('<img class="sound"') == 1
    assert "wav: no spectrogram, since truncated wav" in text_of(other, "/sample/0/1")


def silence(rate, num_channels, seconds=0.1):
    file = io.BytesIO()
    soundfile.write(file, np.zeros((int(rate * seconds), num_channels)), rate, format="WAV")
    return file.getvalue()


def test_a_spectrogram_shows_tones_clicks_and_only_the_start_of_a_long_sound():
    times = np.arange(32000) / 16000
    loudness = decibels(np.sin(2 * np.pi * 2000 * times), 16000, 100)
    assert loudness.shape[1] == 100
    assert loudness.mean(axis=1).argmax() / (len(loudness) - 1) == 2000 / 8000
    click = np.zeros(320_000)
    click[160_000] = 1
    assert decibels(click, 16000, 100).sum(axis=0).argmax() in (49, 50)
    assert decibels(np.zeros(50), 16000, 100).max() == 0
    fast = spectrogram_of("wav", silence(1_000_000, 1, seconds=1), max_seconds=2)
    assert fast.seconds == 2 * 0.192
    assert spectrogram_of("wav", silence(8000, 65)).problem == "the sound has 65 channels"
    sound = spectrogram_of("wav", audio_file(seconds=3), max_seconds=2)
    assert (sound.seconds, sound.num_seconds) == (2, 3)
    assert sound.label == "spectrogram of wav, 2.0 of 3.0 s"
