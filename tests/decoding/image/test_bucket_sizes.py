"""Pictures of the size of their bucket, with masks and boxes, and where they were cropped."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.converting.sidecar import write_sidecars
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.pictures import encoded
from tests.helpers.topology import assert_resumes_exactly

SIZES = [(100, 60), (60, 100), (80, 82), (200, 50), (48, 80)]
"""(width, height)."""

EDGES = mm.aspect_edges(64, multiple_of=16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    def fields(number: int) -> dict[str, bytes]:
        width, height = SIZES[number % len(SIZES)]
        mask = Image.new("L", (width, height), number)
        boxes = [[0, 0, width, height]]
        return {
            "jpg": jpeg(number, (width, height)),
            "mask.png": encoded(mask, "PNG"),
            "json": json.dumps({"boxes": boxes}).encode(),
        }

    folder = str(tmp_path_factory.mktemp("buckets") / "corpus")
    write_corpus(folder, [20, 20, 20], fields)
    write_sidecars(mm.open_dataset(folder))
    return folder


def pipeline(corpus: str, decode: mm.Decode, **settings: Any) -> mm.Pipeline:
    batching = mm.Buckets("aspect", edges=EDGES, min_steps=1)
    settings = {"global_batch_size": 4, "batching": batching, "decode": decode, **settings}
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def of_image(**settings: Any) -> mm.Decode:
    return of_decoder(mm.ImageDecoder(size="bucket", **settings))


def of_decoder(image: mm.ImageDecoder) -> mm.Decode:
    return mm.Decode({"mask.png": mm.ImageDecoder(size=8, mask=True)}, image=image)


def test_a_batch_has_the_size_of_its_bucket(corpus: str) -> None:
    plain = pipeline(corpus, of_image(scaled_decoding=False))
    shapes = set()
    for batch in mm.Loader(plain, num_threads=2):
        step = batch["__lineage__"].step
        height, width = plain.order.edge(0, step)  # type: ignore[attr-defined]
        assert batch["image"].shape == (4, 3, height, width)
        shapes.add((height, width))
        for n, ref in enumerate(batch["__lineage__"].shown):
            number = 20 * ref[0] + ref[1]
            picture_width, picture_height = SIZES[number % len(SIZES)]
            assert batch["image_size"][n].tolist() == [picture_height, picture_width]
            sized = mm.ImageDecoder(size=(height, width), scaled_decoding=False)
            alone = sized(jpeg(number, (picture_width, picture_height)))
            assert torch.equal(batch["image"][n], torch.from_numpy(alone).permute(2, 0, 1))
            scale = max(height / picture_height, width / picture_width)
            margins = np.array([picture_height, picture_width]) * scale - [height, width]
            assert np.abs(batch["image_crop"][n].numpy() - margins / 2).max() <= 1
    assert shapes == {(48, 80), (80, 48), (64, 64), (32, 128)}


def test_random_crops_masks_and_boxes_follow(corpus: str) -> None:
    decode = mm.Decode(
        {
            "jpg": mm.ImageDecoder(size="bucket", crop="random", flip=0.5),
            "mask.png": mm.ImageDecoder(mask=True),
            "boxes": mm.Boxes("json.boxes", format="xyxy"),
        },
        same_geometry=("jpg", "mask.png", "boxes"),
    )
    for batch in mm.Loader(pipeline(corpus, decode)):
        height, width = batch["jpg"].shape[2:]
        assert batch["mask.png"].shape == (4, height, width)
        assert batch["jpg_size"].shape == batch["jpg_crop"].shape == (4, 2)
        assert "mask.png_size" not in batch
        for boxes in batch["boxes"]:
            assert boxes.tolist() == [[0, 0, width, height]]
    assert_resumes_exactly(lambda: mm.Loader(pipeline(corpus, decode)))


def test_shapes_that_are_joined_are_a_warning(
    corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mmstream"):
        _ = pipeline(corpus, of_image(), batching=mm.Buckets("aspect", edges=EDGES)).order
    assert "buckets of aspect: " in caplog.text
    assert "too few for min_steps=4 steps" in caplog.text


@pytest.mark.slow
def test_workers_and_ranks_have_the_same_pixels(corpus: str) -> None:
    decode = of_decoder(mm.ImageDecoder(size="bucket"))
    whole = {b["__lineage__"].step: b["image"] for b in mm.Loader(pipeline(corpus, decode))}
    for rank in range(2):
        loader = mm.Loader(pipeline(corpus, decode), num_workers=2, world=mm.World(rank, 2))
        with closing(loader):
            for batch in loader:
                of_step = whole[batch["__lineage__"].step]
                assert torch.equal(batch["image"], of_step[2 * rank : 2 * rank + 2])


def test_a_bucket_is_needed_for_its_size(corpus: str) -> None:
    decoder = mm.ImageDecoder(size="bucket")
    assert decoder.output_shape is None
    with pytest.raises(mm.ConfigError, match="the size is that of a step"):
        decoder(jpeg(0))
    for batching in (None, mm.Buckets("aspect", edges=[0.5, 2])):
        with pytest.raises(mm.ConfigError, match=r"takes the size from batching=mm\.Buckets"):
            pipeline(corpus, of_image(), batching=batching)
    for settings in ({"crop": None}, {"resize": "native"}, {"resize_size": 40}):
        with pytest.raises(mm.ConfigError):
            mm.ImageDecoder(size="bucket", **settings)  # type: ignore[arg-type]
    with pytest.raises(mm.ConfigError, match='or "bucket"'):
        mm.ImageDecoder(size="buckets")  # type: ignore[arg-type]
    samples = pipeline(corpus, of_image()).take(3)
    assert {sample["image"].shape[0] for sample in samples} == {3}


def test_an_epoch_without_buckets_cannot_end_with_their_size(corpus: str) -> None:
    plain = mm.Loader(pipeline(corpus, of_decoder(mm.ImageDecoder(size=64)), batching=None))
    states = [plain.state_dict() for _ in plain]
    loader = mm.Loader(pipeline(corpus, of_image()), on_change="finish_epoch")
    loader.load_state_dict(states[0])
    with pytest.raises(mm.ConfigError, match="planned without buckets"):
        next(iter(loader))


def test_a_file_of_a_made_name_is_a_bad_sample(tmp_path: Path) -> None:
    folder = str(tmp_path / "corpus")
    write_corpus(folder, [8], lambda n: {"jpg": jpeg(n), "image_crop": b"x"})
    write_sidecars(mm.open_dataset(folder))
    policy = mm.BadSamplePolicy(action="raise")
    loader = mm.Loader(
        pipeline(folder, mm.Decode(image=mm.ImageDecoder(size="bucket")), bad_samples=policy)
    )
    with pytest.raises(mm.SampleError, match="image_crop: the decoder makes a field of this name"):
        list(loader)
