"""Probes: they notice decoders that count otherwise than a measure, and say what differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

import mmstream as mm
from mmstream.errors import ManifestError
from mmstream.measuring.lengths import Counter
from mmstream.measuring.probes import Probe, decode_probes, difference, kind_of
from mmstream.packing.measure_file import Measure
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import jpeg, write_corpus

COUNTS = [40, 30]


def fields(number: int) -> dict[str, bytes]:
    roles = ["system"] if number == 55 else []
    text = "naïve" if number == 33 else "an answer"
    turns = [{"role": role, "content": "be kind"} for role in roles]
    content = [{"type": "image"}, {"type": "text", "text": f"what is this, {number}?"}]
    turns += [{"role": "user", "content": content}, {"role": "assistant", "content": text}]
    row = json.dumps({"messages": turns}, ensure_ascii=False).encode()
    return {"jpg": jpeg(number, (56 + number, 84)), "json": row}


def decode_with(tokenizer: Any, image: mm.ImageDecoder | None = None, **settings: Any) -> mm.Decode:
    image = image or mm.ImageDecoder(resize="max_pixels", multiple_of=28)
    length = {"image_length": mm.qwen_vl_length()}
    return mm.Decode(image=image, text=mm.TextDecoder(tokenizer, **(length | settings)))


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"), COUNTS, fields)
    return mm.measure(folder, decode=decode_with(byte_tokenizer(chat=True)))


def probes_in(measure: Measure) -> list[Probe]:
    return decode_probes(measure.details["probes"])


def test_the_same_decoders_count_alike(measure: Measure) -> None:
    for max_length in (64, 4096):
        decode = decode_with(byte_tokenizer(chat=True), max_length=max_length)
        assert difference(measure, Counter(decode)) is None


def test_probes_are_spread_and_chosen(measure: Measure) -> None:
    probes = probes_in(measure)
    assert 32 <= len(probes) <= 64
    assert {probe.shard for probe in probes} == {"shard-000000.tar", "shard-000001.tar"}
    refs = {(probe.shard, probe.index) for probe in probes}
    assert ("shard-000000.tar", 33) in refs  # not ASCII
    assert ("shard-000001.tar", 15) in refs  # with a system prompt
    lengths = measure.column("num_tokens")
    assert max(probe.values[0] for probe in probes) == lengths.max()
    assert min(probe.values[0] for probe in probes) == lengths.min()


def test_probes_hold_no_pixels(measure: Measure) -> None:
    assert all(len(probe.fact.fields["jpg"]) == 35 for probe in probes_in(measure))


def test_one_more_token_in_the_tokenizer_is_noticed(measure: Measure) -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.add_tokens([AddedToken("answer", normalized=False)])
    words = difference(measure, Counter(decode_with(tokenizer)))
    assert words is not None
    assert words.startswith("shard-000000.tar[0] 000000: ")
    assert "tokens, " in words
    assert words.endswith("in the measure; what differs: tokenizer")


def test_other_ids_of_the_same_number_are_noticed(measure: Measure) -> None:
    tokenizer = byte_tokenizer(chat=True)
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = core["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    changed = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(core)),
        pad_token="<pad>",
        chat_template=tokenizer.chat_template,
    )
    words = difference(measure, Counter(decode_with(changed)))
    assert words is not None
    assert "other token ids than in the measure, from token" in words
    assert "what differs: tokenizer" in words


def test_another_template_is_named(measure: Measure) -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
    words = difference(measure, Counter(decode_with(tokenizer)))
    assert words is not None
    assert words.endswith("what differs: chat template")


def test_another_size_of_pictures_is_named(measure: Measure) -> None:
    image = mm.ImageDecoder(resize="max_pixels", multiple_of=56)
    words = difference(measure, Counter(decode_with(byte_tokenizer(chat=True), image)))
    assert words is not None
    assert "patches, " in words
    assert words.endswith("what differs: image.multiple of")


def test_other_versions_are_named_where_all_settings_are_the_same(measure: Measure) -> None:
    old = {"transformers": "4.0", "tokenizers": "0.1"}
    probes = probes_in(measure)
    changed = [probe._replace(ids_crc32=1) for probe in probes]
    from mmstream.measuring.probes import encode_probes

    details = {"libraries": old, "probes": encode_probes(changed)}
    words = difference(
        dataclasses.replace(measure, details=details),
        Counter(decode_with(byte_tokenizer(chat=True))),
    )
    assert words is not None
    assert "all settings are the same, but the measure was made with" in words
    assert "tokenizers 0.1, now " in words


def test_a_function_before_decoding_that_counts_otherwise_is_noticed(measure: Measure) -> None:
    def shout(sample: dict[str, Any]) -> dict[str, Any]:
        for message in sample["json"]["messages"]:
            if message["role"] == "assistant":
                message["content"] += "!"
        return sample

    words = difference(measure, Counter(decode_with(byte_tokenizer(chat=True)), (shout,)))
    assert words is not None
    assert "what differs: before" in words


def test_damaged_probes_are_an_error(measure: Measure) -> None:
    for text in ("?", "AAAA", measure.details["probes"][:-40]):
        with pytest.raises(ManifestError, match="probes are damaged"):
            difference(
                dataclasses.replace(measure, details={"probes": text}),
                Counter(decode_with(byte_tokenizer(chat=True))),
            )


def test_kinds_are_files_roles_and_characters(tmp_path: Path) -> None:
    row = b'{"messages": [{"role": "user"}, {"role": "assistant"}], "tools": []}'
    assert kind_of({"json": row}) == "json; assistant user; tools"
    assert kind_of({"00.jpg": b"", "01.jpg": b"", "txt": b"a"}) == "#.jpg txt"
