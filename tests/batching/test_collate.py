"""Collating: what stacks is a tensor, what does not is a list, and no sample breaks a batch."""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

import mmstream as mm
from mmstream import Decode, ImageDecoder, TextDecoder
from mmstream.errors import ConfigError
from tests.helpers.bad_corpus import make_pipeline
from tests.helpers.chats import PARTS, assistant, tokenizer, user
from tests.helpers.corpora import jpeg, write_corpus

LAST = torch.channels_last


def batch_of(name: str, *values: Any, **settings: Any) -> dict[str, Any]:
    """Collate a field; a value that is MISSING is not in its sample."""
    samples = [
        {"__key__": str(row)} | ({} if value is MISSING else {name: value})
        for row, value in enumerate(values)
    ]
    return mm.collate(samples, **settings)


MISSING = object()


def buffer(rows: int, height: int = 4, width: int = 6) -> torch.Tensor:
    count = rows * height * width * 3
    return torch.arange(count).remainder(251).to(torch.uint8).view(rows, height, width, 3)


def picture(number: int, height: int = 4, width: int = 6) -> torch.Tensor:
    return buffer(number + 1, height, width)[number].permute(2, 0, 1)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_one_buffer_become_a_batch_without_a_copy(rows):
    memory = buffer(rows)
    image = batch_of("image", *(row.permute(2, 0, 1) for row in memory))["image"]
    assert image.data_ptr() == memory.data_ptr()
    assert image.shape == (rows, 3, 4, 6)
    assert image.is_contiguous(memory_format=LAST)
    assert torch.equal(image, memory.permute(0, 3, 1, 2))


@pytest.mark.parametrize("rows", [[0, 2, 1], [1, 2, 3], [0, 0, 0], [0, 2], [3, 2, 1, 0]])
def test_rows_that_are_no_whole_buffer_in_order_are_right_too(rows):
    memory = buffer(4).permute(0, 3, 1, 2)
    image = batch_of("image", *(memory[row] for row in rows))["image"]
    assert torch.equal(image, memory[rows])
    assert image.is_contiguous(memory_format=LAST)


def test_a_substitute_from_elsewhere_is_copied_in():
    memory = buffer(3).permute(0, 3, 1, 2)
    other = picture(7)
    image = batch_of("image", memory[0], other, memory[2])["image"]
    assert torch.equal(image, torch.stack([memory[0], other, memory[2]]))
    assert image.is_contiguous(memory_format=LAST)


def test_crops_of_one_big_picture_are_not_mistaken_for_rows():
    big = buffer(1, 8, 6)[0].permute(2, 0, 1)
    parts = [big[:, :4], big[:, 4:]]
    assert torch.equal(batch_of("image", *parts)["image"], torch.stack(parts))
    columns = [big[:, :, :2], big[:, :, 2:4], big[:, :, 4:]]
    assert torch.equal(batch_of("image", *columns)["image"], torch.stack(columns))


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
def test_pictures_of_a_users_own_layout_come_out_channels_last(kind):
    memory = torch.rand(3, 3, 4, 6).mul(255).to(kind)
    image = batch_of("image", *memory)["image"]
    assert torch.equal(image, memory)
    assert image.is_contiguous(memory_format=LAST)


def test_pictures_of_different_shapes_are_a_list_with_their_rows():
    batch = batch_of("image", picture(0), picture(1, 5, 5), picture(2))
    assert [tuple(image.shape) for image in batch["image"]] == [(3, 4, 6), (3, 5, 5), (3, 4, 6)]
    assert batch["image_row"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        ([2, 1], [0, 0, 1]),
        ([0, 1, 3], [1, 2, 2, 2]),
        ([1, 0], [0]),
        ([2, 2], [0, 0, 1, 1]),
        ([0, 0], []),
    ],
)
def test_several_or_no_pictures_a_sample_are_numbered_by_row(counts, rows):
    numbers = iter(range(100))
    values = [[picture(next(numbers)) for _ in range(count)] for count in counts]
    batch = batch_of("image", *(v[0] if len(v) == 1 else v for v in values))
    assert batch["image_row"].tolist() == rows
    assert batch["image_row"].dtype == torch.int64
    flat = [image for value in values for image in value]
    assert len(batch["image"]) == len(flat)
    assert all(torch.equal(a, b) for a, b in zip(batch["image"], flat))
    assert isinstance(batch["image"], torch.Tensor) == bool(flat)


def test_a_sample_without_the_field_has_no_picture():
    batch = batch_of("image", MISSING, picture(1), None)
    assert batch["image_row"].tolist() == [1]
    assert batch["image"].shape == (1, 3, 4, 6)


@pytest.mark.parametrize("value", [b"raw", "text", Image.new("RGB", (2, 2)), 3, [b"a"]])
def test_an_image_field_of_something_else_is_a_list(value):
    batch = batch_of("image", value, picture(1))
    assert batch["image"][0] is value
    assert "image_row" not in batch


@pytest.mark.parametrize(
    ("side", "expected"),
    [("right", [[5, 6, 7], [8, 9, 9]]), ("left", [[5, 6, 7], [9, 9, 8]])],
)
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_tokens_are_padded_on_either_side(side, expected, kind):
    batch = batch_of("input_ids", kind([5, 6, 7]), kind([8]), pad_token_id=9, padding_side=side)
    assert batch["input_ids"].tolist() == expected
    assert batch["input_ids"].dtype == torch.int64


def test_masks_are_padded_with_zero_and_labels_with_what_a_loss_ignores():
    assert batch_of("attention_mask", [1, 1], [1])["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch_of("labels", [4, 4], [4])["labels"].tolist() == [[4, 4], [4, -100]]
    target = batch_of("labels", [4, 4], [4])["labels"]
    assert torch.nn.functional.cross_entropy(torch.zeros(2, 9, 2), target) > 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad_to", [1, 2, 3, 6])
def test_a_fixed_length_pads_and_cuts(side, pad_to):
    rows = [[1, 2, 3], [4], []]
    padded = batch_of("input_ids", *rows, pad_to=pad_to, padding_side=side)["input_ids"]
    for row, padded_row in zip(rows, padded.tolist(), strict=True):
        kept, fill = row[:pad_to], [0] * (pad_to - len(row))
        assert padded_row == (kept + fill if side == "right" else fill + kept)


def test_no_tokens_at_all_are_an_empty_tensor():
    assert batch_of("input_ids", [], [])["input_ids"].shape == (2, 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((3, 4), torch.tensor([3, 4])),  # class numbers
        ((1.5, 2), torch.tensor([1.5, 2.0])),
        ((np.ones((2, 2)),) * 2, torch.ones(2, 2, 2, dtype=torch.float64)),
        ((torch.tensor([0.5]),) * 2, torch.tensor([[0.5], [0.5]])),
    ],
)
def test_labels_that_are_no_tokens_are_stacked_as_any_field(values, expected):
    labels = batch_of("labels", *values)["labels"]
    assert torch.equal(labels, expected)
    assert labels.dtype == expected.dtype


@pytest.mark.parametrize("odd", ["text", b"bytes", 7, [0.5], np.ones((2, 2)), MISSING, None, {}])
@pytest.mark.parametrize("name", ["image", "input_ids", "labels", "other"])
def test_one_odd_sample_makes_a_list_and_breaks_nothing(name, odd):
    usual = picture(1) if name == "image" else np.array([1, 2])
    batch = batch_of(name, usual, odd, usual)
    if name == "image" and (odd is None or odd is MISSING):
        assert batch["image_row"].tolist() == [0, 2]
    elif name == "image" and isinstance(odd, np.ndarray):
        assert len(batch["image"]) == len(batch["image_row"]) == 3
    else:
        assert isinstance(batch[name], list)
        assert len(batch[name]) == 3
        collated = batch[name][1]
        assert (
            collated is None
            if odd is MISSING
            else np.array_equal(np.asarray(collated), np.asarray(odd))
        )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2), torch.tensor([1, 2])),
        ((1, 2.5), torch.tensor([1.0, 2.5])),
        ((True, False), torch.tensor([True, False])),
        ((True, 2), torch.tensor([1, 2])),
        ((np.int64(1), 2), torch.tensor([1, 2])),
        ((np.float64(0.5), np.float32(1)), torch.tensor([0.5, 1.0])),
        ((np.arange(3), np.arange(3)[::-1]), torch.tensor([[0, 1, 2], [2, 1, 0]])),
        ((torch.arange(2), np.arange(2)), torch.tensor([[0, 1], [0, 1]])),
        ((np.frombuffer(b"ab", np.uint8),) * 2, torch.tensor([[97, 98]] * 2, dtype=torch.uint8)),
        (
            (np.array(1.5), torch.tensor(1.5, dtype=torch.float64)),
            torch.tensor([1.5, 1.5], dtype=torch.float64),
        ),
    ],
)
def test_numbers_and_arrays_of_one_shape_are_stacked(values, expected):
    field = batch_of("x", *values)["x"]
    assert torch.equal(field, expected)
    assert field.dtype == expected.dtype


@pytest.mark.parametrize(
    "values",
    [
        ("", "text"),
        (b"", b"bytes"),
        ({"a": {"b": [1]}}, {"c": None}),
        ([1, 2], [3]),
        (1, None),
        (1, "1"),
        (2**70, 1),
        (-(2**63) - 1, 5),
        (None, None),
        ({}, {}),
    ],
)
def test_everything_else_is_a_list_as_it_came(values):
    assert batch_of("x", *values)["x"] == list(values)


@pytest.mark.parametrize(
    "values",
    [
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.array(["a"]), np.array(["b"])),
        (np.array([None]), np.array([1])),
        (np.zeros(2, dtype=">i4"),) * 2,
        (np.array("2020", "M8[D]"),) * 2,
    ],
)
def test_arrays_that_do_not_stack_are_a_list(values):
    field = batch_of("x", *values)["x"]
    assert isinstance(field, list)
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(field, values, strict=True))


def test_a_field_that_some_samples_lack_has_none_there():
    batch = mm.collate([{"__key__": "a", "x": 1}, {"__key__": "b", "y": "z"}])
    assert batch == {"x": [1, None], "y": [None, "z"]}


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=2), st.none()),
    st.sampled_from(
        [
            MISSING,
            picture(0),
            picture(0, 2, 2),
            [picture(0)],
            [picture(0), picture(1, 2, 2)],
            (),
            np.arange(3),
            np.arange(4.0),
            np.array("a"),
            np.float32(1),
            torch.ones(2, 2),
            np.arange(3)[::-1],
            np.array([None]),
            torch.tensor(True),
            [b"a", None],
        ]
    ),
)


@given(st.sampled_from(["image", "input_ids", "labels", "x"]), st.lists(values, min_size=1))
@example("x", [MISSING, MISSING])
def test_no_mixture_of_values_breaks_a_batch(name, column):
    batch = batch_of(name, *column)
    if "image_row" in batch:
        assert len(batch["image"]) == len(batch["image_row"])
    elif name in batch:
        assert len(batch[name]) == len(column)
    else:
        assert all(value is MISSING for value in column)


def test_a_users_own_collate_gets_the_samples_and_keeps_the_lineage(corpus):
    def keys_only(samples):
        return {"names": [s["__key__"] for s in samples], "__valid__": "overwritten"}

    for batch in mm.Loader(make_pipeline(corpus, collate=keys_only)):
        assert batch["names"] == batch["__key__"]
        assert batch["__valid__"].tolist() == [True] * 12
        assert set(batch) == {"names", "__key__", "__url__", "__valid__", "__lineage__"}


def test_a_collate_may_return_any_mapping(corpus):
    def wrapped(samples):
        return collections.UserDict(x=torch.zeros(len(samples)))

    batch = next(iter(mm.Loader(make_pipeline(corpus, collate=wrapped))))
    assert type(batch) is dict
    assert batch["x"].shape == (12,)


@pytest.mark.parametrize("value", [None, [1], torch.zeros(2)])
def test_a_collate_that_returns_no_dict_is_refused(corpus, value):
    with pytest.raises(ConfigError, match=f"collate returned {type(value).__name__}"):
        list(mm.Loader(make_pipeline(corpus, collate=lambda samples: value)))


def conversation(number: int) -> dict[str, bytes]:
    """So many pictures as the number says, modulo 3, and a turn for each or one without."""
    count = number % 3
    parts = [{"type": "image", "field": f"{n}.jpg"} for n in range(count)]
    question = [*parts, {"type": "text", "text": f"what {'is ' * (number % 4)}it?"}]
    row = {"messages": [user(question), assistant(f"number {number}")]}
    fields = {f"{n}.jpg": jpeg(10 * number + n) for n in range(count)}
    return {**fields, "json": json.dumps(row).encode()}


@pytest.mark.parametrize("size", [16, None])
@pytest.mark.parametrize("side", ["right", "left"])
def test_conversations_with_several_pictures_make_batches(tmp_path, size, side):
    corpus = write_corpus(tmp_path, [20, 16], conversation)
    words = tokenizer(PARTS, pad_token="<|endoftext|>", padding_side=side)
    decode = Decode(image=ImageDecoder(size=size), text=TextDecoder(words, max_length=200))
    pad_token_id = words.convert_tokens_to_ids("<|image_pad|>")
    num_seen = 0
    for batch in mm.Loader(make_pipeline(corpus, decode=decode)):
        numbers = [int(key) for key in batch["__key__"]]
        rows = [row for row, number in enumerate(numbers) for _ in range(number % 3)]
        assert batch["image_row"].tolist() == rows
        assert batch["image"].shape == (len(rows), 3, size or 30, size or 40)
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        assert ids.shape == mask.shape == labels.shape
        assert mask.sum(1).max() == ids.shape[1]
        assert (ids == pad_token_id).sum(1).tolist() == [number % 3 for number in numbers]
        edge = mask[:, -1] if side == "left" else mask[:, 0]
        assert edge.all()
        assert (ids[mask == 0] == words.pad_token_id).all()
        assert (labels[mask == 0] == -100).all()
        for row, number in enumerate(numbers):
            answer = words.decode(ids[row][labels[row] != -100])
            assert answer == f"number {number}<|im_end|>"
        num_seen += len(numbers)
    assert num_seen == 36


def test_captions_are_padded_to_the_fixed_length_that_the_decoder_names(corpus):
    text = TextDecoder(tokenizer(), max_length=10, padding="max_length")
    for batch in mm.Loader(make_pipeline(corpus, decode=Decode(text=text))):
        assert batch["input_ids"].shape == batch["labels"].shape == (12, 10)
        assert isinstance(batch["txt"], list)
        assert all(isinstance(data, bytes) for data in batch["jpg"])


@pytest.mark.parametrize("side", ["right", "left"])
def test_weights_of_labels_are_padded_with_zeros(side: str) -> None:
    samples: list[dict[str, Any]] = [
        {"labels": np.array([1, -100, 2]), "label_weights": np.array([0.5, 0, 2], np.float32)},
        {"labels": np.array([-100, 3])},
    ]
    batch = mm.collate(samples, pad_to=4, padding_side=side)
    rows = [[0.5, 0, 2, 0], [0, 1, 0, 0]] if side == "right" else [[0, 0.5, 0, 2], [0, 0, 0, 1]]
    assert batch["label_weights"].tolist() == rows
    assert batch["label_weights"].dtype == torch.float32
