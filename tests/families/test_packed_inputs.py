"""Flat batches give a model the loss and the gradients of documents that stand alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream import model_inputs
from mmstream.batching.flat import flatten
from mmstream.families.family import DocumentMedia
from mmstream.train.inputs import _with_document
from tests.helpers.families import transformers
from tests.helpers.model_cases import CASES
from tests.helpers.packs import (
    HALF,
    assert_parity,
    batch_of,
    conversations,
    decode_and_model,
    llama,
    texts,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return conversations(tmp_path_factory.mktemp("chats"))


EVERY = [(name, "sdpa", "flat") for name in CASES if name != "gemma3"]
ROWS = [(name, "eager", "rows") for name in ("qwen2_vl", "qwen3_vl", "idefics3")]


@pytest.mark.parametrize(("name", "attention", "layout"), EVERY + ROWS)
def test_a_packed_batch_trains_as_its_documents_alone(
    name: str, attention: str, layout: Any, dataset: mm.Dataset
) -> None:
    decode, model = decode_and_model(name, attention)
    packed = batch_of(dataset, decode, mm.Flat(layout=layout))
    padded = batch_of(dataset, decode)
    assert_parity(
        model,
        model_inputs(packed, model, normalize=HALF),
        model_inputs(padded, model, normalize=HALF),
    )


@pytest.mark.parametrize(("attention", "layout"), [("sdpa", "flat"), ("eager", "rows")])
def test_packed_texts_train_a_llama_as_texts_alone(attention: str, layout: Any) -> None:
    model = llama()
    model.set_attn_implementation(attention)
    packed = texts(layout)
    ids, starts = packed["input_ids"].flatten(), packed["position_ids"].flatten() == 0
    documents = [
        document
        for document in torch.tensor_split(ids, torch.nonzero(starts).flatten()[1:])
        if (document != 0).any()  # rows end in padding documents
    ]
    assert [document.numel() for document in documents] == [5, 1, 9, 4, 2, 7]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = padded != 0
    labels = padded.masked_fill(~mask, -100)
    alone = {"input_ids": padded, "attention_mask": mask, "labels": labels, "use_cache": False}
    assert_parity(model, model_inputs(packed, model), alone)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_a_packed_batch_has_the_loss_of_its_documents_on_flex(
    name: str, dataset: mm.Dataset
) -> None:
    decode, model = decode_and_model(name, "sdpa")
    # transformers lets no Qwen-VL choose flex, but its text part runs on it.
    model.config.get_text_config()._attn_implementation_internal = "flex_attention"
    packed = model_inputs(batch_of(dataset, decode, mm.Flat()), model, normalize=HALF)
    padded = model_inputs(batch_of(dataset, decode), model, normalize=HALF)
    # Uncompiled, as compiling takes half a minute. On CPUs, flex has no backward pass.
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        loss = model(**packed).loss
        model.set_attn_implementation("sdpa")
        expected = model(**padded).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "idefics3", "gemma3"])
def test_a_flat_batch_without_pictures_gets_a_blank_one_as_a_document_of_its_own(
    name: str, layout: Any, tmp_path: Path
) -> None:
    dataset = conversations(tmp_path, [0] * 6)
    decode, model = decode_and_model(name, "sdpa")
    batch = batch_of(dataset, decode, mm.Flat(layout=layout))
    packed = model_inputs(batch, model)
    assert "attention_mask" not in packed
    assert packed["input_ids"].shape[1] > batch["input_ids"].shape[1]
    assert packed["input_ids"].shape == packed["labels"].shape
    loss = model(**packed).loss
    loss.backward()
    alone = model(**model_inputs(batch_of(dataset, decode), model, blank_image=False)).loss
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)
    weights = [weight for name, weight in model.named_parameters() if "vis" in name]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("layout", "bounds", "documents"),
    [
        ("flat", [0, 3, 4, 4, 4, 4, 4, 6], [[0, 0, 0, 1, 2, 2]]),
        ("rows", [0, 3, 5, 6, 8, 8, 8, 8, 10], [[0, 0, 0, 1, 1], [2, 3, 3, 4, 4]]),
    ],
)
def test_a_blank_picture_keeps_the_number_of_documents(
    layout: Any, bounds: list[int], documents: list[list[int]]
) -> None:
    samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
    batch = flatten(samples, [0, 1], 2, mm.Flat(layout=layout, pad_documents_to=6))
    text, row = _with_document(batch, [1, 2])
    assert text["cu_seq_lens_q"].tolist() == text["cu_seq_lens_k"].tolist() == bounds
    assert text["document_ids"].tolist() == documents
    assert text["input_ids"][row, -2:].tolist() == [1, 2]


# -- models of text -------------------------------------------------------------------------------


def test_a_model_of_text_takes_padded_and_flat_batches() -> None:
    model = llama()
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    padded = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}
    assert model_inputs(padded, model).keys() == padded.keys()
    flat = model_inputs(texts(), model)
    assert flat.keys() == {"input_ids", "position_ids", "labels", "use_cache"}
    assert flat["use_cache"] is False
    assert model_inputs(texts(), "llama").keys() == flat.keys()


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_rows_that_are_not_valid_have_no_labels(layout: Any) -> None:
    batch = texts(layout, valid=[True, False, True])
    labels = model_inputs(batch, llama())["labels"]
    invalid = (batch["document_row"] == 1)[batch["document_ids"].long()]
    assert labels.shape == batch["input_ids"].shape
    assert (labels[invalid] == -100).all()
    assert torch.equal(labels[~invalid], batch["labels"][~invalid])


def flash_llama() -> Any:
    config = llama().config
    config._attn_implementation_internal = "flash_attention_2"
    return config


@pytest.mark.parametrize("make", [flash_llama, transformers.Qwen3NextConfig])
def test_flash_attention_and_layers_with_a_state_get_the_lengths_of_documents(make: Any) -> None:
    batch = texts()
    inputs = model_inputs(batch, make())
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 19, 21, 28]
    assert inputs["cu_seq_lens_k"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 16
    if make is transformers.Qwen3NextConfig:  # which has layers with a state
        assert inputs["seq_idx"].dtype == torch.int32
        assert inputs["seq_idx"].tolist() == batch["document_ids"].tolist()


def test_a_text_model_reads_the_text_row_of_positions_with_four_rows() -> None:
    batch = texts()
    expected = batch["position_ids"]
    batch["position_ids"] = torch.stack([expected, *[expected + 3] * 3])
    assert torch.equal(model_inputs(batch, llama())["position_ids"], expected)


# -- what is refused ------------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "have 3 rows; qwen2_vl tells documents apart by four": (
        "qwen2_vl",
        lambda batch: batch | {"position_ids": batch["position_ids"].expand(3, 1, -1)},
    ),
    "cu_seq_lens_q, and no position_ids": (
        "llama",
        lambda batch: {name: batch[name] for name in batch if name != "position_ids"},
    ),
    r"sdpa attention compares all 16,800 tokens .* layout": (
        "llama",
        lambda batch: (
            batch | {n: batch[n].repeat(1, 600) for n in ("input_ids", "labels", "document_ids")}
        ),
    ),
    "bloom takes no position_ids": ("bloom", dict),
    "in flat batches with pictures, gemma3 of": (
        "gemma3",
        lambda batch: batch | {"image": torch.zeros(1, 3, 224, 224)},
    ),
    "paligemma lets the prefixes of a row see each other": ("paligemma", dict),
    **{
        f"{family} takes one sample a row": (family, dict)
        for family in ("clip", "siglip", "whisper", "vit")
    },
}
"""Part of the message -> a family, and what becomes of a flat batch of texts."""


@pytest.mark.parametrize("message", REFUSED)
def test_a_flat_batch_that_a_model_cannot_take_is_refused(message: str) -> None:
    family, change = REFUSED[message]
    model = llama() if family == "llama" else family
    with pytest.raises(mm.ConfigError, match=message):
        model_inputs(change(texts()), model)


# -- positions of several dimensions ---------------------------------------------------------------

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
IMAGE, VIDEO = 90, 91


def make_config(family: str) -> Any:
    config = transformers.CONFIG_MAPPING[family]()
    config.image_token_id, config.video_token_id = IMAGE, VIDEO
    return config


def document(
    rng: np.random.Generator, rule: mm.families.qwen_vl.QwenVLPositions, num_media: int
) -> tuple[np.ndarray, DocumentMedia]:
    """A text with so many pictures and videos, in any order."""
    side = rule.patch_size * rule.merge_size
    ids = [rng.integers(1, 80, rng.integers(1, 6))]
    media = DocumentMedia([], [], [])
    for _ in range(num_media):
        height, width = (int(n) for n in rng.integers(1, 5, 2) * side)
        num_tokens = height * width // side**2
        if rng.random() < 0.6:
            media.images.append((height, width))
            ids.append(np.full(num_tokens, IMAGE))
        else:
            num_frames = int(rng.integers(1, 9))
            media.videos.append((num_frames, height, width))
            media.fps.append(float(rng.choice([0.5, 1.0, 2.0, 24000 / 1001, 30.0])))
            for _ in range(-(-num_frames // rule.temporal_patch_size)):
                stamp = rng.integers(1, 80, 3 if rule.has_split_videos else 0)
                ids += [stamp, np.full(num_tokens, VIDEO)]
        ids.append(rng.integers(1, 80, rng.integers(1, 6)))
    return np.concatenate(ids), media


def positions_of_transformers(
    config: Any, ids: np.ndarray, media: DocumentMedia
) -> list[list[int]]:
    kind = transformers.MODEL_MAPPING[type(config)]
    model = kind.__new__(kind)  # without weights: the rule reads the config only
    model.__dict__["config"] = config
    patch, group = config.vision_config.patch_size, config.vision_config.temporal_patch_size
    images = [(1, height // patch, width // patch) for height, width in media.images]
    videos = [(-(-n // group), *(side // patch for side in size)) for n, *size in media.videos]
    given = {
        "image_grid_thw": torch.tensor(images) if images else None,
        "video_grid_thw": torch.tensor(videos) if videos else None,
        "second_per_grid_ts": (group / torch.tensor(media.fps).double()).float(),
    }
    given = {name: value for name, value in given.items() if value is not None and len(value)}
    input_ids = torch.from_numpy(ids)[None]
    kinds = (input_ids == IMAGE).long() + 2 * (input_ids == VIDEO)
    positions, _ = model.get_rope_index(input_ids=input_ids, mm_token_type_ids=kinds, **given)
    return positions[:, 0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: str) -> None:
    config = make_config(family)
    rule = pickle.loads(pickle.dumps(mm.families.qwen_vl.QwenVLPositions.from_config(config)))
    rng = np.random.default_rng(0)
    for number in range(45):
        ids, media = document(rng, rule, num_media=number % 9)
        assert rule(ids, media).tolist() == positions_of_transformers(config, ids, media)


def test_a_flat_batch_has_four_rows_of_positions() -> None:
    rule = mm.families.qwen_vl.QwenVLPositions.from_config(make_config("qwen2_5_vl"))
    rng = np.random.default_rng(1)
    samples: list[dict[str, Any]] = []
    expected = []
    for number in range(4):
        ids, media = document(rng, rule, number)
        images = [torch.empty(3, *size, dtype=torch.uint8) for size in media.images]
        videos = [torch.empty(n, 3, *size, dtype=torch.uint8) for n, *size in media.videos]
        times = [np.arange(len(video)) / fps for video, fps in zip(videos, media.fps, strict=True)]
        samples.append({"input_ids": ids, "image": images, "video": videos, "video_pts_s": times})
        if number % 2:
            samples[-1]["video_fps"] = np.array(media.fps)
        else:  # the rate is that of the times; of a single frame it is 1
            media = media._replace(
                fps=[f if len(v) > 1 else 1.0 for v, f in zip(videos, media.fps)]
            )
        expected.append(rule(ids, media))
    batch = flatten(samples, range(4), 4, mm.Flat(positions=rule, pad_to_multiple_of=64))
    positions = batch["position_ids"].numpy()
    assert positions.shape == (4, 1, batch["input_ids"].shape[1])
    borders = batch["cu_seq_lens_q"].tolist()
    for number, rows in enumerate(expected):
        start, stop = borders[number : number + 2]
        assert positions[0, 0, start:stop].tolist() == list(range(stop - start))
        assert positions[1:, 0, start:stop].tolist() == rows.tolist()
    padding = positions[:, 0, borders[4] : borders[5]]
    assert (padding == np.arange(padding.shape[1])).all()


@pytest.mark.parametrize("num_tokens", [0, 2, 5])
def test_a_text_with_other_tokens_than_its_media_is_refused(num_tokens: int) -> None:
    rule = mm.families.qwen_vl.QwenVLPositions(
        image_token_id=IMAGE, video_token_id=VIDEO, patch_size=14
    )
    ids = np.array([1, *[IMAGE] * num_tokens, 2])
    with pytest.raises(mm.ConfigError, match=r"1 pictures and 0 videos take: give TextDecoder"):
        rule(ids, DocumentMedia([(56, 56)], [], []))


def test_another_family_is_refused() -> None:
    with pytest.raises(mm.ConfigError, match="llava is none of qwen2_vl"):
        mm.families.qwen_vl.QwenVLPositions.from_config(transformers.CONFIG_MAPPING["llava"]())


def test_positions_may_begin_at_two() -> None:
    samples = [{"input_ids": np.arange(3)}, {"input_ids": np.arange(2)}]
    batch = flatten(samples, [0, 1], 2, mm.Flat(first_position=2))
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
