"""Random crops and flips: the sample's own draws, the same however the epoch is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.types import SampleLineage
from tests.helpers.corpora import captioned, write_corpus

RANDOM = mm.ImageDecoder(size=16, crop="random", flip=0.5)


def with_draw(sample: mm.sample.Sample) -> mm.sample.Sample:
    return {**sample, "draw": float(mm.sample_rng(sample).random())}


def make_pipeline(corpus: str, image: mm.ImageDecoder) -> mm.Pipeline:
    return mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=8,
        seed=3,
        decode=mm.Decode(image=image),
        transforms=(with_draw,),
    )


def epoch_of(
    pipeline: mm.Pipeline, state: dict[str, Any] | None = None, **how: Any
) -> dict[str, Any]:
    """Pictures and draws by key, of all ranks."""
    fields: dict[str, Any] = {}
    for rank in range(how.get("world_size", 1)):
        world = mm.World(rank=rank, world_size=how.get("world_size", 1))
        loader = mm.Loader(pipeline, num_workers=how.get("num_workers", 0), world=world)
        if state:
            loader.load_state_dict(state)
        for batch in loader:
            rows = zip(batch["__key__"], batch["image"].clone(), batch["draw"].tolist())
            fields |= {key: (image, draw) for key, image, draw in rows}
    return fields


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(some[key][0], others[key][0]) and some[key][1] == others[key][1] for key in some
    )


def test_crops_are_the_same_on_every_topology_and_after_a_resume(tmp_path: Any) -> None:
    pipeline = make_pipeline(write_corpus(tmp_path, [20, 20]), RANDOM)
    plain = epoch_of(pipeline)
    assert len(plain) == 40
    assert same(plain, epoch_of(pipeline, world_size=2))
    assert same(plain, epoch_of(pipeline, num_workers=2))
    loader = mm.Loader(pipeline, num_workers=0)
    reader = iter(loader)
    seen = {key for _ in range(2) for key in next(reader)["__key__"]}
    rest = epoch_of(pipeline, loader.state_dict(), world_size=2)
    assert same(rest, {key: plain[key] for key in plain.keys() - seen})


def test_crops_change_from_epoch_to_epoch(tmp_path: Any) -> None:
    loader = mm.Loader(make_pipeline(write_corpus(tmp_path, [16]), RANDOM), num_workers=0)
    first, second = (
        {k: image for b in loader for k, image in zip(b["__key__"], b["image"].clone())}
        for _ in range(2)
    )
    assert first.keys() == second.keys()
    assert sum(torch.equal(first[key], second[key]) for key in first) < 4


def test_a_transforms_draws_do_not_depend_on_the_decoders(tmp_path: Any) -> None:
    corpus = write_corpus(tmp_path, [16])
    random, fixed = (
        epoch_of(make_pipeline(corpus, one)) for one in (RANDOM, mm.ImageDecoder(size=16))
    )
    assert {k: v[1] for k, v in random.items()} == {k: v[1] for k, v in fixed.items()}
    assert not same(random, fixed)


def test_several_pictures_of_a_sample_are_drawn_one_after_another() -> None:
    picture = captioned(1)["jpg"]
    lineage = SampleLineage(shard=0, index=0)
    sample = {"__key__": "0", "0.jpg": picture, "1.jpg": picture, "__lineage__": lineage}
    decoded = decode_sample(sample, mm.Decode(image=RANDOM))
    rng = mm.sample_rng(sample, "image")
    for image in decoded["image"]:
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), RANDOM(picture, rng=rng))
    assert not torch.equal(*decoded["image"])


def test_a_random_decoder_without_a_stream_is_a_config_error() -> None:
    picture = captioned(1)["jpg"]
    with pytest.raises(mm.ConfigError, match="rng"):
        RANDOM(picture)
    with pytest.raises(mm.ConfigError, match="lineage"):
        decode_sample({"__key__": "0", "jpg": picture}, mm.Decode(image=RANDOM))


def test_tiles_arrive_with_their_counts_and_the_pictures_own_sizes(tmp_path: Any) -> None:
    decoder = mm.ImageDecoder(size=16, tiles=mm.families.internvl.InternVLTiles(max_tiles=4))
    pipeline = mm.Pipeline(
        mm.open_dataset(write_corpus(tmp_path, [8])),
        global_batch_size=4,
        decode=mm.Decode(image=decoder),
    )
    for batch in mm.Loader(pipeline, num_workers=0):  # pictures of 40x30 become 2x1 tiles, or 2x2
        counts, sizes = batch["image_tiles"], batch["image_size"]
        assert counts.shape == (4, 1)
        assert sizes.tolist() == [[[30, 40]]] * 4
        assert batch["image"].shape == (int(counts.sum()), 3, 16, 16)
        rows = torch.repeat_interleave(torch.arange(4), counts[:, 0])
        assert torch.equal(batch["image_row"], rows)


def test_a_sample_without_pictures_has_no_tiles() -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=16, tiles=mm.families.internvl.InternVLTiles()))
    decoded = decode_sample({"__key__": "0", "txt": b"words"}, decode)
    assert decoded["image"] == []
    assert decoded["image_tiles"].shape == (0,)
    assert decoded["image_size"].shape == (0, 2)
