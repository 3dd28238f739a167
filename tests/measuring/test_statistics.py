"""Statistics of a dataset: true to its samples, the same every time, and stopped by no bad one."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import take_down
from mmstream.decoding.sample import WholeText
from mmstream.display.samples import statistics_lines
from mmstream.measuring.statistics import Statistics
from mmstream.train.models import chat_decode
from mmstream.train.tokenizer import byte_tokenizer, open_tokenizer
from tests.display.test_display import Page, recording
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.media_files import audio_file, video_file
from tests.helpers.stores import watched


def varied(number):
    """A captioned picture whose numbers follow from its own."""
    return {
        "jpg": jpeg(number, (10 + number, 20 + 2 * number)),
        "txt": b"word " * (number % 5 + 1),
        "cls": str(number % 3).encode(),
    }


@pytest.fixture
def dataset(tmp_path):
    return mm.open_dataset(write_corpus(tmp_path / "d", [30, 0, 20], varied))


def test_numbers_are_those_of_the_samples(dataset):
    stats = mm.statistics(dataset)
    assert (stats.num_samples, stats.num_measured, stats.num_bad) == (50, 50, 0)
    expected = {
        "image width": list(range(10, 60)),
        "image height": list(range(20, 120, 2)),
        "words": [n % 5 + 1 for n in range(50)],
        "images": [1] * 50,
        "sample bytes": [sum(map(len, varied(n).values())) for n in range(50)],
    }
    assert {name: stats.values[name].tolist() for name in expected} == expected
    assert stats.classes == {"0": 17, "1": 17, "2": 16}
    assert "turns" not in stats.values


def test_fields_that_some_samples_lack_are_counted(tmp_path):
    def fields(number):
        return {
            name: b"1" for n, name in enumerate(("cls", "v2.cls", "a b")) if number % (n + 1) == 0
        }

    stats = mm.statistics(mm.open_dataset(write_corpus(tmp_path, [6], fields)))
    assert list(stats.fields.items()) == [("cls", 6), ("v2.cls", 3), ("a b", 2)]
    assert "  samples with each field: cls 6, v2.cls 3, a b 2" in statistics_lines(stats)
    many = Statistics(1, 1, 0, (), {}, {}, {f"{n}.jpg": 1 for n in range(20)})
    assert next(line for line in statistics_lines(many) if "each" in line).endswith(", 4 more")


def test_a_part_of_the_samples_is_drawn_from_all_of_it_and_always_the_same(dataset):
    first, again, other = (mm.statistics(dataset, 10, seed=seed) for seed in (1, 1, 2))
    widths = first.values["image width"]
    assert [(width - 10) // 5 for width in widths] == list(range(10))  # one from each tenth
    assert first.summary() == again.summary() != other.summary()
    watching = watched(dataset)
    alone = mm.statistics(watching, 10, seed=1, num_threads=1)
    assert alone.summary() == first.summary()
    assert len([name for name, _, _ in watching.store.ranges if name.endswith(".tar")]) == 10


def test_conversations_recordings_and_several_pictures(tmp_path):
    def fields(number):
        texts = ["what is it?", "two words"][: 1 + number % 2]
        turns = [{"role": "user", "content": [{"type": "text", "text": t}]} for t in texts]
        pictures = {f"{i}.jpg": jpeg(i) for i in range(number % 3)}
        row = {"messages": turns, "label": "cat" if number else 7}
        return {**pictures, "wav": recording(), "json": json.dumps(row).encode()}

    stats = mm.statistics(mm.open_dataset(write_corpus(tmp_path, [6], fields)))
    expected = {
        "turns": [1, 2] * 3,
        "words": [3, 5] * 3,
        "images": [1, 2, 1, 2],
        "audio bytes": [len(recording())] * 6,
    }
    assert {name: stats.values[name].tolist() for name in expected} == expected
    assert len(stats.values["image width"]) == 6
    assert stats.classes == {"cat": 5, "7": 1}


def test_videos_and_recordings_are_measured_by_their_headers(tmp_path):
    files = {
        "mp4": video_file(rotation=90, audio_codec="aac"),
        "other.mkv": video_file("mkv", num_frames=5, fps=5),
        "flac": audio_file("flac", seconds=0.5, sample_rate=22_050),
    }
    damaged = {**files, "mp4": files["mp4"][:-500]}
    url = write_corpus(tmp_path, [3], lambda number: damaged if number == 1 else files)
    stats = mm.statistics(mm.open_dataset(url))
    assert (stats.num_measured, stats.num_bad) == (2, 1)
    assert re.search(r"\[1\] .*\.mp4: truncated: ", stats.reasons[0])
    expected = {
        "video frames per second": [10, 5] * 2,
        "video frames": [12, 5] * 2,
        "video width": [48, 64] * 2,
        "video height": [64, 48] * 2,
        "audio seconds": [0.5] * 2,
        "audio sample rate": [22_050] * 2,
        "video bytes": [len(files["mp4"]), len(files["other.mkv"])] * 2,
        "audio bytes": [len(files["flac"])] * 2,
    }
    assert {name: stats.values[name].tolist() for name in expected} == expected
    assert stats.values["video seconds"] == pytest.approx([1.2, 1.0] * 2)
    assert stats.hours == pytest.approx({"video": 4.4 / 3600, "audio": 1.0 / 3600})
    assert stats.summary()["hours"] == stats.hours
    lines = list(statistics_lines(stats))
    assert any("audio sample rate (Hz)" in line for line in lines)
    # Two of the three samples were measured.
    assert "  hours of video: 0.00122 in the samples measured, about 0.00183 in all" in lines


def test_tokens_are_counted_whole_and_those_that_are_learned(tmp_path):
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d" * 5000}]
    row = json.dumps({"messages": turns}).encode()
    dataset = mm.open_dataset(write_corpus(tmp_path, [3], lambda _: {"json": row}))
    decoder = mm.TextDecoder(byte_tokenizer(chat=True), max_length=1 << 20)
    stats = mm.statistics(dataset, text=decoder)
    tokens = decoder({"json": json.loads(row)})
    assert stats.values["tokens"].tolist() == [len(tokens["input_ids"])] * 3
    assert stats.values["learned tokens"].tolist() == [(tokens["labels"] != -100).sum()] * 3
    assert stats.values["learned tokens"][0] == 5001


TURNS = [
    {"role": "user", "content": [{"type": "image", "field": "jpg"}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": "a cat"},
]


def pictured(number):
    return {"json": json.dumps({"messages": TURNS}).encode(), "jpg": jpeg(number, (100, 120))}


@pytest.mark.parametrize("length", [9, mm.families.qwen_vl.image_length()])
def test_tokens_of_media_are_those_of_training_or_named(tmp_path, length):
    dataset = mm.open_dataset(write_corpus(tmp_path, [3], pictured))
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = mm.ImageDecoder(resize="max_pixels", multiple_of=28)
    decode = mm.Decode(image=image, text=mm.TextDecoder(tokenizer, image_length=length))
    (sample,) = mm.Pipeline(dataset, global_batch_size=1, decode=decode).take(1)
    stats = mm.statistics(dataset, text=WholeText(decode))
    assert stats.values["tokens"].tolist() == [len(sample["input_ids"])] * 3
    assert stats.values["learned tokens"].tolist() == [(sample["labels"] != -100).sum()] * 3
    assert stats.uncounted_media == ()
    alone = mm.statistics(dataset, text=mm.TextDecoder(tokenizer))
    assert alone.summary()["uncounted_media"] == ["image"]
    assert any("tokens of images are not counted" in line for line in statistics_lines(alone))
    assert mm.statistics(dataset).uncounted_media == ()


@pytest.mark.slow
def test_the_folder_of_a_model_counts_the_tokens_of_media(tmp_path, mmstream):
    from tests.helpers.tiny_media_models import save_tiny_qwen

    folder = save_tiny_qwen(tmp_path / "qwen")
    url = write_corpus(tmp_path / "d", [3], pictured)
    whole = chat_decode(open_tokenizer(str(folder), chat=True), str(folder), 4096)
    dataset = mm.open_dataset(url)
    (sample,) = mm.Pipeline(dataset, global_batch_size=1, decode=whole).take(1)
    num_tokens = len(sample["input_ids"])
    _, out, _ = mmstream("info", url, "--stats", "--json", "--tokenizer", folder)
    assert json.loads(out)["values"]["tokens"]["max"] == num_tokens
    _, out, _ = mmstream("show", url, "--tokenizer", folder)
    assert out.count(f"{num_tokens} tokens, ") == 3
    _, out, _ = mmstream("show", url, "--tokenizer", "bytes")
    assert out.count("tokens of images are not counted: --tokenizer with the folder") == 3


def test_bad_samples_are_counted_and_never_stop_it(tmp_path):
    damage = {
        2: {"jpg": b"\xff\xd8\xff cut"},
        5: {"txt": b"\xff\xfe"},
        7: {"json": b"{"},
        8: {"png": b"<svg/>"},
    }
    url = write_corpus(tmp_path, [12, 3], lambda n: varied(n) | damage.get(n, {}))
    (tmp_path / "shard-000001.tar").unlink()
    stats = mm.statistics(mm.open_dataset(url))
    assert (stats.num_measured, stats.num_bad) == (8, 7)
    assert len(stats.values["words"]) == len(stats.values["images"]) == 8
    assert [reason.split(":")[0] for reason in stats.reasons] == [
        "shard-000000.tar[2] 000002.jpg",
        "shard-000000.tar[5] 000005.txt",
        "shard-000000.tar[7] 000007.json",
        "shard-000000.tar[8] 000008.png",
        "shard-000001.tar",
    ]


def test_what_was_taken_down_is_not_measured(tmp_path):
    url = write_corpus(tmp_path, [9])
    take_down(mm.open_dataset(url), [(0, 4)], "request 17")
    stats = mm.statistics(mm.open_dataset(url))
    assert (stats.num_samples, stats.num_measured, stats.num_bad) == (9, 8, 0)


def test_a_mixture_and_an_empty_dataset_have_statistics_too(tmp_path, dataset):
    mixture = mm.Mixture({"a": (dataset, 1), "b": (dataset, 3)}, stop="all")
    assert mm.statistics(mixture).num_measured == 100
    empty = mm.statistics(mm.open_dataset(write_corpus(tmp_path / "e", [0])))
    assert (empty.num_measured, empty.values) == (0, {})
    assert next(statistics_lines(empty)).startswith("0 of 0 samples")
    Page(empty._repr_html_())


def test_impossible_settings_are_refused(dataset):
    with pytest.raises(mm.ConfigError, match="num_samples=0"):
        mm.statistics(dataset, 0)
    decoder = mm.TextDecoder(
        byte_tokenizer(chat=True), image_length=mm.families.qwen_vl.image_length()
    )
    with pytest.raises(mm.ConfigError, match="image_length is a function"):
        mm.statistics(dataset, text=decoder)


# -- how they are shown ---------------------------------------------------------------------------


def test_a_terminal_and_a_page_show_the_same_numbers(dataset, tmp_path):
    stats = mm.statistics(dataset)
    lines = list(statistics_lines(stats))
    assert lines[0] == "50 of 50 samples measured, spread over all"
    row = next(line for line in lines if line.startswith("  image width (pixels)"))
    assert row.split()[-7:] == ["50", "10", "12.4", "34.5", "34.5", "56.5", "59"]
    page = Page(mm.show(stats).html)
    assert page.open == []
    assert {"script", "svg", "link"} & set(page.tags) == set()
    for word in ("34.5", "59", "classes (3)"):
        assert word in page.words
    assert mm.show(stats).save(tmp_path / "stats.html").stat().st_size < 50_000


def test_classes_of_strangers_are_text_and_many_of_them_are_summed_up(tmp_path):
    dataset = mm.open_dataset(
        write_corpus(tmp_path, [40], lambda n: {"cls": b"<b>\x1b[2J" + b"%d" % n * 99})
    )
    stats = mm.statistics(dataset)
    assert len(stats.classes) == 40
    page = Page(mm.show(stats).html)
    assert "24 more" in page.words
    assert "<b>\\x1b[2J" in page.words
    assert all(line.isprintable() for line in statistics_lines(stats))
    assert max(map(len, stats.classes)) <= 80


def test_the_command_prints_a_table_a_page_or_json(dataset, mmstream, tmp_path):
    run = partial(mmstream, "info", dataset.store.url)
    page = tmp_path / "stats.html"
    code, out, _ = run("--stats", "--samples", 20, "--tokenizer", "bytes", "--html", page)
    assert code == 0
    assert "20 of 50 samples measured" in out
    assert "learned tokens" in out
    assert "image width (pixels)" in page.read_text()
    code, out, _ = run("--stats", "--json")
    assert json.loads(out)["values"]["image width"]["median"] == 34.5
    code, _, err = run("--html", page)
    assert code == 2
    assert "--html would do nothing here: it goes with --stats" in err
