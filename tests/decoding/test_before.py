"""Functions before decoding: on raw samples, exact after a resume, errors of samples.

On every topology: test_user_functions.py.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import captioned, write_corpus

Sample = dict[str, Any]


def with_captions(number: int) -> dict[str, bytes]:
    captions = [f"caption {i} of {number}" for i in range(5)]
    row = json.dumps({"id": number, "captions": captions}).encode()
    return captioned(number) | {"json": row, "cls": str(number % 10).encode()}


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("captions"), [9, 8, 7], with_captions)


def caption_of_epoch(sample: Sample) -> str:
    choices: list[str] = sample["json"]["captions"]
    return choices[mm.sample_rng(sample, "caption").integers(len(choices))]


def even_only(sample: Sample) -> Sample:
    if sample["json"]["id"] % 2:
        raise mm.SkipSample("odd")
    return sample


def make(source: str, *before: Callable[[Sample], Sample], **settings: Any) -> mm.Pipeline:
    decode = mm.Decode(
        {"jpg": mm.ImageDecoder(size=16, crop="random"), "cls": int},
        text=mm.TextDecoder(byte_tokenizer()),
    )
    defaults = {"global_batch_size": 8, "seed": 1, "decode": decode}
    return mm.Pipeline(mm.open_dataset(source), before=before, **(defaults | settings))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_large_picture_goes_when_a_function_has_made_it_small(
    captions: str, num_threads: int
) -> None:
    large: list[weakref.ref[torch.Tensor]] = []
    still_held = []

    def shrunk(sample: Sample) -> Sample:
        still_held.append(sum(picture() is not None for picture in large))
        large.append(weakref.ref(sample["image"]))
        return sample | {"image": sample["image"][:, :1, :1].clone()}

    decode = mm.Decode(image=mm.ImageDecoder())
    pipeline = make(captions, decode=decode, transforms=(shrunk,), global_batch_size=24)
    with closing(mm.Loader(pipeline, num_threads=num_threads)) as loader:
        assert len(list(loader)) == 1
    # The row before, and what each helper thread has handed over and not yet let go.
    assert max(still_held) <= num_threads


def test_a_view_of_memory_that_is_no_picture_stays_as_it_is() -> None:
    sample = {"__key__": "k", "__url__": "x.tar", "cls": memoryview(b"7")}
    assert decode_sample(sample, mm.Decode({"cls": int}))["cls"] is sample["cls"]


def test_texts_are_tokenized_after_the_functions(captions: str) -> None:
    def shout(sample: Sample) -> Sample:
        return {**sample, "txt": b"AAAA", "extra": b"x"}

    tokenizer = byte_tokenizer()
    for taken in make(captions, shout).take(3):
        assert (taken["txt"], taken["extra"]) == ("AAAA", b"x")
        assert tokenizer.decode(taken["input_ids"], skip_special_tokens=True) == "AAAA"


def test_a_filter_costs_no_picture(captions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    real = mm.ImageDecoder.decode_planned

    def counted(self: mm.ImageDecoder, data: bytes, *args: Any) -> Any:
        decoded.append(data)
        return real(self, data, *args)

    monkeypatch.setattr(mm.ImageDecoder, "decode_planned", counted)
    loader = mm.Loader(make(captions, even_only))
    for batch in loader:
        assert all(int(key) % 2 == 0 for key in batch["__key__"])
    assert loader.stats.num_skipped > 0
    assert len(decoded) == loader.stats.num_samples


def renamed(sample: Sample) -> Sample:
    sample["label"] = {"0": 5}.get(sample.pop("cls").decode(), 6)
    sample["json"].clear()
    return sample


def test_a_function_may_change_names_and_the_sample_itself(captions: str) -> None:
    decode = mm.Decode({"label": int})
    taken = make(captions, renamed, decode=decode).take(3)
    assert {sample["label"] for sample in taken} <= {5, 6}
    assert all("cls" not in sample and sample["json"] == {} for sample in taken)


def fails_on_seven(sample: Sample) -> Sample:
    if sample["json"]["id"] == 7:
        raise KeyError("no such class")
    return sample


def has_a_bug(sample: Sample) -> Sample:
    return sample.no_such_method()  # type: ignore[attr-defined, no-any-return]


def test_errors_are_errors_of_the_sample(captions: str) -> None:
    loader = mm.Loader(make(captions, fails_on_seven, drop_last=False))
    records = [record for batch in loader for record in batch["__lineage__"].bad]
    assert [record.kind for record in records] == ["SampleError"]
    assert "fails_on_seven: KeyError: 'no such class'" in records[0].reason
    with pytest.raises(AttributeError) as caught:
        list(mm.Loader(make(captions, has_a_bug)))
    assert re.fullmatch(r"has_a_bug was called with .*\.tar\[\d+\] \d+", caught.value.__notes__[0])


def test_damaged_json_is_bad_before_any_function_sees_it(tmp_path: Path) -> None:
    source = write_corpus(tmp_path, [4], lambda n: captioned(n) | {"json": b"{"})
    pipeline = make(source, even_only, global_batch_size=2, decode=None)
    with pytest.raises(
        mm.errors.BadSampleLimitError, match=r"no row has a good sample.*json: JSON"
    ):
        list(mm.Loader(pipeline))


def question(sample: Sample) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": "Which number?"},
        {"role": "assistant", "content": str(sample["json"]["id"])},
    ]


def test_a_text_comes_from_a_path_or_a_function(captions: str) -> None:
    tokenizer = byte_tokenizer(chat=True)
    for field, part in (
        ("json.captions.2", "caption 2 of"),
        (caption_of_epoch, "caption "),
        (question, "Which number?"),
    ):
        decode = mm.Decode(text=mm.TextDecoder(tokenizer, field=field))
        for taken in make(captions, decode=decode).take(4):
            assert part in tokenizer.decode(taken["input_ids"])


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (
            "json.caption",
            r"json\.caption: nothing at json\.caption: json holds the names id, captions",
        ),
        ("json.captions", r'a list of 5 texts.*field="json\.captions\.0"'),
        ("json.captions.9", r"json\.captions holds a list of 5"),
        ("json.id", "expected text, not int"),
        ("caption", "no field caption; the sample has jpg, txt, json, cls"),
        (question, "messages, and the tokenizer has no chat template"),
        (lambda sample: sample["json"]["x"], "<lambda>: KeyError: 'x'"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_there(
    captions: str, field: Any, reason: str
) -> None:
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), field=field))
    with pytest.raises(mm.errors.DecodeError, match=reason):
        decode_sample(mm.open_dataset(captions)[0], decode)


class Processor:
    image_processor = tokenizer = None


WRONG: dict[str, Callable[[Any], object]] = {
    r"write text=mm\.TextDecoder\(tokenizer, max_length": lambda _: mm.Decode(
        text=byte_tokenizer()
    ),
    r"TextDecoder\(processor\.tokenizer": lambda _: mm.Decode(text=Processor()),
    r"ImageDecoder\.from_processor\(processor\)": lambda _: mm.Decode(image=Processor()),
    r"pass processor\.tokenizer": lambda _: mm.TextDecoder(Processor()),
    r"before=.*: pass a tuple of functions, \(fn,\)": lambda plan: plan(before=even_only),
    r"before=\(3,\): pass a tuple of functions": lambda plan: plan(before=(3,)),
    r"transforms=\(function,\), or to before=\(function,\)": lambda plan: plan(decode=even_only),
    r"pass mm\.Decode\(\{\.\.\.\}\)": lambda plan: plan(decode={"cls": int}),
    r"mm\.Decode\(image=decoder\)": lambda plan: plan(decode=mm.ImageDecoder()),
    r"mm\.Decode\(text=decoder\)": lambda plan: plan(decode=mm.TextDecoder(byte_tokenizer())),
    "not the class": lambda plan: plan(decode=mm.Decode),
    r"pass mm\.Decode\(image": lambda plan: plan(decode="pil"),
    r"Loader has no batch_size=.*Pipeline\(dataset, global_batch_size": lambda plan: mm.Loader(
        plan(), batch_size=2
    ),
    r"mm\.Loader\(mm\.Pipeline\(dataset, global_batch": lambda plan: mm.Loader(plan().dataset),
    r"to_device\(mm\.Loader\(pipeline\)": lambda plan: mm.to_device(plan(), "cpu"),
    r"mm\.Loader\(mm\.Pipeline\(dataset": lambda plan: mm.to_device(plan().dataset, "cpu"),
    r"got list: pass an mm\.Loader": lambda _: mm.to_device([1], "cpu"),
}
"""Part of the message -> a call, which may make a pipeline."""


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_place_or_an_argument_of_other_libraries_says_what_to_write(
    message: str, captions: str
) -> None:
    plan = partial(mm.Pipeline, mm.open_dataset(captions), global_batch_size=2)
    with pytest.raises(mm.ConfigError, match=message):
        WRONG[message](plan)


def test_batches_hold_what_decoders_by_field_make(captions: str) -> None:
    decode = mm.Decode(
        {
            "jpg": mm.ImageDecoder(size=16, crop="random"),
            "boxes": mm.Boxes(boxes_of),
            "cls": ...,
            "txt": ...,
        },
        same_geometry=("jpg", "boxes"),
    )
    pipeline = make(captions, decode=decode)
    with closing(mm.Loader(pipeline, num_workers=1, multiprocessing_context="fork")) as loader:
        batch = next(iter(mm.to_device(loader, "cpu", dtype=torch.float32)))
    assert batch["jpg"].shape == (8, 3, 16, 16)
    assert batch["jpg"].dtype == torch.float32
    assert batch["jpg"].is_contiguous(memory_format=torch.channels_last)
    assert (batch["cls"].dtype, batch["cls"].shape) == (torch.int64, (8,))
    assert [boxes.shape for boxes in batch["boxes"]] == [(1, 4)] * 8  # a list, alike or not
    assert all(isinstance(text, str) for text in batch["txt"])
    assert "image" not in batch


def boxes_of(sample: Sample) -> list[list[int]]:
    return [[0, 0, 10, sample["json"]["id"] % 20]]
