"""A sample of bytes becomes a sample of tensors, or an error that says where it was."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.media.fields import image_fields
from mmstream.types import SampleLineage
from tests.helpers.chats import tokenizer
from tests.helpers.pictures import encoded


def picture(value: int) -> bytes:
    return encoded(Image.new("RGB", (6, 4), (value, value, value)), "png")


def sample(**fields: Any) -> dict[str, Any]:
    return {"__key__": "000123", "__url__": "s3://b/corpus/shard-000003.tar", **fields}


def named(fields: dict[str, Any]) -> dict[str, Any]:
    return {**sample(), "__lineage__": SampleLineage(shard=3, index=17), **fields}


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def text() -> mm.TextDecoder:
    return mm.TextDecoder(tokenizer(TEMPLATE))


IMAGES = mm.Decode(image=mm.ImageDecoder())


def test_json_is_parsed_and_the_rest_stays_bytes_without_decoders() -> None:
    packed = gzip.compress(b"hello")
    before = sample(**{"json": b'{"id": 7}', "jpg": b"?", "txt": b"\xff", "txt.gz": packed})
    for decode in (None, mm.Decode()):
        after = decode_sample(before, decode)
        assert after == {**before, "json": {"id": 7}}
    assert before["json"] == b'{"id": 7}'


def test_parsed_json_is_left_alone() -> None:
    parsed = sample(json={"id": 7})
    assert decode_sample(parsed, None) == parsed


def test_one_image_becomes_a_channels_last_view() -> None:
    decoded = decode_sample(sample(jpg=picture(9)), IMAGES)
    image = decoded["image"]
    assert "jpg" not in decoded
    assert image.shape == (3, 4, 6)
    assert image.dtype == torch.uint8
    assert image[None].is_contiguous(memory_format=torch.channels_last)
    assert (image == 9).all()


@pytest.mark.parametrize("names", [["png"], ["0.png", "1.png"]])
def test_one_image_is_written_into_the_row_of_the_batch(names: list[str]) -> None:
    """Several become a list and leave the row alone."""
    row = torch.zeros((4, 4, 3), dtype=torch.uint8)
    decode = mm.Decode(image=mm.ImageDecoder(size=4))
    fields = {name: picture(9 + number) for number, name in enumerate(names)}
    images = decode_sample(named(fields), decode, {"image": [row]})["image"]
    if len(names) == 1:
        assert (row == 9).all()
        assert images.data_ptr() == row.data_ptr()
    else:
        assert [int(image[0, 0, 0]) for image in images] == [9, 10]
        assert not row.any()


def test_no_image_is_an_empty_list() -> None:
    assert decode_sample(sample(json=b"{}"), IMAGES)["image"] == []


def test_images_are_ordered_by_number_and_not_by_name() -> None:
    names = ["10.jpg", "2.png", "0.jpg", "mask.png", "jpg", "1.webp", "left.bmp", "2.gif"]
    fields = dict.fromkeys([*names, "json", "txt", "jpg.gz", "0.mp4", "__x.png"], b"")
    expected = ["jpg", "0.jpg", "1.webp", "2.gif", "2.png", "10.jpg", "left.bmp", "mask.png"]
    assert image_fields(fields) == expected
    assert image_fields({"jpeg": b"", "gif": b"", "bmp": b""}) == ["bmp", "gif", "jpeg"]


def test_text_adds_ids_and_txt_becomes_a_string(text: mm.TextDecoder) -> None:
    decoded = decode_sample(sample(txt="café".encode()), mm.Decode(text=text))
    assert decoded["txt"] == "café"
    assert {"input_ids", "attention_mask", "labels"} < decoded.keys()
    assert decoded["input_ids"].tolist() == text({"txt": "café"})["input_ids"].tolist()


def test_messages_are_taken_from_the_parsed_json(text: mm.TextDecoder) -> None:
    json = (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    )
    decoded = decode_sample(sample(json=json, txt=b"unused"), mm.Decode(text=text))
    assert text.tokenizer.decode(decoded["input_ids"]) == "user: a\nassistant: b\n"
    assert decoded["txt"] == "unused"


ADDRESS = r"^shard-000003\.tar\[17\] 000123\."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": b"{"}, r"json: JSON: "),
        ({"json": b'{"a": "\xff"}'}, r"json: JSON: "),
        ({"json": b""}, r"json: JSON: "),
        ({"json": b"[" * 100_000}, r"json: JSON: "),
        ({"jpg": b"<html>", "txt": b"a"}, r"jpg: not an image"),
        ({"0.jpg": picture(1), "1.png": b"", "txt": b"a"}, r"1\.png: empty, not an image"),
        ({"jpg": picture(1), "json": b"{}", "txt": b"\xff"}, r"txt: not UTF-8"),
        ({"jpg": picture(1)}, r"txt: no text"),
        ({"json": b'{"messages": [1]}'}, r"json: messages\[0\]"),
    ],
)
def test_a_bad_field_is_named_with_shard_index_and_key(
    fields: dict[str, bytes], message: str, text: mm.TextDecoder
) -> None:
    with pytest.raises(mm.errors.DecodeError, match=ADDRESS + message):
        decode_sample(named(fields), mm.Decode(image=mm.ImageDecoder(), text=text))


def test_without_lineage_the_key_is_the_address() -> None:
    with pytest.raises(mm.errors.DecodeError, match=r"^000123\.jpg: empty"):
        decode_sample(sample(jpg=b""), IMAGES)


def test_a_file_cannot_be_a_field_that_a_decoder_makes(text: mm.TextDecoder) -> None:
    raw = {"txt": b"a cat", "0.png": picture(1)}
    for name in ("input_ids", "attention_mask", "labels"):
        fields = named({**raw, name: b"7"})
        assert decode_sample(fields, IMAGES)[name] == b"7"
        with pytest.raises(
            mm.errors.DecodeError, match=rf"\[17\] 000123\.{name}: .*rename this file"
        ):
            decode_sample(fields, mm.Decode(text=text))
    fields = named({**raw, "image": b"7"})
    assert decode_sample(fields, mm.Decode(text=text))["image"] == b"7"
    with pytest.raises(mm.errors.DecodeError, match=r"\[17\] 000123\.image: .*rename this file"):
        decode_sample(fields, IMAGES)
