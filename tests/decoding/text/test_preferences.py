"""Preference pairs: never trained as conversations without saying so."""

from __future__ import annotations

import pytest

import mmstream as mm
from tests.helpers.chats import CHATML, assistant, tokenizer, user

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
