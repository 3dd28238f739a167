"""Samples with several texts: captions of one picture, and preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import mmstream as mm
from mmstream.errors import DecodeError
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import CHATML, assistant, byte_chat, user
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
    assert ["a cat" in text for text in texts] == [True, False]
    assert ["a dog" in text for text in texts] == [False, True]
    assert not any("hello" in text for text in texts)
    assert all("hello" in fast.decode(ids) for ids in tokens["input_ids"])


def test_other_samples_are_one_document() -> None:
    fast = byte_chat(CHATML)
    decoder = mm.TextDecoder(fast, texts="all")
    messages = [user("hi"), assistant("good")]
    assert len(decoder({"json": {"messages": messages}})["input_ids"]) == 1
    assert len(decoder({"txt": b"a cat"})["input_ids"]) == 1


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
    assert isinstance(bad, DecodeError)
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


def test_a_flat_batch_has_the_documents_of_a_sample_as_neighbours(tmp_path: Path) -> None:
    write_corpus(tmp_path, [4])
    text = mm.TextDecoder(byte_tokenizer(), field=two_texts, texts="all")
    given: dict[str, Any] = {
        "global_batch_size": 2,
        "decode": mm.Decode(image=mm.ImageDecoder(size=16), text=text),
    }
    dataset = mm.open_dataset(tmp_path)
    with pytest.raises(mm.ConfigError, match=r"pass batching=mm\.Flat\(\)"):
        mm.Pipeline(dataset, **given)
    batch = next(iter(mm.Loader(mm.Pipeline(dataset, **given, batching=mm.Flat()))))
    assert batch["document_row"].tolist() == batch["document_sample"].tolist() == [0, 0, 1, 1]
    assert batch["__key__"][0] == batch["__key__"][1] != batch["__key__"][2]
    # Nothing in the texts stands for pictures, so each comes once.
    assert batch["image_document"].tolist() == [0, 2]


def test_pictures_in_the_text_come_with_each_document(tmp_path: Path) -> None:
    write_corpus(tmp_path, [4])
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = mm.TextDecoder(tokenizer, field=two_texts, texts="all", image_length=3)
    decode = mm.Decode(image=mm.ImageDecoder(size=16), text=text)
    pipeline = mm.Pipeline(
        mm.open_dataset(tmp_path), global_batch_size=2, decode=decode, batching=mm.Flat()
    )
    batch = next(iter(mm.Loader(pipeline)))
    assert batch["image_document"].tolist() == [0, 1, 2, 3]
    assert batch["image_row"].tolist() == [0, 0, 1, 1]
    token = tokenizer.convert_tokens_to_ids("<image>")
    assert int((batch["input_ids"] == token).sum()) == 4 * 3


def test_plain_text_ends_with_the_token_of_its_end() -> None:
    whole = byte_tokenizer()  # it writes tokens at both ends by itself
    assert mm.TextDecoder(whole, append_eos=True)({"txt": b"a cat"})["input_ids"].tolist() == (
        mm.TextDecoder(whole)({"txt": b"a cat"})["input_ids"].tolist()
    )
    fast = byte_tokenizer()
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    end = fast.eos_token_id
    plain = mm.TextDecoder(fast)({"txt": b"a cat"})["input_ids"]
    decoder = mm.TextDecoder(fast, 8, append_eos=True)
    tokens = decoder({"txt": b"a cat"})
    assert tokens["input_ids"].tolist() == tokens["labels"].tolist() == [*plain, end]
    cut = decoder({"txt": b"a cat that is long"})
    assert len(cut["input_ids"]) == 8
    assert cut["input_ids"][-1] == end
    twice = decoder({"txt": f"a cat{fast.eos_token}"})["input_ids"]
    assert twice.tolist() == [*plain, end]
    with pytest.raises(DecodeError, match="empty text"):
        decoder({"txt": b""})


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    fast = byte_chat(CHATML)
    fast.eos_token = None
    with pytest.raises(mm.ConfigError, match="the tokenizer has no eos_token"):
        mm.TextDecoder(fast, append_eos=True)


def test_texts_that_packs_would_cut_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, [4])
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=512))
    with pytest.raises(mm.ConfigError, match="give max_length=8192"):
        mm.Pipeline(
            mm.open_dataset(tmp_path), global_batch_size=2, decode=decode, batching=mm.Pack(8192)
        )
