"""A measure: the lengths of training, the same for any number of processes, and restartable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.facts import facts_name, write_facts
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.errors import ConfigError
from mmstream.measuring import measure as module
from mmstream.packing.measure_file import measure_folder, open_measure
from mmstream.pipeline import PipelineRunner
from mmstream.processes import safe_environment
from mmstream.reading.step import Job
from mmstream.storage import open_store
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import captioned, jpeg, write_corpus, write_shard
from tests.helpers.wait import wait_until

Sample = dict[str, Any]

COUNTS = [9, 8, 7]


def chat_sample(number: int) -> dict[str, bytes]:
    """A conversation about zero to two pictures of different sizes."""
    names = [f"{i}.jpg" for i in range(number % 3)]
    pictures = {name: jpeg(number, (40 + 20 * number, 90)) for name in names}
    parts: list[dict[str, str]] = [{"type": "image", "field": name} for name in names]
    parts.append({"type": "text", "text": "what? " * (number % 5)})
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": f"answer {number}"},
    ]
    return {**pictures, "json": json.dumps({"messages": messages}).encode()}


def chat_decode(**settings: Any) -> mm.Decode:
    text = mm.TextDecoder(
        byte_tokenizer(chat=True), **({"image_length": mm.qwen_vl_length()} | settings)
    )
    return mm.Decode(image=mm.ImageDecoder(resize="max_pixels", multiple_of=28), text=text)


CAPTIONS = mm.Decode(
    image=mm.ImageDecoder(size=32), text=mm.TextDecoder(byte_tokenizer(), max_length=20)
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("chats"), COUNTS, chat_sample, checksums=True)


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def test_lengths_are_those_of_the_samples_that_training_gets(chats: str) -> None:
    decode = chat_decode(max_length=4096)
    measure = mm.measure(chats, decode=decode, name="lengths")
    dataset = mm.open_dataset(chats)
    pipeline = mm.Pipeline(dataset, global_batch_size=24, decode=decode, shuffle=False)
    with closing(PipelineRunner(pipeline)) as runner:
        samples = runner.decoded(Job(0, 0, 0, 24)).samples
    for row, sample in enumerate(samples):
        image = sample["image"]
        images = image if isinstance(image, list) else [image]
        patches = [each.shape[1] // 14 * (each.shape[2] // 14) for each in images]
        expected = {
            "num_tokens": len(sample["input_ids"]),
            "num_label_tokens": int((sample["labels"][1:] != -100).sum()),
            "num_documents": 1,
            "num_images": len(images),
            "patches": sum(patches),
            "squared_patches": sum(each * each for each in patches),
            "num_seconds": 0,
        }
        assert {name: int(measure.column(name)[row]) for name in expected} == expected


def test_no_text_is_cut(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [7])
    measure = mm.measure(folder, decode=CAPTIONS)
    lengths = [len(captioned(number)["txt"]) + 2 for number in range(7)]  # with <bos> and <eos>
    assert measure.column("num_tokens").tolist() == lengths
    assert max(lengths) > 20
    assert open_measure(measure_folder(folder, "default")).digest == measure.digest


def test_no_pixel_is_decoded(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm.ImageDecoder, "decode", None)
    assert mm.measure(chats, decode=chat_decode(), name="pixels").num_samples == sum(COUNTS)


def test_any_number_of_processes_gives_the_same_bytes(chats: str) -> None:
    folders = [measure_folder(chats, f"processes{number}") for number in (1, 2)]
    for number, folder in enumerate(folders, start=1):
        mm.measure(chats, decode=chat_decode(), folder=folder, num_workers=number)
    first, second = map(files_of, folders)
    assert first == second
    assert "measure.json" in first


def test_samples_that_cannot_be_used_are_listed_with_the_reason(tmp_path: Path) -> None:
    def fields(number: int) -> dict[str, bytes]:
        if number == 2:
            return {"txt": b"\xff\xfe"}
        return {"txt": b"" if number == 4 else b"a text"}

    def odd_left_out(sample: Sample) -> Sample:
        if int(sample["__key__"]) == 5:
            raise mm.SkipSample("not wanted")
        return sample

    folder = write_corpus(tmp_path, [3, 3], fields)
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))
    measure = mm.measure(folder, decode=decode, before=(odd_left_out,), name="bad")
    assert measure.column("num_tokens").tolist() == [8, 8, -1, 8, -1, -1]
    path = Path(measure_folder(folder, "bad"), "unusable.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["shard"], line["index"]) for line in lines] == [
        ("shard-000000.tar", 2),
        ("shard-000001.tar", 1),
        ("shard-000001.tar", 2),
    ]
    assert "shard-000000.tar[2] 000002.txt" in lines[0]["reason"]
    assert "empty text" in lines[1]["reason"]
    assert lines[2]["reason"].startswith("left out:")


def test_damaged_bytes_are_read_again(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [4], checksums=True)
    path = tmp_path / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"caption 2")] ^= 1
    path.write_bytes(data)
    measure = mm.measure(folder, decode=CAPTIONS)
    assert (measure.column("num_tokens") < 0).tolist() == [False, False, True, False]


def test_finished_shards_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    measured: list[int] = []
    real = module._shard_lengths

    def counted(work: Any, shard: int, **settings: Any) -> Any:
        if "advance" in settings:  # not the estimate
            measured.append(shard)
            if len(measured) == 3:
                raise KeyboardInterrupt
        return real(work, shard, **settings)

    monkeypatch.setattr(module, "_shard_lengths", counted)
    with pytest.raises(KeyboardInterrupt):
        mm.measure(folder, decode=CAPTIONS, num_workers=1)
    measure = mm.measure(folder, decode=CAPTIONS, num_workers=1)
    assert measured == [0, 1, 2, 2]
    assert measure.num_samples == sum(COUNTS)
    assert not Path(measure_folder(folder, "default"), "unfinished").exists()


SLOW = """
import sys, time
import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

def slow(sample):
    if sample["__key__"] > "000011":
        time.sleep(60)
    return sample

calls_of_first_shard = []

def fast(sample):
    if sample["__key__"] < "000009":
        calls_of_first_shard.append(sample)
    return sample

slow.__qualname__ = fast.__qualname__ = "same"
mm.measure(
    sys.argv[1],
    decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())),
    before=(slow if sys.argv[2] == "slow" else fast,),
    num_workers=1,
)
assert len(calls_of_first_shard) <= 9, "not only the probes"
"""


def test_a_killed_call_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus", COUNTS)
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    environment = os.environ | safe_environment()
    command = [sys.executable, str(script), folder]
    process = subprocess.Popen([*command, "slow"], env=environment)
    unfinished = Path(measure_folder(folder, "default"), "unfinished")
    # Whole files have no dot in front.
    wait_until(lambda: list(unfinished.glob("[!.]*")) or process.poll() is not None)
    assert list(unfinished.glob("[!.]*"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    (unfinished / ".half.1234-abcd.tmp").write_bytes(b"half")
    subprocess.run([*command, "fast"], env=environment, check=True)
    assert open_measure(measure_folder(folder, "default")).num_samples == sum(COUNTS)
    assert not unfinished.exists()


def test_appended_shards_are_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    before = mm.measure(folder, decode=CAPTIONS)
    shard = write_shard(folder, "shard-000003.tar", [("9", captioned(9))])
    shards = (*Manifest.read(open_store(folder)).shards, shard)
    open_store(folder).write(MANIFEST_NAME, Manifest(shards).to_bytes())
    measured: list[int] = []
    real = module._shard_lengths

    def counted(work: Any, shard: int, **settings: Any) -> Any:
        measured.append(shard)
        return real(work, shard, **settings)

    monkeypatch.setattr(module, "_shard_lengths", counted)
    after = mm.measure(folder, decode=CAPTIONS)
    assert set(measured) == {3}
    old = before.column("num_tokens")
    assert np.array_equal(after.column("num_tokens")[: old.size], old)
    assert after.num_samples == sum(COUNTS) + 1


# -- lengths that depend on draws -----------------------------------------------------------------


def drawn(sample: Sample) -> Sample:
    length = int(mm.sample_rng(sample, "length").integers(1, 50))
    return {**sample, "txt": "x" * length}


def test_lengths_that_depend_on_draws_are_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    with pytest.raises(ConfigError, match=r"shard-000000\.tar\[0\] 000000: its length depends on"):
        mm.measure(folder, decode=CAPTIONS, before=(drawn,))


def test_the_longest_of_the_epochs_counts(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    measure = mm.measure(folder, decode=CAPTIONS, before=(drawn,), seed=5, epochs=range(3))
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))
    lengths = []
    for epoch in range(3):
        pipeline = mm.Pipeline(
            mm.open_dataset(folder),
            global_batch_size=24,
            seed=5,
            decode=decode,
            before=(drawn,),
            shuffle=False,
        )
        with closing(PipelineRunner(pipeline)) as runner:
            samples = runner.decoded(Job(epoch, 0, 0, 24)).samples
        lengths.append([len(sample["input_ids"]) for sample in samples])
    assert measure.column("num_tokens").tolist() == np.max(lengths, axis=0).tolist()


def test_room_is_added_to_each_length(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    plain = mm.measure(folder, decode=CAPTIONS, name="plain")
    roomy = mm.measure(folder, decode=CAPTIONS, name="roomy", room=5)
    assert (roomy.column("num_tokens") - plain.column("num_tokens") == 5).all()
    assert mm.measure(folder, decode=CAPTIONS, before=(drawn,), room=50).num_samples == 24


# -- facts ----------------------------------------------------------------------------------------


def test_facts_give_the_same_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_corpus(tmp_path, COUNTS, chat_sample, checksums=True)
    mm.measure(folder, decode=chat_decode(), name="whole")
    write_facts(mm.open_dataset(folder))
    monkeypatch.setattr(module, "shard_samples", None)  # no shard is read whole
    mm.measure(folder, decode=chat_decode(), name="facts")
    assert files_of(measure_folder(folder, "facts")) == files_of(measure_folder(folder, "whole"))


def test_a_function_that_looks_at_pictures_gets_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_size(sample: Sample) -> Sample:
        return {**sample, "txt": "x" * (len(sample["jpg"]) % 97 + 1)}

    folder = write_corpus(tmp_path, COUNTS)
    plain = mm.measure(folder, decode=CAPTIONS, before=(with_size,), name="plain")
    write_facts(mm.open_dataset(folder))
    with caplog.at_level("WARNING"):
        measure = mm.measure(folder, decode=CAPTIONS, before=(with_size,), name="facts")
    assert measure.column("num_tokens").tolist() == plain.column("num_tokens").tolist()
    assert "tokens by its facts, and " in caplog.text


def test_facts_that_do_not_fit_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    dataset = mm.open_dataset(folder)
    write_facts(dataset)
    first, second = (tmp_path / facts_name(dataset.name_of(shard)) for shard in range(2))
    first.write_bytes(second.read_bytes())
    with caplog.at_level("WARNING"):
        measure = mm.measure(folder, decode=CAPTIONS)
    assert (measure.column("num_tokens") > 0).all()
    assert "shard-000000.tar.facts: damaged, or of another shard" in caplog.text
