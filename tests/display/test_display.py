"""What notebooks show: bounded, escaped, and right for raw and decoded data."""

import base64
import copy
import io
import json
import pickle
import re
import struct
import wave
from dataclasses import replace
from html.parser import HTMLParser

import msgspec
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.dataset.dataset import SampleDict
from mmstream.display.text import file_kind, value_text
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import captioned, jpeg, write_corpus
from tests.helpers.pictures import psnr
from tests.helpers.stores import watched

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> & $x$"


class Page(HTMLParser):
    """The tags, attributes and visible words of a piece of HTML."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words += data

    def images(self):
        urls = [value for tag, name, value in self.attributes if (tag, name) == ("img", "src")]
        matches = [re.fullmatch(r"data:image/(?:jpeg|png);base64,(.+)", url) for url in urls]
        return [Image.open(io.BytesIO(base64.b64decode(match[1]))) for match in matches]


def parse(shown):
    page = Page(shown._repr_html_())
    assert page.open == []
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.tags.count("style") == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for _, name, value in page.attributes:
        if name in ("src", "href"):
            assert value.startswith(
                ("data:image/jpeg", "data:image/png", "data:audio/", "data:video/")
            )
    return page


def make(folder, counts, fields_of=captioned):
    return mm.open_dataset(write_corpus(folder, counts, fields_of))


def recording(seconds=0.1):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(struct.pack("<h", 5) * int(8000 * seconds))
    return buffer.getvalue()


def evil(number):
    return {
        "jpg": b"not a jpeg " + EVIL.encode() if number == 1 else jpeg(number, (300, 200)),
        "txt": EVIL.encode(),
        EVIL.replace("/", "").replace(".", "")[:20]: EVIL.encode(),
    }


@pytest.fixture
def dataset(tmp_path):
    return make(tmp_path / "good", [7, 5])


@pytest.fixture
def pipeline(dataset):
    decode = mm.Decode(
        image=mm.ImageDecoder(size=32), text=mm.TextDecoder(byte_tokenizer(), max_length=20)
    )
    return mm.Pipeline(dataset, global_batch_size=4, decode=decode)


def test_a_dataset_shows_its_size_and_samples_from_all_of_it(dataset):
    page = parse(dataset)
    assert repr(dataset) in page.words
    assert [n for n in range(12) if f"caption {n} " in page.words] == list(range(12))


def test_a_sample_is_a_dict_that_shows_itself_in_one_line(dataset, pipeline):
    for sample in (dataset[0], dataset[3:5][1], next(iter(dataset)), *pipeline.take(2)):
        assert isinstance(sample, dict)
        assert re.fullmatch(rf"\{{'__key__': '{sample['__key__']}', .{{30,360}}", repr(sample))
        parse(sample)
    for sample, words in (
        (dataset[0], "'jpg': <937 bytes JPEG 40x30>, 'txt': b'caption 0 ', 'json': b'{\"id\": 0}'"),
        (dataset[8], "/good/shard-000001.tar'"),
        (dataset[8], "'__lineage__': <shard 1, index 1>}"),
        (pipeline.take(1)[0], "'image': <uint8 [3, 32, 32]>"),
    ):
        assert words in repr(sample)


def test_a_sample_stays_a_dict_for_all_functions(dataset):
    sample = dataset[0]
    plain = dict(sample)
    for each in (pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample), sample.copy()):
        assert (type(each), each) == (type(sample), plain)
    assert {**sample} == sample | {} == plain
    text = SampleDict({"__key__": "a", "id": 3})
    assert json.dumps(text) == json.dumps(dict(text))
    assert msgspec.json.encode(text) == msgspec.json.encode(dict(text))


@pytest.mark.parametrize(
    "sample",
    [
        {
            "__key__": "a\x1b[2J\u202e",
            "tx\nt": "x\x1b\n" * 500,
            "b": bytes(10**6),
            "c": [1] * 10**6,
        },
        {f"f{i}" * 100: EVIL * 100 for i in range(1000)},
        {
            "__key__": ["a", "b"],
            "json": {"a": {"b": ["c"] * 1000}},
            3: object(),
            "m": memoryview(b"ab"),
        },
        {
            "jpg": b"\xff\xd8\xff",
            "png": b"\x89PNG\r\n\x1a\n",
            "u": "é".encode() * 40,
            "x": b"\xff\xc0",
        },
        {},
    ],
)
def test_the_line_of_any_sample_is_short_and_printable(sample):
    text = repr(SampleDict(sample))
    assert text.isprintable()
    assert len(text) < 1200
    SampleDict(sample)._repr_html_()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"a cat", "b'a cat'"),
        ("é" * 100, repr("é" * 27 + "..." + "é" * 28)),
        ("é".encode() * 100, "<200 bytes '" + "é" * 30 + "'...>"),
        (b"x" * 200, "<200 bytes '" + "x" * 60 + "'...>"),
        (bytes(300), "<300 bytes>"),
        ([1, 2.5, None], "[1, 2.5, None]"),
        ({"a": [1]}, "{'a': [...]}"),
        (torch.zeros(2, 3), "<float32 [2, 3]>"),
        (None, "None"),
    ],
)
def test_a_value_is_shown_in_a_few_words(value, expected):
    assert value_text(value) == expected


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_the_first_bytes_tell_the_size_of_an_image(name):
    buffer = io.BytesIO()
    Image.new("L", (321, 123)).save(buffer, name)
    assert file_kind(buffer.getvalue()).upper() == f"{name} 321X123"
    for cut in range(60):
        assert file_kind(buffer.getvalue()[:cut]).upper() in ("", name, f"{name} 321X123")


def test_the_first_bytes_tell_other_files_too():
    for data, kind in (
        (recording(1.5), "WAV"),
        (b"\0\0\0\x20ftypisom", "MP4"),
        (b"\x1aE\xdf\xa3..B\x82\x84webmB", "WebM"),
        (b"%PDF-1.7", "PDF"),
        (b"words", ""),
    ):
        assert file_kind(data) == kind


def test_an_unreadable_shard_is_said_not_raised(dataset, tmp_path):
    (tmp_path / "good" / dataset.name_of(0)).unlink()
    assert "no such shard" in parse(mm.open_dataset(tmp_path / "good")).words


def test_nothing_is_read_to_show_a_corpus_of_long_videos(dataset, monkeypatch):
    monkeypatch.setattr("mmstream.display.samples.MAX_PREVIEW_BYTES", 10)
    dataset = watched(dataset)
    assert parse(dataset).images() == []
    assert dataset.store.ranges == []


def test_thumbnails_are_small_and_made_anew(tmp_path):
    big = make(tmp_path, [1], lambda _: {"jpg": jpeg(1, (1500, 900))})
    (image,) = parse(mm.show(big[0])).images()
    assert image.height < image.width <= 288


def test_a_batch_shows_rows_texts_and_fields(pipeline):
    batch = next(iter(mm.Loader(pipeline)))
    page = parse(mm.show(batch))
    assert len(page.images()) == 4
    assert "epoch 0, step 0, rows 0 to 3" in page.words
    assert "uint8 [4, 3, 32, 32]" in page.words
    assert "% padding" in page.words


def test_a_normalised_batch_can_be_seen(pipeline):
    normalize = mm.Normalize((0.5,) * 3, (0.2,) * 3)
    batch = next(iter(mm.to_device(mm.Loader(pipeline), "cpu", normalize=normalize)))
    page = parse(mm.show(batch))
    assert [image.size for image in page.images()] == [(32, 32)] * 4
    plain = parse(mm.show(next(iter(mm.Loader(pipeline))))).images()
    assert all(psnr(*both) > 18 for both in zip(page.images(), plain, strict=True))
    assert "float32" in page.words


def test_a_batch_of_several_images_a_row_shows_them_all(tmp_path):
    def fields(number):
        return {f"{i}.jpg": jpeg(i) for i in range(number % 3)} | {"txt": b"a word"}

    dataset = make(tmp_path, [6], fields)
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    loader = mm.Loader(mm.Pipeline(dataset, global_batch_size=6, decode=decode))
    batch = next(iter(loader))
    assert len(parse(mm.show(batch)).images()) == len(batch["image"]) == 6
    raw = next(iter(mm.Loader(mm.Pipeline(dataset, global_batch_size=6))))
    assert len(parse(mm.show(raw)).images()) == 6


def test_a_batch_marks_substitutes_and_padding(tmp_path):
    dataset = make(
        tmp_path, [9], lambda i: captioned(i) | ({"jpg": b"\xff\xd8\xffcut"} if i == 4 else {})
    )
    pipeline = mm.Pipeline(
        dataset, global_batch_size=6, decode=mm.Decode(image=mm.ImageDecoder(size=16)),
        drop_last=False, shuffle=False, bad_samples=mm.BadSamplePolicy(quarantine=None),
    )  # fmt: skip
    first, last = mm.Loader(pipeline)
    assert "substitute for " in parse(mm.show(first)).words
    assert parse(mm.show(last)).words.count("not valid: padding") == 3
    masking = replace(pipeline, bad_samples=mm.BadSamplePolicy("mask", quarantine=None))
    assert "not valid: shard-000000.tar[4]" in parse(mm.show(next(iter(mm.Loader(masking))))).words


def test_a_conversation_shows_images_and_audio_where_they_are_said(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "image", "field": "0.jpg"},
                                     {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": EVIL}]},
        {"role": "user", "content": [{"type": "audio", "field": "1.wav"}]},
        {"role": "assistant", "content": "A beep."},
    ]  # fmt: skip
    row = json.dumps({"messages": turns}).encode()
    fields = {"0.jpg": jpeg(0), "1.wav": recording(), "json": row}
    dataset = make(tmp_path, [4], lambda _: fields)
    shown = mm.show(dataset[0])
    marks = ("<img", "What is it?", "&lt;script", "<audio", "beep")
    places = [shown._repr_html_().index(mark) for mark in marks]
    assert places == sorted(places)
    assert len(parse(shown).images()) == 1
    assert parse(shown).tags.count("audio") == 1
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    [decoded] = mm.Pipeline(dataset, global_batch_size=1, decode=decode).take(1)
    assert [image.size for image in parse(mm.show(decoded)).images()] == [(16, 16)]


@pytest.mark.parametrize(
    "row",
    [b"[]", b"{", b"\xff", b'{"messages": 3}', b'{"messages": [1, {"role": 2}]}',
     b'{"messages": [{"role": "user", "content": [3, {"type": "image", "field": ["x"]}]}]}',
     b'{"messages": [{"role": "user", "content": [{"type": "image", "field": "9.jpg"}]}]}'],
)  # fmt: skip
def test_odd_messages_are_shown_all_the_same(row):
    sample = {"__key__": "a", "jpg": jpeg(0), "json": row}
    parse(mm.show(sample))
    parse(mm.show([sample]))


def test_what_strangers_wrote_is_text_never_markup(tmp_path):
    dataset = make(tmp_path / "x", [3], evil)
    loader = mm.Loader(mm.Pipeline(dataset, global_batch_size=3))
    for value in (dataset, dataset[0:3], dataset[0], dataset[1], next(iter(loader))):
        assert "<script>" in parse(mm.show(value)).words  # the words are there, the tag is not
    damaged = parse(mm.show(dataset[1]))
    assert (damaged.images(), "not a" in damaged.words) == ([], True)


def test_output_is_bounded(dataset):
    long = {"__key__": "k" * 10_000, "txt": "word " * 100_000, "a": 3, "b": "x" * 100_000}
    turn = {"role": "r" * 5000, "content": "y" * 100_000}
    pictures = {f"{i}.jpg": jpeg(i) for i in range(40)}
    for value in ({**long, **pictures, "json": {"messages": [turn] * 500}}, [long] * 1000):
        assert len(mm.show(value)._repr_html_()) < 200_000
    assert len(parse(mm.show(dataset[:11])).images()) == 11
    assert "more" in parse(mm.show(long)).words


def test_what_cannot_be_shown_is_refused():
    for value in (3, {"a": 1}, "text", [3]):
        with pytest.raises(mm.ConfigError, match="show: "):
            mm.show(value)


def test_recordings_are_embedded_where_browsers_play_them_and_they_are_not_large():
    for name, data, element, text in (
        ("wav", recording(), "audio", "wav: 1.6 kB WAV: "),
        ("wav", recording(200), "", "; not embedded: more than 2.0 MB"),
        ("<x>.mkv", b"12", "", "<x>.mkv: 2 bytes: "),
        ("<x>.mp4", b"12", "video", "<x>.mp4: 2 bytes: "),
    ):
        page = parse(mm.show({"__key__": "a", name: data}))
        assert [tag for tag in page.tags if tag in ("audio", "video")] == [element][: len(element)]
        assert text in page.words


def test_a_tensor_that_is_no_picture_is_said():
    assert "no picture" in parse(mm.show({"__key__": "a", "image": torch.zeros(2, 5)})).words


def test_pictures_and_masks_by_field_are_shown(tmp_path):
    mask = torch.zeros((12, 16), dtype=torch.uint8)
    mask[:, 8:] = 3
    file = io.BytesIO()
    Image.fromarray(mask.numpy()).save(file, "png")
    source = write_corpus(tmp_path, [4], lambda n: {"jpg": jpeg(n), "mask.png": file.getvalue()})
    decode = mm.Decode({"jpg": mm.ImageDecoder(), "mask.png": mm.ImageDecoder(mask=True)})
    pipeline = mm.Pipeline(mm.open_dataset(source), global_batch_size=2, decode=decode)
    shown = parse(mm.show(pipeline.take(1)[0])).images()
    assert [image.size for image in shown] == [(40, 30), (16, 12)]
    assert shown[1].convert("L").getpixel((14, 6)) > 240
    assert len(parse(mm.show(next(iter(mm.Loader(pipeline))))).images()) == 4
