"""Options for media, from the call or the command line to the shards."""

from __future__ import annotations

import io
import json

import fsspec
import pytest
from click.testing import CliRunner
from PIL import Image

import mmstream as mm
from mmstream.cli import cli
from mmstream.converting.engines.ray import _require_same_libraries
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.decoding.image import planes
from mmstream.decoding.image.planes import is_built
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import open_store
from mmstream.tar.writer import TarWriter
from tests.helpers.convert_corpus import make_corpus, rejects, run, shards, write_rows

SMALL = mm.MediaOptions(max_image_side=16)


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path)


@pytest.mark.slow
def test_smaller_images_are_the_same_bytes_for_every_number_of_workers(corpus, tmp_path):
    for workers in (0, 2):
        run(corpus, tmp_path / f"out{workers}", num_workers=workers, media=SMALL)
    assert shards(tmp_path / "out0") == shards(tmp_path / "out2")
    dataset = mm.open_dataset(tmp_path / "out0")
    for i in range(len(dataset)):
        assert max(Image.open(io.BytesIO(dataset[i]["jpg"])).size) == 16


def test_a_conversion_goes_on_with_the_same_options_only(corpus, tmp_path):
    run(corpus, tmp_path / "out", media=SMALL)
    plan = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["source"]
    assert plan["media"]["max_image_side"] == 16
    assert set(plan["media"]["libraries"]) == {"pillow", "simplejpeg", "torch"}
    assert plan["media"]["compiled"] == is_built()
    assert run(corpus, tmp_path / "out", media=SMALL).was_finished
    for media in (None, mm.MediaOptions(max_image_side=17)):
        with pytest.raises(ConfigError, match="media was"):
            run(corpus, tmp_path / "out", media=media)


def test_resized_images_need_the_compiled_module_on_all_machines_or_on_none(
    corpus, tmp_path, monkeypatch
):
    run(corpus, tmp_path / "out", media=SMALL)
    plan = SMALL.plan()
    monkeypatch.setattr(planes, "is_built", lambda: not plan["compiled"])
    with pytest.raises(ConfigError, match=r"media was .*'compiled': .* and is now "):
        run(corpus, tmp_path / "out", media=SMALL)
    with pytest.raises(ConfigError, match="a node of Ray would write other images"):
        _require_same_libraries(SMALL, plan)
    _require_same_libraries(SMALL, SMALL.plan())


def test_default_options_copy_media_and_name_no_libraries(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    plan = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["source"]
    assert plan["media"] == {}
    assert (
        mm.open_dataset(tmp_path / "out")[0]["jpg"] == (tmp_path / "images" / "0.jpg").read_bytes()
    )


def test_the_flags_are_the_options(corpus, tmp_path):
    flags = "--max-image-side 16 --image-quality 80 --image-format webp --min-image-side 2"
    flags += " --max-aspect 9 --min-duration 0 --max-duration 5 --media-check full --num-workers 0"
    words = ["convert", str(corpus), str(tmp_path / "out"), *flags.split(), "--max-rejects", "50%"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["source"]
    del plan["media"]["libraries"], plan["media"]["compiled"]
    assert plan["media"] == {
        "check": "full",
        "max_image_side": 16,
        "image_quality": 80,
        "image_format": "webp",
        "min_image_side": 2,
        "max_aspect": 9.0,
        "min_duration_s": 0.0,
        "max_duration_s": 5.0,
    }
    assert set(mm.open_dataset(tmp_path / "out").manifest.fields) == {"webp", "txt", "json"}


def test_media_in_an_object_store_are_read_from_root_and_allowed_prefixes(tmp_path):
    image = io.BytesIO()
    Image.new("RGB", (8, 6)).save(image, "PNG")
    store = fsspec.filesystem("memory")
    store.pipe({"/photos/a.png": image.getvalue(), "/others/b.png": image.getvalue()})
    paths = ["a.png", "memory://others/b.png", "memory://third/c.png", "../others/b.png"]
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": p, "text": "t"} for p in paths])
    options = {"media_root": "memory://photos", "allow_urls": ["memory://others/"]}
    report = run(rows, tmp_path / "out", **options)
    assert (report.num_samples, report.num_rejects) == (2, 2)
    assert "--allow-url memory://third/" in rejects(tmp_path / "out")[3]
    assert "outside the media root" in rejects(tmp_path / "out")[4]
    store.rm("/", recursive=True)


@pytest.mark.s3
@pytest.mark.slow
def test_media_lie_in_a_real_bucket(s3, tmp_path):
    store = open_store(s3)
    image = io.BytesIO()
    Image.new("RGB", (8, 6)).save(image, "PNG")
    tar = io.BytesIO()
    writer = TarWriter(tar)
    writer.add("0001", {"png": image.getvalue()})
    writer.close()
    store.write("media/a b.png", image.getvalue())
    store.write("media/shard.tar", tar.getvalue())
    store.write("media/all.bin", b"junk" + image.getvalue())
    span = f"all.bin:4:{len(image.getvalue())}"
    paths = ["a b.png"] * 20 + [
        "tar://0001.png::shard.tar",
        span,
        "absent.png",
        f"{s3}/media/a b.png",
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": p, "text": "t"} for p in paths])
    report = run(rows, tmp_path / "out", media_root=f"{s3}/media")
    assert report.num_samples == 23
    assert rejects(tmp_path / "out") == {23: "absent.png: no such object"}
    absent_bucket = "s3://no-such-bucket/media"
    with pytest.raises(StorageError, match="no such bucket"):
        run(rows, tmp_path / "out2", media_root=absent_bucket)
    assert not (tmp_path / "out2" / MANIFEST_NAME).exists()
