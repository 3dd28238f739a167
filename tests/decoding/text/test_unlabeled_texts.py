"""Texts no token of which is trained: bad samples with that reason, and delivered when asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import CHATML, MARKED, TWO_TURNS, assistant, byte_chat, tokenizer, user

BYTES = byte_tokenizer(chat=True)


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"json": {"messages": list(messages)}}


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_prompt_longer_than_max_length_is_a_bad_sample(template: str) -> None:
    sample = chat(user("a cat on a mat " * 20), assistant("yes"))
    whole = mm.TextDecoder(tokenizer(template))(sample)
    first = int(np.flatnonzero(whole["labels"] != -100)[0])
    reason = (
        f"no token of it is trained: the first answer begins at token {first}, "
        f"max_length is {first}"
    )
    with pytest.raises(mm.errors.DecodeError, match=reason):
        mm.TextDecoder(tokenizer(template), max_length=first)(sample)
    one_label = mm.TextDecoder(tokenizer(template), max_length=first + 1)(sample)
    assert np.count_nonzero(one_label["labels"] != -100) == 1
    kept = mm.TextDecoder(tokenizer(template), max_length=first, unlabeled_texts="keep")(sample)
    assert (kept["labels"] == -100).all()


def test_the_place_of_the_first_answer_counts_the_tokens_of_images() -> None:
    fast = byte_chat(CHATML)
    sample = chat(user("<image>" + "?" * 30), assistant("yes")) | {"jpg": b""}
    text = mm.TextDecoder(fast, image_length=100)
    first = int(np.flatnonzero(text(sample)["labels"] != -100)[0])
    assert first > 130
    with pytest.raises(mm.errors.DecodeError, match=f"begins at token {first}, max_length is 120"):
        mm.TextDecoder(fast, image_length=100, max_length=120)(sample)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((user("what is this?"),), "the conversation has no answer of an assistant"),
        (({"role": "system", "content": "be brief"},), "no answer of an assistant"),
    ],
)
def test_a_conversation_without_an_answer_is_a_bad_sample(
    messages: tuple[dict[str, Any], ...], reason: str
) -> None:
    with pytest.raises(mm.errors.DecodeError, match=f"no token of it is trained: .*{reason}"):
        mm.TextDecoder(tokenizer(CHATML))(chat(*messages))


def test_an_empty_answer_that_the_template_marks_is_a_bad_sample() -> None:
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}")
    with pytest.raises(mm.errors.DecodeError, match="the assistant's answers are empty"):
        mm.TextDecoder(tokenizer(template))(chat(user("what?"), assistant("")))


def test_the_first_token_of_a_conversation_is_no_label() -> None:
    only = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    fast = byte_chat(only)
    with pytest.raises(mm.errors.DecodeError, match="no token of it is trained"):
        mm.TextDecoder(fast)(chat(assistant("a")))
    assert mm.TextDecoder(fast)(chat(assistant("ab")))["labels"].size == 2


def test_an_empty_caption_is_a_bad_sample_though_special_tokens_are_added_to_it() -> None:
    for sample in ({"txt": b""}, {"txt": ""}):
        with pytest.raises(mm.errors.DecodeError, match="no token of it is trained: empty text"):
            mm.TextDecoder(BYTES)(sample)
    kept = mm.TextDecoder(BYTES, unlabeled_texts="keep")({"txt": b""})
    assert kept["input_ids"].tolist() == [BYTES.bos_token_id, BYTES.eos_token_id]
    with pytest.raises(mm.errors.DecodeError, match="max_length=2 leaves no text"):
        mm.TextDecoder(BYTES, max_length=2)({"txt": b"a cat"})
    fast = byte_chat("")
    with pytest.raises(mm.errors.DecodeError, match="no token of it is trained: empty text"):
        mm.TextDecoder(fast, image_length=4)({"txt": b"", "jpg": b""})


@pytest.mark.parametrize("caption", [b"a", b"a cat", b" "])
def test_any_caption_with_a_token_is_good(caption: bytes) -> None:
    assert mm.TextDecoder(tokenizer())({"txt": caption})["input_ids"].size >= 1
    assert mm.TextDecoder(BYTES)({"txt": caption})["input_ids"].size == len(caption) + 2


@pytest.mark.parametrize("max_length", range(1, 12))
def test_a_cut_keeps_the_special_tokens_as_the_library_does(max_length: int) -> None:
    text = mm.TextDecoder(BYTES, max_length=max_length, unlabeled_texts="keep")
    ids = text({"txt": b"a cat on"})["input_ids"].tolist()
    if max_length >= 2:
        expected = BYTES("a cat on", truncation=True, max_length=max_length).input_ids
        assert ids == expected
    assert len(ids) == min(max_length, 10)


def test_what_a_text_has_lost_comes_with_its_tokens() -> None:
    text = mm.TextDecoder(tokenizer(CHATML), max_length=30)
    whole = mm.TextDecoder(tokenizer(CHATML))(chat(*TWO_TURNS))["input_ids"].size
    cut, fitting = text.decode_all([chat(*TWO_TURNS), {"txt": b"a cat"}])
    assert (cut.num_tokens, cut.tokens["input_ids"].size) == (whole, 30)
    assert fitting.num_tokens == fitting.tokens["input_ids"].size
