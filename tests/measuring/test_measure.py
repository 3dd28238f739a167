"""A measure and a plan: the lengths of training, for any number of processes, and restartable."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.errors import ConfigError, ManifestError
from mmstream.measuring import plan as module
from mmstream.packing.plan import open_plan
from mmstream.packing.planner import Measure
from mmstream.pipeline import PipelineRunner
from mmstream.processes.workers import safe_environment
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
        byte_tokenizer(chat=True),
        **({"image_length": mm.families.qwen_vl.image_length()} | settings),
    )
    return mm.Decode(image=mm.ImageDecoder(resize="max_pixels", multiple_of=28), text=text)


CAPTIONS = mm.Decode(
    image=mm.ImageDecoder(size=32), text=mm.TextDecoder(byte_tokenizer(), max_length=20)
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("chats"), COUNTS, chat_sample, checksums=True)


def measure(url: str, decode: mm.Decode = CAPTIONS, **settings: Any) -> Measure:
    """Return the lengths of all samples of a corpus."""
    names = {"before", "seed"} & settings.keys()
    pipeline = mm.Pipeline(
        mm.open_dataset(url),
        global_batch_size=1,
        decode=decode,
        **{name: settings.pop(name) for name in names},
    )
    lengths: Measure = mm.plan(pipeline, measure_only=True, **settings)
    return lengths


def files_of(folder: Path | str) -> dict[str, bytes]:
    """Return the files of the one measure in a folder."""
    (measured,) = Path(folder).glob("mmstream.measure.*")
    return {path.name: path.read_bytes() for path in sorted(measured.iterdir())}


def samples_of(folder: str, decode: mm.Decode, epoch: int = 0, **settings: Any) -> list[Sample]:
    """Return what training gets of a corpus of 24 samples in an epoch, in the order of the tars."""
    pipeline = mm.Pipeline(
        mm.open_dataset(folder), global_batch_size=24, decode=decode, shuffle=False, **settings
    )
    with closing(PipelineRunner(pipeline)) as runner:
        return runner.decoded(Job(epoch, 0, 0, 24)).samples


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that are measured from now on."""
    shards: list[int] = []
    real = module._measure_shard

    def noted(work: Any, store: Any, shard: int, *more: Any) -> None:
        shards.append(shard)
        real(work, store, shard, *more)

    monkeypatch.setattr(module, "_measure_shard", noted)
    return shards


def test_lengths_are_those_of_the_samples_that_training_gets(chats: str) -> None:
    decode = chat_decode(max_length=4096)
    lengths = measure(chats, decode)
    for row, sample in enumerate(samples_of(chats, decode)):
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
        assert {name: int(lengths.column(name)[row]) for name in expected} == expected


def test_no_text_is_cut(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [7])
    lengths = [len(captioned(number)["txt"]) + 2 for number in range(7)]  # with <bos> and <eos>
    assert measure(folder).column("num_tokens").tolist() == lengths
    assert max(lengths) > 20


def test_no_pixel_is_decoded(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm.ImageDecoder, "decode", None)
    assert measure(chats, chat_decode(max_bytes=9999)).num_samples == sum(COUNTS)


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bytes(chats: str, tmp_path: Path) -> None:
    for number in (1, 2):
        measure(chats, chat_decode(), folder=tmp_path / str(number), num_workers=number)
    first, second = (files_of(tmp_path / str(number)) for number in (1, 2))
    assert first == second
    assert len(first) == len(COUNTS)


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
    lengths = measure(folder, decode, before=(odd_left_out,))
    assert lengths.column("num_tokens").tolist() == [8, 8, -1, 8, -1, -1]
    lines = [json.loads(line) for line in files_of(folder)["unusable.jsonl"].splitlines()]
    found = [(line["shard"], line["index"], line["reason"]) for line in lines]
    for (shard, index, reason), expected in zip(
        found,
        [
            ("shard-000000.tar", 2, "shard-000000.tar[2] 000002.txt"),
            ("shard-000001.tar", 1, "empty text"),
            ("shard-000001.tar", 2, "left out:"),
        ],
        strict=True,
    ):
        assert (shard, index) == expected[:2]
        assert expected[2] in reason


def test_damaged_bytes_are_read_again(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [4], checksums=True)
    path = tmp_path / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"caption 2")] ^= 1
    path.write_bytes(data)
    lengths = measure(folder)
    assert (lengths.column("num_tokens") < 0).tolist() == [False, False, True, False]


def test_a_damaged_file_of_lengths_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    whole = measure(folder).column("num_tokens").tolist()
    (measures,) = Path(folder).glob("mmstream.measure.*")
    first, second, _ = sorted(measures.iterdir())
    first.write_bytes(first.read_bytes()[:-8])
    second.write_bytes(b"?" + second.read_bytes()[1:])
    measured.clear()
    assert measure(folder).column("num_tokens").tolist() == whole
    assert len(measured) == 2


def test_lengths_of_a_function_that_has_changed_are_measured_anew(
    tmp_path: Path, measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_corpus(tmp_path, COUNTS)

    def function(added: bytes) -> Any:
        def spoken(sample: Sample) -> Sample:
            return {**sample, "txt": sample["txt"] + added}

        return spoken

    before = measure(folder, before=(function(b""),)).column("num_tokens")
    measured.clear()
    after = measure(folder, before=(function(b"!!"),)).column("num_tokens")
    assert measured == [0, 1, 2]
    assert (after - before).tolist() == [2] * sum(COUNTS)
    assert re.search(r"has \d+ tokens, and \d+ before: all shards are measured again", caplog.text)


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
pipeline = mm.Pipeline(
    mm.open_dataset(sys.argv[1]),
    global_batch_size=1,
    decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())),
    before=(slow if sys.argv[2] == "slow" else fast,),
)
plan = mm.plan(pipeline, 512, num_workers=1)
assert plan.members.size == 24
assert len(calls_of_first_shard) <= 9, "more than the samples that are counted again"
"""


@pytest.mark.slow
def test_a_killed_call_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_corpus(tmp_path / "corpus", COUNTS)
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    environment = os.environ | safe_environment()
    process = subprocess.Popen([sys.executable, str(script), folder, "slow"], env=environment)
    measures = "mmstream.measure.*/[!.]*"  # whole files have no dot in front

    def done() -> list[Path]:
        return list(Path(folder).glob(measures))

    wait_until(lambda: done() or process.poll() is not None)
    assert done()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (done()[0].parent / ".half.1234-abcd.tmp").write_bytes(b"half")
    monkeypatch.setattr(sys, "argv", [str(script), folder, "fast"])
    runpy.run_path(str(script), run_name="__main__")
    assert len(done()) == len(COUNTS)


def test_appended_shards_are_measured_alone(tmp_path: Path, measured: list[int]) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    before = measure(folder)
    shard = write_shard(folder, "shard-000003.tar", [("9", captioned(9))])
    shards = (*Manifest.read(open_store(folder)).shards, shard)
    open_store(folder).write(MANIFEST_NAME, Manifest(shards).to_bytes())
    measured.clear()
    after = measure(folder)
    assert measured == [3]
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
        measure(folder, before=(drawn,))


def test_the_longest_of_the_epochs_counts(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    longest = measure(folder, before=(drawn,), seed=5, epochs=range(3))
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))
    lengths = [
        [
            len(sample["input_ids"])
            for sample in samples_of(folder, decode, epoch, seed=5, before=(drawn,))
        ]
        for epoch in range(3)
    ]
    assert longest.column("num_tokens").tolist() == np.max(lengths, axis=0).tolist()


def test_room_is_added_to_each_length(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, COUNTS)
    plain, roomy = measure(folder), measure(folder, room=5)
    assert (roomy.column("num_tokens") - plain.column("num_tokens") == 5).all()
    assert measure(folder, before=(drawn,), room=50).num_samples == 24


# -- plans -----------------------------------------------------------------------------------------

NUM_CAPTIONS = [20, 30]
DECODE = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=4096))


def fields(number: int) -> dict[str, bytes]:
    """A text of 5 to 54 tokens, with the two that begin and end it."""
    return {"txt": b"x" * (number % 50 + 3)}


def write(folder: Path, counts: list[int]) -> Path:
    (folder / "mmstream.json").unlink(missing_ok=True)
    write_corpus(folder, counts, fields)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", NUM_CAPTIONS)


def pipeline_of(corpus: Path, **settings: Any) -> mm.Pipeline:
    return mm.Pipeline(
        mm.open_dataset(corpus), **({"global_batch_size": 2, "decode": DECODE} | settings)
    )


def test_a_plan_lies_beside_the_index_or_where_it_is_wanted(corpus: Path, tmp_path: Path) -> None:
    plan = mm.plan(pipeline_of(corpus), 128, name="mine")
    assert plan.url == str(corpus / "mmstream.plan.mine")
    assert plan.members.size == 50
    assert open_plan(str(plan.url)).digest == plan.digest
    other = mm.plan(pipeline_of(corpus), 128, name="mine", folder=tmp_path / "other")
    assert other.url == str(tmp_path / "other" / "mmstream.plan.mine")
    assert other.digest == plan.digest
    assert {path.name.split(".")[1] for path in (tmp_path / "other").iterdir()} == {
        "plan",
        "measure",
    }


def test_limits_are_those_of_the_pipeline_or_given(corpus: Path) -> None:
    packs = pipeline_of(corpus, batching=mm.Pack(64))
    assert mm.plan(packs).settings == mm.PackLimits(64)
    assert mm.plan(packs, 128).settings == mm.PackLimits(128)
    limits = mm.PackLimits(128, max_documents=2)
    assert mm.plan(packs, limits).settings == limits
    assert mm.plan(replace(packs, batching=mm.Pack(128, limits=limits))).settings == limits
    with pytest.raises(mm.ConfigError, match=r"how many tokens has a pack\? Give mm\.plan"):
        mm.plan(pipeline_of(corpus))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"epochs": []}, r"epochs=\[\]: give numbers from 0 up"),
        ({"epochs": [-1]}, r"epochs=\[-1\]: give numbers from 0 up"),
        ({"room": -1}, "room"),
        ({"patch_size": 0}, "patch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"name": "a/b"}, "cannot stand in the name of a file"),
    ],
)
def test_impossible_arguments_are_refused(
    corpus: Path, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(mm.ConfigError, match=reason):
        mm.plan(pipeline_of(corpus), 128, **arguments)
    assert not list(corpus.glob("mmstream.plan.*"))


def test_what_cannot_be_planned_is_refused(corpus: Path) -> None:
    with pytest.raises(mm.ConfigError, match=r"pipeline=.*: give the mm"):
        mm.plan(str(corpus), 128)  # type: ignore[arg-type]
    with pytest.raises(mm.ConfigError, match="plan: no decoder makes the tokens of texts"):
        mm.plan(pipeline_of(corpus, decode=None), 128)


def test_a_plan_without_packs_is_refused_and_not_written(corpus: Path) -> None:
    with pytest.raises(mm.ConfigError, match=r"packs of 4 tokens.*: 50 too long; .* has 5 tokens"):
        mm.plan(pipeline_of(corpus), 4)
    limits = mm.PackLimits(128, where="num_tokens > 1000")
    with pytest.raises(mm.ConfigError, match=r"no plan was written: 50 condition$"):
        mm.plan(pipeline_of(corpus), limits)
    assert not list(corpus.glob("mmstream.plan.*"))


def test_a_plan_of_other_settings_is_replaced_only_if_asked(corpus: Path) -> None:
    pipeline = pipeline_of(corpus)
    mm.plan(pipeline, 128, name="mine")
    with pytest.raises(mm.ConfigError, match="a plan of other settings"):
        mm.plan(pipeline, 256, name="mine")
    assert mm.plan(pipeline, 256, name="mine", overwrite=True).settings.max_tokens == 256


def test_overwrite_cures_a_plan_that_is_refused(tmp_path: Path) -> None:
    """A sample that a plan counts again, and whose lengths alone do not, has another text now."""
    write(tmp_path, [150])
    changed: set[str] = set()
    counted: list[str] = []

    def lengthened(sample: dict[str, Any]) -> dict[str, Any]:
        counted.append(sample["__key__"])
        return sample | {"txt": sample["txt"] + b"!" * (sample["__key__"] in changed)}

    packs = pipeline_of(tmp_path, batching=mm.Pack(64), before=(lengthened,))
    plan = mm.plan(packs)
    counted.clear()
    mm.plan(packs, measure_only=True)
    of_lengths = set(counted)
    counted.clear()
    packs.order  # noqa: B018
    changed.add(next(key for key in counted if key not in of_lengths))
    lengths = {path: path.read_bytes() for path in tmp_path.glob("mmstream.measure.*/*")}
    again = replace(packs)
    refused = "its lengths are not those of this pipeline: shard-"
    with pytest.raises(mm.ConfigError, match=refused):
        again.order  # noqa: B018
    with pytest.raises(mm.ConfigError, match=rf"{refused}.*; give another name, or replace it"):
        mm.plan(again)
    assert lengths == {path: path.read_bytes() for path in lengths}
    assert mm.plan(again, overwrite=True).url == plan.url
    assert replace(again).order.plan.num_units  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ['{"version": 1}', "{"])
def test_overwrite_replaces_a_plan_that_cannot_be_read(corpus: Path, content: str) -> None:
    plan = mm.plan(pipeline_of(corpus), 128)
    Path(str(plan.url), "plan.json").write_text(content)
    with pytest.raises(ManifestError, match="run `mmstream plan` with --overwrite"):
        mm.plan(pipeline_of(corpus), 128)
    assert mm.plan(pipeline_of(corpus), 128, overwrite=True).digest == plan.digest


def test_appended_shards_form_new_groups(tmp_path: Path) -> None:
    write(tmp_path, NUM_CAPTIONS[:1])
    before = mm.plan(pipeline_of(tmp_path), 128)
    write(tmp_path, NUM_CAPTIONS)
    after = mm.plan(pipeline_of(tmp_path), 128)
    assert after.url == before.url
    assert after.num_groups == 2
    assert after.group_digests[:1] == before.group_digests
    assert mm.plan(pipeline_of(tmp_path), 128, overwrite=True).num_groups == 1


def test_samples_on_the_bad_list_are_left_out(corpus: Path) -> None:
    write_bad(mm.open_dataset(corpus), [[1, 4]])
    plan = mm.plan(pipeline_of(corpus), 128)
    assert plan.left_out.tolist() == [[24, 1, 29]]
    assert plan.members.size == 49


def test_each_source_of_a_mixture_is_planned_by_itself(tmp_path: Path) -> None:
    sources = {
        name: (mm.open_dataset(write(tmp_path / name, counts)), 1)
        for name, counts in {"a": [20], "b": [30, 10]}.items()
    }
    pipeline = mm.Pipeline(
        mm.Mixture(sources, epoch_steps=8),
        global_batch_size=2,
        decode=DECODE,
        batching=mm.Pack(64, weights_of="samples"),
    )
    plans = mm.plan(pipeline)
    assert {name: plan.members.size for name, plan in plans.items()} == {"a": 20, "b": 40}
    assert pipeline.order.plan.plans["b"].url == plans["b"].url  # type: ignore[union-attr]
    again = replace(pipeline, batching=mm.Pack(64, weights_of="samples", plan=plans))
    assert again.order.identity() == pipeline.order.identity()
    lengths = mm.plan(pipeline, measure_only=True)
    assert [measure.num_samples for measure in lengths.values()] == [20, 40]
