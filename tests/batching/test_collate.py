"""Collating: what stacks is a tensor, what does not is a list, and no sample breaks a batch."""

from __future__ import annotations

import collections
import enum
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

import mmstream as mm
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


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Length(float):
    """A float of a class of its own."""


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
    assert image.is_contiguous(memory_format=LAST)
    assert torch.equal(image, memory.permute(0, 3, 1, 2))


BUFFER = buffer(4).permute(0, 3, 1, 2)
BIG = buffer(1, 8, 6)[0].permute(2, 0, 1)


@pytest.mark.parametrize(
    "pictures",
    [
        *(
            [BUFFER[row] for row in rows]
            for rows in ([0, 2, 1], [1, 2, 3], [0, 0, 0], [3, 2, 1, 0])
        ),
        [BUFFER[0], picture(7), BUFFER[2]],  # a substitute from elsewhere
        [BIG[:, :4], BIG[:, 4:]],  # crops of one big picture
        [BIG[:, :, :2], BIG[:, :, 2:4], BIG[:, :, 4:]],
        [*torch.rand(3, 3, 4, 6)],  # of a user's own layout
        [*buffer(3).permute(0, 3, 1, 2).contiguous()],
    ],
)
def test_pictures_that_are_no_whole_buffer_in_order_are_right_too(pictures):
    image = batch_of("image", *pictures)["image"]
    assert torch.equal(image, torch.stack(pictures))
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
    flat = [picture(number) for number in range(len(rows))]
    images = iter(flat)
    values = [[next(images) for _ in range(count)] for count in counts]
    batch = batch_of("image", *(v[0] if len(v) == 1 else v for v in values))
    assert batch["image_row"].tolist() == rows
    assert batch["image_row"].dtype == torch.int64
    assert len(batch["image"]) == len(flat)
    assert all(torch.equal(a, b) for a, b in zip(batch["image"], flat))
    assert isinstance(batch["image"], torch.Tensor) == bool(flat)


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


@pytest.mark.parametrize(
    ("name", "fill"), [("attention_mask", 0), ("labels", torch.nn.CrossEntropyLoss().ignore_index)]
)
def test_masks_are_padded_with_zero_and_labels_with_what_a_loss_ignores(name, fill):
    assert batch_of(name, [1, 1], [1])[name].tolist() == [[1, 1], [1, fill]]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad_to", [1, 2, 3, 6])
def test_a_fixed_length_pads_and_cuts(side, pad_to):
    rows = [[1, 2, 3], [4], []]
    padded = batch_of("input_ids", *rows, pad_to=pad_to, padding_side=side)["input_ids"]
    for row, padded_row in zip(rows, padded.tolist(), strict=True):
        kept, fill = row[:pad_to], [0] * (pad_to - len(row))
        assert padded_row == (kept + fill if side == "right" else fill + kept)
    assert batch_of("input_ids", [], [])["input_ids"].shape == (2, 0)


@pytest.mark.parametrize("odd", ["text", b"bytes", 7, [0.5], np.ones((2, 2)), MISSING, None, {}])
@pytest.mark.parametrize("name", ["input_ids", "labels", "other"])
def test_one_odd_sample_makes_a_list_and_breaks_nothing(name, odd):
    usual = np.array([1, 2])
    column = batch_of(name, usual, odd, usual)[name]
    assert isinstance(column, list)
    assert len(column) == 3
    expected = None if odd is MISSING else odd
    assert np.array_equal(np.asarray(column[1]), np.asarray(expected))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2), torch.tensor([1, 2])),
        ((1, 2.5), torch.tensor([1.0, 2.5], dtype=torch.float64)),
        ((True, False), torch.tensor([True, False])),
        ((True, 2), torch.tensor([1, 2])),
        ((np.int64(1), 2), torch.tensor([1, 2])),
        ((np.float64(0.5), np.float32(1)), torch.tensor([0.5, 1.0], dtype=torch.float64)),
        ((np.float32(0.5), 1e300), torch.tensor([0.5, 1e300], dtype=torch.float64)),
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


@pytest.mark.parametrize("value", [1.7e9 + 0.125, 1e300, -7, True])
@pytest.mark.parametrize(
    "kind",
    [
        float,
        int,
        bool,
        Level,
        Length,
        np.float64,
        np.float32,
        np.float16,
        np.int64,
        np.int8,
        np.uint16,
        np.bool_,
    ],
)
@pytest.mark.parametrize("name", ["x", "labels"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_are_those_of_torchs_collate(name, kind, value):
    if issubclass(kind, int | np.integer):
        value = int(np.clip(value, 0, 1 if kind is Level else 100))
    expected = default_collate([kind(value)] * 2)
    field = batch_of(name, *[kind(value)] * 2)[name]
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
        (2**53 + 1, 0.5),
        (-(2**63) - 1, 5),
        (np.float32(1), None),
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


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
def test_a_users_own_collate_gets_the_samples_and_keeps_the_lineage(corpus, kind):
    def keys_only(samples):
        return kind({"names": [s["__key__"] for s in samples], "__valid__": "overwritten"})

    for batch in mm.Loader(make_pipeline(corpus, collate=keys_only)):
        assert type(batch) is dict
        assert batch["names"] == batch["__key__"]
        assert batch["__valid__"].tolist() == [True] * 12
        assert set(batch) == {"names", "__key__", "__url__", "__valid__", "__lineage__"}


@pytest.mark.parametrize("value", [None, [1], torch.zeros(2)])
def test_a_collate_that_returns_no_dict_is_refused(corpus, value):
    with pytest.raises(mm.ConfigError, match=f"collate returned {type(value).__name__}"):
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
    decode = mm.Decode(image=mm.ImageDecoder(size=size), text=mm.TextDecoder(words, max_length=200))
    pad_token_id = words.convert_tokens_to_ids("<|image_pad|>")
    num_seen = 0
    for batch in mm.Loader(make_pipeline(corpus, decode=decode)):
        numbers = [int(key) for key in batch["__key__"]]
        rows = [row for row, number in enumerate(numbers) for _ in range(number % 3)]
        assert batch["image_row"].tolist() == rows
        assert batch["image"].shape == (len(rows), 3, size or 30, size or 40)
        ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
        assert ids.shape == mask.shape == labels.shape
        assert mask.sum(1).max() == ids.shape[1]
        assert (ids == pad_token_id).sum(1).tolist() == [number % 3 for number in numbers]
        assert mask[:, -1 if side == "left" else 0].all()
        assert (ids[mask == 0] == words.pad_token_id).all()
        assert (labels[mask == 0] == -100).all()
        for row, number in enumerate(numbers):
            answer = words.decode(ids[row][labels[row] != -100])
            assert answer == f"number {number}<|im_end|>"
        num_seen += len(numbers)
    assert num_seen == 36


def test_captions_are_padded_to_the_fixed_length_that_the_decoder_names(corpus):
    text = mm.TextDecoder(tokenizer(), max_length=10, padding="max_length")
    for batch in mm.Loader(make_pipeline(corpus, decode=mm.Decode(text=text))):
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
