"""Positions of Qwen-VL, value by value those of `transformers`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.batching.flat import flatten
from mmstream.families.family import DocumentMedia
from tests.helpers.families import transformers

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
