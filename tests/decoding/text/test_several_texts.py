"""Samples with several texts: captions of one picture, and preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import CHATML, assistant, byte_chat, tokenizer, user
from tests.helpers.corpora import write_corpus


def test_each_caption_is_a_document() -> None:
    captions = ["a cat", "a black cat", "cats"]
    decoder = mm.TextDecoder(byte_tokenizer(), field="json.captions", texts="all")
    tokens = decoder({"json": {"captions": captions}})
    one = mm.TextDecoder(byte_tokenizer())
    for number, caption in enumerate(captions):
        for name, values in one({"txt": caption}).items():
            assert np.array_equal(tokens[name][number], values)


def test_a_preference_is_two_documents_of_which_the_answers_are_trained() -> None:
    fast = byte_chat(CHATML)
    row = {
        "messages": [user("hi"), assistant("hello"), user("what is it?")],
        "chosen": [assistant("a cat")],
        "rejected": [assistant("a dog")],
    }
    tokens = mm.TextDecoder(fast, texts="all")({"json": row})
    texts = [fast.decode(labels[labels != -100]) for labels in tokens["labels"]]
    for text, answer, other in zip(texts, ("a cat", "a dog"), ("a dog", "a cat"), strict=True):
        assert answer in text
        assert other not in text
        assert "hello" not in text
    assert all("hello" in fast.decode(ids) for ids in tokens["input_ids"])


@pytest.mark.parametrize(
    "sample", [{"json": {"messages": [user("hi"), assistant("good")]}}, {"txt": b"a cat"}]
)
def test_other_samples_are_one_document(sample: dict[str, Any]) -> None:
    decoder = mm.TextDecoder(byte_chat(CHATML), texts="all")
    assert len(decoder(sample)["input_ids"]) == 1


def test_texts_without_weights_count_fully_beside_others() -> None:
    fast = byte_chat(CHATML)
    row = {
        "messages": [user("hi")],
        "chosen": [{**assistant("a cat"), "weight": 2}],
        "rejected": [assistant("a dog")],
    }
    tokens = mm.TextDecoder(fast, texts="all")({"json": row})
    for weights, labels, weight in zip(tokens["label_weights"], tokens["labels"], (2, 1)):
        assert weights.dtype == np.float32
        assert (weights == np.where(labels == -100, 0, weight)).all()


@pytest.mark.parametrize(
    ("captions", "reason"),
    [([], "empty list of texts"), (["a", ""], "empty text"), (["a", 3], "expected text, not int")],
    ids=["none", "empty", "number"],
)
def test_one_bad_text_makes_its_sample_bad(captions: list[Any], reason: str) -> None:
    decoder = mm.TextDecoder(byte_tokenizer(), field="json.captions", texts="all")
    good, bad = decoder.decode_all([{"json": {"captions": c}} for c in (["a", "b"], captions)])
    assert isinstance(bad, mm.errors.DecodeError)
    assert reason in str(bad)
    assert not isinstance(good, mm.SampleError)
    assert len(good.tokens["input_ids"]) == 2


def test_a_longest_text_that_is_cut_is_counted() -> None:
    decoder = mm.TextDecoder(byte_tokenizer(), 4, field="json.captions", texts="all")
    (text,) = decoder.decode_all([{"json": {"captions": ["a", "a long one"]}}])
    assert not isinstance(text, mm.SampleError)
    assert text.num_tokens == 12
    assert [len(ids) for ids in text.tokens["input_ids"]] == [3, 4]


def two_texts(sample: dict[str, Any]) -> list[str]:
    return [sample["txt"], f"again {sample['txt']}"]


def pipeline_of(folder: Path, text: mm.TextDecoder, batching: mm.Flat | None) -> mm.Pipeline:
    """Batches of two samples with a picture and a text."""
    return mm.Pipeline(
        mm.open_dataset(write_corpus(folder, [4])),
        global_batch_size=2,
        decode=mm.Decode(image=mm.ImageDecoder(size=16), text=text),
        batching=batching,
    )


def test_a_flat_batch_has_the_documents_of_a_sample_as_neighbours(tmp_path: Path) -> None:
    text = mm.TextDecoder(byte_tokenizer(), field=two_texts, texts="all")
    batch = next(iter(mm.Loader(pipeline_of(tmp_path, text, mm.Flat()))))
    assert batch["document_row"].tolist() == batch["document_sample"].tolist() == [0, 0, 1, 1]
    assert batch["__key__"][0] == batch["__key__"][1] != batch["__key__"][2]
    # Nothing in the texts stands for pictures, so each comes once.
    assert batch["image_document"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("settings", "batching", "reason"),
    [
        ({"field": two_texts, "texts": "all"}, None, r"pass batching=mm\.Flat\(\)"),
        ({"max_length": 512}, mm.Pack(8192), "give max_length=8192"),
    ],
)
def test_texts_that_do_not_fit_their_batches_are_refused(
    settings: dict[str, Any], batching: Any, reason: str, tmp_path: Path
) -> None:
    text = mm.TextDecoder(byte_tokenizer(), **settings)
    with pytest.raises(mm.ConfigError, match=reason):
        pipeline_of(tmp_path, text, batching)


def test_pictures_in_the_text_come_with_each_document(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = mm.TextDecoder(tokenizer, field=two_texts, texts="all", image_length=3)
    batch = next(iter(mm.Loader(pipeline_of(tmp_path, text, mm.Flat()))))
    assert batch["image_document"].tolist() == [0, 1, 2, 3]
    assert batch["image_row"].tolist() == [0, 0, 1, 1]
    token = tokenizer.convert_tokens_to_ids("<image>")
    assert int((batch["input_ids"] == token).sum()) == 4 * 3


def test_plain_text_ends_with_the_token_of_its_end() -> None:
    cat = {"txt": b"a cat"}
    whole = byte_tokenizer()  # it writes tokens at both ends by itself
    ends = [mm.TextDecoder(whole, append_eos=each)(cat)["input_ids"] for each in (True, False)]
    np.testing.assert_array_equal(*ends)
    fast = byte_tokenizer()
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    expected = [*mm.TextDecoder(fast)(cat)["input_ids"], fast.eos_token_id]
    decoder = mm.TextDecoder(fast, 8, append_eos=True)
    for text in ("a cat", f"a cat{fast.eos_token}"):
        tokens = decoder({"txt": text})
        assert tokens["input_ids"].tolist() == tokens["labels"].tolist() == expected
    cut = decoder({"txt": b"a cat that is long"})["input_ids"].tolist()
    assert (len(cut), cut[-1]) == (8, fast.eos_token_id)
    with pytest.raises(mm.errors.DecodeError, match="empty text"):
        decoder({"txt": b""})
    fast.eos_token = None
    with pytest.raises(mm.ConfigError, match="the tokenizer has no eos_token"):
        mm.TextDecoder(fast, append_eos=True)


EARLIER = [user("a"), assistant("b"), user("c")]
PAIR = {"messages": EARLIER, "chosen": [assistant("yes")], "rejected": [assistant("no")]}
VERDICT = {"messages": EARLIER, "completion": [assistant("yes")], "label": False}


@pytest.mark.parametrize(("row", "key"), [(PAIR, "chosen"), (VERDICT, "completion")])
def test_a_preference_is_no_conversation_even_with_earlier_answers(row, key):
    decoder = mm.TextDecoder(tokenizer(CHATML), max_length=64)
    with pytest.raises(
        mm.errors.DecodeError, match=rf"its answer is in json.{key}; to train on it, join"
    ):
        decoder({"json": row})
    joined = mm.TextDecoder(
        tokenizer(CHATML),
        max_length=64,
        field=lambda sample: sample["json"]["messages"] + sample["json"][key],
    )
    assert (joined({"json": row})["labels"] >= 0).any()
    whole = {**row, "messages": [*EARLIER, assistant("yes")]}
    assert (decoder({"json": whole})["labels"] >= 0).any()
