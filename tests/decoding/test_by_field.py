"""Files of a sample become fields: by their own names, by kind, or an error that says where."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.media.fields import image_fields
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.types import SampleLineage
from tests.helpers.chats import tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.decodings import decode_texts
from tests.helpers.pictures import encoded

RNG = np.random.Generator(np.random.Philox(7))


def png(pixels: np.ndarray[Any, Any], mode: str | None = None) -> bytes:
    return encoded(Image.fromarray(pixels, mode), "png")


def npy(array: np.ndarray[Any, Any], **settings: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **settings)
    return file.getvalue()


TEXT = mm.TextDecoder(byte_tokenizer())
PIXELS = RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8)
CLASSES = RNG.integers(0, 9, (40, 60), dtype=np.uint8)


def with_palette(numbers: np.ndarray[Any, Any]) -> bytes:
    picture = Image.fromarray(numbers, "P")
    picture.putpalette(RNG.integers(0, 256, 768, dtype=np.uint8).tobytes())
    return encoded(picture, "png")


def sample(**fields: Any) -> dict[str, Any]:
    lineage = SampleLineage(shard=0, index=4)
    return {"__key__": "7", "__url__": "c/s-0.tar", "__lineage__": lineage, **fields}


def decoded(decode: mm.Decode, **fields: Any) -> dict[str, Any]:
    result = decode_sample(sample(**fields), decode)
    return {name: value for name, value in result.items() if not name.startswith("__")}


def test_each_field_gets_its_own_decoder_and_keeps_its_name() -> None:
    image, text = mm.ImageDecoder(size=16), mm.TextDecoder(byte_tokenizer())
    decode = mm.Decode(
        {
            "jpg": image,
            "mask.png": mm.ImageDecoder(size=16, interpolation="nearest"),
            "cls": int,
            "npy": ...,
            "meta.json": ...,
            "caption.txt": text,
            "raw": len,
        }
    )
    fields = {
        "jpg": png(PIXELS),
        "mask.png": png(PIXELS),
        "cls": b" 7\n",
        "npy": npy(np.arange(3.0)),
        "meta.json": b'{"a": [1]}',
        "caption.txt": b"a cat",
        "raw": b"12345",
        "left": b"alone",
    }
    result = decoded(decode, **fields)
    picture, mask, array, tokens = (
        result.pop(name) for name in ("jpg", "mask.png", "npy", "input_ids")
    )
    by_kind = decoded(mm.Decode(image=image), png=png(PIXELS))
    assert torch.equal(picture, by_kind["image"])
    assert picture.shape == mask.shape == (3, 16, 16)
    assert not torch.equal(picture, mask)
    assert array.tolist() == [0, 1, 2]
    assert np.array_equal(tokens, text({"txt": "a cat"})["input_ids"])
    values = {"cls": 7, "meta.json": {"a": [1]}, "raw": 5, "caption.txt": "a cat", "left": b"alone"}
    assert {name: result[name] for name in values} == values
    assert result.keys() - values.keys() == {"attention_mask", "labels"}


def test_a_name_means_exactly_this_field() -> None:
    decode = mm.Decode({"jpg": ...})
    with pytest.raises(mm.errors.DecodeError, match=r"no field jpg; it has 0\.jpg, mask\.jpg"):
        decoded(decode, **{"0.jpg": png(PIXELS), "mask.jpg": png(PIXELS)})


def test_the_first_of_several_files_is_taken_and_named_as_the_first() -> None:
    decode = mm.Decode({"jpg;png": mm.ImageDecoder(size=8), "cls;class": int})
    result = decoded(decode, png=png(PIXELS), **{"class": b"3"})
    assert sorted(result) == ["cls", "jpg"]
    with pytest.raises(mm.errors.DecodeError, match="no field jpg or png; it has cls"):
        decoded(decode, cls=b"1")


def test_shorthand_and_fields_go_together() -> None:
    decode = mm.Decode(
        {"mask.png": mm.ImageDecoder(size=8, mask=True)}, image=mm.ImageDecoder(size=8)
    )
    result = decoded(
        decode, **{"0.png": png(PIXELS), "1.png": png(PIXELS), "mask.png": png(CLASSES)}
    )
    assert [image.shape for image in result["image"]] == [(3, 8, 8)] * 2
    assert result["mask.png"].shape == (8, 8)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (
            ("input.jpg", "target.png"),
            r"a list, and input\.jpg and target\.png have names of their own: decode them by "
            r'field, mm\.Decode\(\{"input\.jpg": mm\.ImageDecoder\(\.\.\.\), "target\.png": mm\.I',
        ),
        (("jpg", "mask.png"), r"a list, and mask\.png have names"),
    ],
)
def test_named_pictures_do_not_land_in_one_list(names: tuple[str, ...], reason: str) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=8))
    with pytest.raises(mm.errors.DecodeError, match=rf"s-0\.tar\[4\] 7: image= takes .* {reason}"):
        decoded(decode, **dict.fromkeys(names, png(PIXELS)))
    assert decoded(decode, **{names[0]: png(PIXELS)})["image"].ndim == 3  # a single one


def test_messages_may_name_the_pictures_of_a_list() -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=8))
    parts = [{"type": "image", "field": name} for name in ("left.jpg", "right.jpg")]
    row = {"messages": [{"role": "user", "content": parts}]}
    fields = {"left.jpg": png(PIXELS), "right.jpg": png(PIXELS), "json": row}
    assert len(decoded(decode, **fields)["image"]) == 2


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (png(CLASSES), CLASSES),
        (png(np.repeat(CLASSES[:, :, None], 3, 2)), CLASSES),
        (png(np.stack((CLASSES, CLASSES // 2), 2), "LA"), CLASSES),
        (with_palette(CLASSES), CLASSES),
    ],
    ids=["grey", "colours", "alpha", "palette"],
)
def test_a_mask_holds_the_numbers_as_they_are_stored(data: bytes, numbers: Any) -> None:
    """Fewer bits: image/test_metadata.py."""
    mask = mm.ImageDecoder(mask=True)(data)
    assert mask.dtype == np.uint8
    assert np.array_equal(mask, numbers)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png(PIXELS), "this picture has colours"),
        (encoded(Image.fromarray(CLASSES), "jpeg"), "a JPEG does not keep class numbers"),
        (png(CLASSES.astype(np.uint16)), "not of 8 bits"),
    ],
)
def test_what_is_no_mask_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(mm.errors.DecodeError, match=reason):
        mm.ImageDecoder(mask=True)(data)


def test_decoders_travel_to_workers_and_can_be_changed() -> None:
    decode = mm.Decode(
        {"jpg;png": mm.ImageDecoder(size=8), "cls": int, "npy": ..., "json": ...},
        text=mm.TextDecoder(byte_tokenizer(), field="json.caption"),
        same_geometry=["jpg"],
    )
    assert hash(decode) == hash(dataclasses.replace(decode))
    again = pickle.loads(pickle.dumps(decode))
    fields = {"png": png(PIXELS), "cls": b"1", "npy": npy(np.ones(2)), "json": b'{"caption": "x"}'}
    first, second = decoded(decode, **fields), decoded(again, **fields)
    assert torch.equal(first["jpg"], second["jpg"])
    assert first["input_ids"].tolist() == second["input_ids"].tolist()


@pytest.mark.parametrize("name", ["cls", "cls2", "class", "index", "inx", "count", "id"])
def test_numbers_are_decoded_by_their_extension(name: str) -> None:
    decode = mm.Decode({name: ...})
    assert decoded(decode, **{name: b"12\n"})[name] == 12
    for data in (b"", b"cat", b"1.5", b"9" * 19, b"1" * 10_000, b"\xb2"):
        with pytest.raises(mm.errors.DecodeError, match=rf"7\.{name}: not a whole number"):
            decoded(decode, **{name: data})


@pytest.mark.parametrize("name", ["txt", "text", "transcript", "caption.txt"])
def test_texts_are_decoded_by_their_extension(name: str) -> None:
    for decode in (mm.Decode({name: ...}), mm.Decode({name: str})):
        assert decoded(decode, **{name: "café".encode()})[name] == "café"
    with pytest.raises(mm.errors.DecodeError, match="not UTF-8"):
        decoded(mm.Decode({name: ...}), **{name: b"\xff"})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(4, dtype=">i2"),
        np.float16(3.5),
        np.zeros((0, 4)),
        np.array(["a", "bc"]),
        np.array([True, False]),
    ],
)
def test_arrays_come_back_as_they_were_saved(array: Any) -> None:
    result = decoded(mm.Decode({"npy": ...}), npy=npy(np.asarray(array)))["npy"]
    assert np.array_equal(result, array)
    assert result.dtype == np.asarray(array).dtype.newbyteorder("=")
    assert result.flags.writeable


HEADER = b"\x93NUMPY\x01\x00v\x00"


def npy_header(text: str) -> bytes:
    return HEADER + text.encode().ljust(117) + b"\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy(np.array([object()], dtype=object), allow_pickle=True), "only numbers and strings"),
        (npy(np.zeros(3))[:-1], "needs 24 bytes, and the file has 23"),
        (npy(np.zeros(3)) + b"x", "needs 24 bytes"),
        (npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (10**9,), }"), "npy"),
        (
            npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999,), }"),
            "needs 7,999,999,999,992 bytes, and the file has 0",
        ),
        (npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"), "shape"),
        (npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (True,), }"), "shape"),
        (npy_header("{'descr': '<U0', 'fortran_order': False, 'shape': (9999999999,), }"), "type"),
        (npy_header(f"{{'descr': '<f8', 'shape': ({'0,' * 40}), 'fortran_order': 0}}"), "npy"),
        (npy_header("(" * 110), "npy"),
        (b"\x93NUMPY\x03\x00", "npy"),
        (b"", "npy"),
        (b"\x80\x04K\x01.", "npy"),
    ],
)
def test_no_array_is_made_of_what_a_header_only_claims(data: bytes, reason: str) -> None:
    with pytest.raises(mm.errors.DecodeError, match=reason):
        decoded(mm.Decode({"npy": ...}), npy=data)


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_an_npz_is_a_dict_of_arrays() -> None:
    result = decoded(mm.Decode({"npz": ...}), npz=npz(a=np.arange(3), b=np.ones((2, 2))))["npz"]
    assert {name: array.tolist() for name, array in result.items()} == {
        "a": [0, 1, 2],
        "b": [[1, 1], [1, 1]],
    }


def test_an_npz_may_not_unpack_to_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmstream.decoding.values.MAX_ARRAY_BYTES", 10_000)
    monkeypatch.setattr("mmstream.decoding.values.MAX_NPZ_ARRAYS", 3)
    decode = mm.Decode({"npz": ...})
    assert decoded(decode, npz=npz(a=np.zeros(1000)))["npz"]["a"].shape == (1000,)
    for data, reason in (
        (npz(a=np.zeros(700), b=np.zeros(700)), "unpacked, the limit is 10,000"),
        (npz(a=1, b=2, c=3, d=4), "more than 3 arrays"),
        (npz(a=np.array([object()], dtype=object)), "only numbers and strings"),
        (npz(a=np.zeros(9))[:-30], "npz"),
        (b"no zip", "npz"),
    ):
        with pytest.raises(mm.errors.DecodeError, match=reason):
            decoded(decode, npz=data)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", b"\x80\x04K\x01.")
    with pytest.raises(mm.errors.DecodeError, match="npy"):
        decoded(decode, npz=file.getvalue())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pyd", "unpickling runs code"),
        ("pickle", "unpickling runs code"),
        ("pth", "torch.load"),
        ("ten", "tensor format of webdataset"),
        ("txt.gz", "may unpack to any size"),
        ("mp4", r"say which frames, \{'mp4': mm.VideoDecoder\(num_frames=8\)\}"),
        ("wav", r"say at which rate, \{'wav': mm.AudioDecoder\(sample_rate=16_000\)\}"),
        ("abc", "those of class, cls, cls2, count"),
    ],
)
def test_what_has_no_built_in_decoder_says_why_and_what_to_pass(name: str, reason: str) -> None:
    with pytest.raises(mm.ConfigError, match=reason) as error:
        mm.Decode({name: ...})
    assert f"{{{name!r}: function}}" in str(error.value)
    assert decoded(mm.Decode({name: len}), **{name: b"123"})[name] == 3


def fails(data: bytes) -> int:
    return {}[data]


def has_a_bug(data: bytes) -> int:
    return data.no_such_method()  # type: ignore[attr-defined, no-any-return]


def skips(data: bytes) -> int:
    raise mm.SkipSample("too dark")


def test_errors_of_functions_are_errors_of_the_sample_but_bugs_are_not() -> None:
    with pytest.raises(mm.errors.DecodeError, match=r"s-0\.tar\[4\] 7\.x: fails: KeyError: b'1'"):
        decoded(mm.Decode({"x": fails}), x=b"1")
    with pytest.raises(AttributeError) as caught:
        decoded(mm.Decode({"x": has_a_bug}), x=b"1")
    assert caught.value.__notes__ == ["while decoding s-0.tar[4] 7.x"]
    with pytest.raises(mm.SkipSample, match=r"s-0\.tar\[4\] 7\.x: too dark"):
        decoded(mm.Decode({"x": skips}), x=b"1")


def test_a_value_that_is_no_bytes_any_more_stays_as_it_is() -> None:
    decode = mm.Decode({"cls": int, "jpg": mm.ImageDecoder(size=8)})
    assert decoded(decode, cls="cat", jpg="seen") == {"cls": "cat", "jpg": "seen"}


def upper(data: bytes) -> dict[str, Any]:
    return {"caption": data.decode().upper()}


@pytest.mark.parametrize("decode", [{}, {"image": mm.ImageDecoder(size=8)}])
def test_damaged_json_costs_its_sample_unless_it_is_kept_as_bytes(
    tmp_path: Path, decode: dict[str, Any]
) -> None:
    texts = [b'{"a": 1}', b'{"a": ', b'{"a": 3}']
    folder = write_corpus(tmp_path, [3], lambda n: {"png": png(PIXELS), "json": texts[n]})
    dataset = mm.open_dataset(folder)

    def batch(fields: dict[str, Any]) -> dict[str, Any]:
        decoders = mm.Decode(fields, **decode) if fields or decode else None
        pipeline = mm.Pipeline(dataset, global_batch_size=3, decode=decoders, shuffle=False)
        return next(iter(mm.Loader(pipeline)))

    assert [row["a"] for row in batch({})["json"]][::2] == [1, 3]  # between them is a substitute
    assert batch({"json": bytes})["json"] == texts


def test_a_function_may_take_the_place_of_the_json_parser_and_texts_see_it() -> None:
    decode = mm.Decode({"json": upper}, text=mm.TextDecoder(byte_tokenizer(), field="json.caption"))
    (parsed, tokens), *_ = decode_texts([sample(json=b"cat")], decode)
    assert parsed["json"] == {"caption": "CAT"}
    assert tokens is not None
    assert decoded(decode, json=b"cat")["json"] == {"caption": "CAT"}
    with pytest.raises(mm.errors.DecodeError, match=r"7\.json: fails: KeyError"):
        decoded(mm.Decode({"json": fails}), json=b"cat")


@pytest.mark.parametrize(
    ("fields", "settings", "advice"),
    [
        (mm.ImageDecoder(), {}, r"Decode\(image=decoder\)"),
        (len, {}, r'Decode\(\{"jpg": function\}\)'),
        ("jpg", {}, r"by field, \{"),
        ({"JPG": ...}, {}, "lower case"),
        ({".jpg": ...}, {}, "without a dot"),
        ({"__key__": len}, {}, "not a name of a field"),
        ({"jpg": 224}, {}, "give a decoder, a function"),
        ({"cls": int, "cls;class": int}, {}, "two decoders make the field 'cls'"),
        (
            {"jpg": mm.ImageDecoder(size=8, tiles=mm.families.llava.LlavaNextTiles())},
            {},
            r"goes with Decode\(image=",
        ),
        ({}, {"image": 224}, r"image=mm.ImageDecoder\(size=224\)"),
        ({}, {"image": len}, r"by field"),
        ({}, {"text": "json.caption"}, 'field="json.caption"'),
        ({}, {"same_geometry": "jpg"}, "give names"),
        ({}, {"same_geometry": ("jpg", "mask.png")}, "'jpg' is not a picture"),
        ({"a.txt": TEXT, "b.txt": TEXT}, {}, "a second text decoder"),
        ({"a.txt": TEXT}, {"text": TEXT}, "a second text decoder"),
        ({"txt": mm.TextDecoder(byte_tokenizer(), field="json.a")}, {}, "leave out field="),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(
    fields: Any, settings: Any, advice: str
) -> None:
    with pytest.raises(mm.ConfigError, match=advice):
        mm.Decode(fields, **settings)


# -- by kind ---------------------------------------------------------------------------------------


def picture(value: int) -> bytes:
    return encoded(Image.new("RGB", (6, 4), (value, value, value)), "png")


def test_images_are_ordered_by_number_and_not_by_name() -> None:
    names = ["10.jpg", "2.png", "0.jpg", "mask.png", "jpg", "1.webp", "left.bmp", "2.gif"]
    fields = dict.fromkeys([*names, "json", "txt", "jpg.gz", "0.mp4", "__x.png"], b"")
    expected = ["jpg", "0.jpg", "1.webp", "2.gif", "2.png", "10.jpg", "left.bmp", "mask.png"]
    assert image_fields(fields) == expected
    assert image_fields({"jpeg": b"", "gif": b"", "bmp": b""}) == ["bmp", "gif", "jpeg"]


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
    fields: dict[str, bytes], message: str
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = mm.TextDecoder(tokenizer(template))
    with pytest.raises(mm.errors.DecodeError, match=rf"^s-0\.tar\[4\] 7\.{message}"):
        decode_sample(sample(**fields), mm.Decode(image=mm.ImageDecoder(), text=text))
