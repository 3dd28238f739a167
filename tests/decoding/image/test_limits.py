"""Limits on what strangers write into images: scans, chunks, memory, time."""

from __future__ import annotations

import io
import multiprocessing
import re
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.decoding.sample import SampleDecoding, decode_sample
from mmstream.media import image, limits, orientation, pillow
from mmstream.media.limits import MAX_MEMORY, Deadline
from tests.helpers.bad_corpus import make_pipeline
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.image_bombs import (
    BOMBS,
    END,
    TABLES,
    bomb_cost,
    chunk,
    cost,
    empty_scan,
    in_header,
    many_scans,
    png_of,
    progressive,
    segment,
)
from tests.helpers.pictures import JPEG, PNG, encoded, photo
from tests.helpers.topology import run

MIB = 2**20
NEVER = Mock(side_effect=AssertionError("decoded"))


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    """Another process, whose memory is measured."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is measured on Linux only")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


# ---- bombs


UNTIMED = mm.ImageDecoder(size=16, timeout_s=None)
"""For what a busy machine may take long to decode."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_decodes_within_the_limits(
    name: str, child: ProcessPoolExecutor
) -> None:
    outcome, peak_bytes, total_bytes = child.submit(bomb_cost, name).result()
    reason = BOMBS[name].reason
    if reason is None:
        assert outcome == "(224, 224, 3)"
    else:
        assert outcome.startswith("DecodeError: ")
        assert re.search(reason, outcome)
        assert outcome.isprintable()
    assert peak_bytes <= MAX_MEMORY + 32 * MIB
    assert total_bytes <= 1.2e9


def _is_refused(data: bytes) -> bool:
    try:
        UNTIMED(data)
    except mm.errors.DecodeError:
        return True
    return False


# ---- scans of a JPEG


def test_bytes_that_look_like_scans_are_not_counted() -> None:
    scans = b"\xff\xda" * 20_000
    picture = progressive(64, 64, empty_scan(64, 64) * 9)
    expected = mm.ImageDecoder()(picture)
    behind = picture + scans
    in_front = in_header(picture, segment(0xE1, b"Exif\0\0" + scans))
    between = progressive(64, 64, segment(0xFE, scans) + empty_scan(64, 64) * 9)
    for data in (behind, in_front, between):
        np.testing.assert_array_equal(mm.ImageDecoder()(data), expected)


def test_scans_are_counted_exactly_up_to_the_limit() -> None:
    comment = segment(0xFE, b"\xff\xda" * 1000)
    for count, is_refused in ((image.MAX_SCANS - 1, False), (image.MAX_SCANS, True)):
        data = progressive(64, 64, comment + empty_scan(64, 64) * count)  # and one of DC
        assert _is_refused(data) == is_refused


@pytest.mark.parametrize(
    "data",
    [
        many_scans(64, 501).removesuffix(END),
        progressive(64, 64, TABLES * image.MAX_MARKERS + segment(0xFE, b"\xff\xda" * 500)),
    ],
    ids=["a file that ends early", "more markers than are looked at"],
)
def test_too_many_scans_are_counted_in_odd_files_too(data: bytes) -> None:
    with pytest.raises(mm.errors.DecodeError, match="more than 500 scans"):
        mm.ImageDecoder()(data)


def test_fewer_pixels_allow_more_scans() -> None:
    data = many_scans(256, 99)
    assert mm.ImageDecoder(max_pixels=256 * 256 * 4)(data).shape == (256, 256, 3)
    with pytest.raises(mm.errors.DecodeError, match="more than 96 scans in a picture of 256x256"):
        mm.ImageDecoder(max_pixels=256 * 256 * 3)(data)


# ---- metadata


@pytest.mark.parametrize("junk", [b"\xff", b"\xff\0", b"\0"])
def test_junk_in_a_header_is_skipped_up_to_the_limit(junk: bytes) -> None:
    few, many = (
        in_header(JPEG, junk * ((image.MAX_JUNK_BYTES + more) // len(junk))) for more in (-64, 64)
    )
    np.testing.assert_array_equal(mm.ImageDecoder()(few), mm.ImageDecoder()(JPEG))
    with pytest.raises(mm.errors.DecodeError, match="junk in the header"):
        mm.ImageDecoder()(many)


def test_limits_on_headers_hold_where_only_the_shape_is_asked_for() -> None:
    decoder = mm.ImageDecoder(resize="max_pixels")
    for name in ("jpeg: 8M empty segments", "png: 2M empty chunks", "gif: a million comments"):
        assert decoder.prepared_shape(BOMBS[name].make()) is None


# ---- memory

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), dtype=np.uint8))
ALPHA = NOISE.copy()
ALPHA.putalpha(NOISE.convert("L"))


def turned(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif.tobytes()


IN_BANDS = {
    **{f"turned {value}": encoded(photo(), "png", exif=turned(value)) for value in range(2, 9)},
    **{mode: encoded(photo().convert(mode), "png") for mode in ("1", "L", "LA", "RGB", "RGBA")},
    "16 bits": encoded(Image.fromarray(np.asarray(photo().convert("L"), np.uint16) * 257), "png"),
    "a clear colour": encoded(photo().convert("P"), "png", transparency=3),
    "CMYK": encoded(photo().convert("CMYK"), "jpeg"),
}


@pytest.mark.parametrize("name", IN_BANDS)
def test_large_pictures_are_turned_and_converted_in_bands_to_the_same_pixels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mm.ImageDecoder()(IN_BANDS[name])
    for module, band, size in ((orientation, "BAND_ROWS", 7), (pillow, "BAND_PIXELS", 90 * 7)):
        monkeypatch.setattr(module, "WHOLE_PIXELS", 1)
        monkeypatch.setattr(module, band, size)
    np.testing.assert_array_equal(mm.ImageDecoder()(IN_BANDS[name]), whole)


FORMATS: dict[str, tuple[Callable[[], bytes], int]] = {
    "JPEG": (partial(encoded, NOISE, "jpeg"), 3),
    "JPEG, rotated": (partial(encoded, NOISE, "jpeg", exif=turned(6)), 6),
    "JPEG, progressive": (partial(encoded, NOISE, "jpeg", progressive=True), 6),
    "JPEG, progressive 4:4:4": (
        partial(encoded, NOISE, "jpeg", progressive=True, subsampling=0),
        9,
    ),
    "JPEG, CMYK": (lambda: encoded(NOISE.convert("CMYK"), "jpeg"), 11),
    "PNG": (partial(encoded, NOISE, "png"), 7),
    "PNG, grey": (lambda: encoded(NOISE.convert("L"), "png"), 4),
    "PNG, alpha": (partial(encoded, ALPHA, "png"), 7),
    "GIF": (lambda: encoded(NOISE.convert("P"), "gif"), 5),
    "BMP": (partial(encoded, NOISE, "bmp"), 7),
    "WebP": (partial(encoded, NOISE, "webp", lossless=True, method=0), 17),
    "WebP, alpha": (partial(encoded, ALPHA, "webp", method=0), 17),
    "AVIF": (partial(encoded, NOISE, "avif", speed=10, subsampling="4:4:4"), 24),
    "AVIF, alpha": (partial(encoded, ALPHA, "avif", speed=10), 24),
}
"""The bytes per pixel that docs/decoder-safety.md states for each format."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_stated_memory_is_what_a_decoding_needs(name: str, child: ProcessPoolExecutor) -> None:
    make, bytes_per_pixel = FORMATS[name]
    data = make()
    copies = 4 * len(data) if name.startswith(("WebP", "AVIF")) else 0
    need = bytes_per_pixel * 2048 * 2048 + copies
    with pytest.raises(mm.errors.DecodeError, match=f"2048x2048 needs .* max_memory={need - 1}"):
        mm.ImageDecoder(max_memory=need - 1)(data)
    decoder = mm.ImageDecoder(max_memory=need, timeout_s=None)
    outcome, peak_bytes, _ = child.submit(cost, data, decoder).result()
    assert outcome == "(2048, 2048, 3)"
    assert peak_bytes <= need + 8 * MIB


def test_memory_counts_at_the_scale_that_is_decoded() -> None:
    data = encoded(NOISE, "jpeg")
    assert mm.ImageDecoder(size=224, max_memory=10**6)(data).shape == (224, 224, 3)
    rotated = encoded(NOISE, "png", exif=turned(6))
    for decoder, file in (
        (mm.ImageDecoder(size=224, max_memory=10**6, scaled_decoding=False), data),
        (mm.ImageDecoder(size=8192, max_memory=100 * MIB), rotated),  # turning and resizing
    ):
        with pytest.raises(mm.errors.DecodeError, match="max_memory"):
            decoder(file)


# ---- time


@pytest.mark.parametrize("format", ["jpeg", "png", "gif", "bmp", "webp", "avif"])
def test_a_decoding_that_takes_too_long_is_refused(format: str) -> None:
    data = encoded(photo(), format)
    with pytest.raises(
        mm.errors.TimeoutError, match=r"^decoding takes longer than timeout_s=1e-09$"
    ):
        mm.ImageDecoder(timeout_s=1e-9)(data)
    assert mm.ImageDecoder(timeout_s=None)(data).shape == (60, 90, 3)


@pytest.fixture
def time_ends_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Let the time of a decoding end at a read of Pillow. Gives the sizes of all reads."""

    def end_at(number: int) -> list[int]:
        reads: list[int] = []

        def read(file, size=-1, real=pillow._LimitedFile.read):
            reads.append(size)
            if len(reads) >= number:
                file._limits = file._limits._replace(deadline=Deadline(30, 0))
            return real(file, size)

        monkeypatch.setattr(pillow._LimitedFile, "read", read)
        return reads

    return end_at


def test_a_decoding_is_ended_on_its_way(time_ends_at: Callable[[int], list[int]]) -> None:
    reads = time_ends_at(100)
    with pytest.raises(mm.errors.TimeoutError):
        mm.ImageDecoder()(BOMBS["bmp: lines that are filled"].make())
    assert len(reads) == 100


def test_a_sample_that_takes_too_long_is_bad_and_says_so(
    tmp_path: Path, time_ends_at: Callable[[int], list[int]]
) -> None:
    time_ends_at(1)  # JPEGs are not read by Pillow
    corpus = write_corpus(tmp_path, [4], lambda n: captioned(n) | ({"jpg": PNG} if n == 2 else {}))
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    pipeline = make_pipeline(corpus, shuffle=False, decode=decode, global_batch_size=4)
    (step,) = run(pipeline).steps
    (bad,) = step.bad
    assert (bad.kind, bad.index) == ("TimeoutError", 2)
    assert bad.reason.endswith(".jpg: decoding takes longer than timeout_s=30")


# ---- shape


@pytest.mark.parametrize("shape", [(1, 2**27), (2**27, 1), (1, 65_536), (65_536, 1)])
def test_a_side_that_is_too_long_is_refused_by_the_header(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pillow.ImageFile.ImageFile, "load", NEVER)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", shape[1], shape[0], 1, 0, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT") + chunk(b"IEND")
    with pytest.raises(mm.errors.DecodeError, match="exceeds 65535 pixels on a side"):
        mm.ImageDecoder()(data)


@pytest.mark.parametrize("shape", [(1, 65_535), (65_535, 1)])
def test_the_longest_sides_decode(shape: tuple[int, int]) -> None:
    assert mm.ImageDecoder()(png_of(*shape)).shape == (*shape, 3)


@pytest.mark.parametrize("shape", [(4, 60_000), (60_000, 4)])
@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_a_result_that_is_too_large_is_refused_before_decoding(
    shape: tuple[int, int], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(Image.new("L", shape), format)
    monkeypatch.setattr(pillow.ImageFile.ImageFile, "load", NEVER)
    monkeypatch.setattr(image.simplejpeg, "decode_jpeg", NEVER)
    for scaled in (True, False):
        with pytest.raises(mm.errors.DecodeError, match="exceeds max_pixels"):
            mm.ImageDecoder(size=224, scaled_decoding=scaled)(data)


# ---- all images of a sample


def test_the_results_of_a_sample_share_the_memory() -> None:
    images = {"__key__": "s", **{f"{n}.jpg": JPEG for n in range(9)}}
    results = 60 * 90 * 3 * 9
    less = mm.Decode(image=mm.ImageDecoder(max_memory=results - 1))
    with pytest.raises(
        mm.errors.DecodeError, match=r"^s\.[1-8]\.jpg: picture of 90x60 needs .* before it"
    ):
        decode_sample(images, less)
    enough = mm.Decode(image=mm.ImageDecoder(max_memory=results + 60 * 90 * 9))
    assert len(decode_sample(images, enough)["image"]) == 9


def test_too_many_images_of_one_size_are_refused_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mm.ImageDecoder, "decode_planned", NEVER)
    images = {f"{n}.jpg": JPEG for n in range(8000)}
    decode = mm.Decode(image=mm.ImageDecoder(size=224))
    with pytest.raises(
        mm.errors.DecodeError, match=r"^s: 8000 images of 224x224 need 1148 MiB, more than"
    ):
        decode_sample({"__key__": "s", **images}, decode)


def test_the_images_of_a_sample_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(limits.time, "thread_time", lambda: next(clock))
    decode = mm.Decode(image=mm.ImageDecoder(timeout_s=50))
    assert "image" in decode_sample({"__key__": "s", "0.png": PNG}, decode)
    images = {f"{n:02}.png": PNG for n in range(50)}
    with pytest.raises(
        mm.errors.TimeoutError, match=r"^s\.\d\d\.png: decoding takes longer than timeout_s=50"
    ):
        decode_sample({"__key__": "s", **images}, decode)


def test_the_time_of_a_picture_starts_when_its_decoding_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=8, timeout_s=30))
    sample = {"__key__": "k", "jpg": JPEG}
    now = 0.0
    monkeypatch.setattr(limits.time, "thread_time", lambda: now)

    def planned() -> SampleDecoding:
        decoding = SampleDecoding(sample, decode)
        decoding.plan_pictures()
        return decoding

    out = {"image": [torch.empty((8, 8, 3), dtype=torch.uint8)]}
    good, late = planned(), planned()
    now = 1000.0
    good.decode_picture(*good.early_fields, out)
    clock = iter((0.0, 31.0))
    monkeypatch.setattr(limits.time, "thread_time", lambda: next(clock))
    late.decode_picture(*late.early_fields, out)
    assert good.finish()["image"].data_ptr() == out["image"][0].data_ptr()
    with pytest.raises(
        mm.errors.TimeoutError, match=r"^k\.jpg: decoding takes longer than timeout_s=30$"
    ):
        late.finish()


# ---- settings


@pytest.mark.parametrize(
    "settings", [{"max_memory": 0}, {"max_memory": 1.5}, {"timeout_s": 0}, {"timeout_s": -1.0}]
)
def test_impossible_limits_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(mm.ConfigError, match=next(iter(settings))):
        mm.ImageDecoder(**settings)


def test_the_time_of_an_avif_is_that_of_the_thread_that_decodes_it() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "AVIF", quality=90, speed=10)
    shares = []
    for _ in range(3):  # other threads of this process may compute meanwhile
        thread_s, process_s = time.thread_time(), time.process_time()
        mm.ImageDecoder().decode(file.getvalue())
        thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
        shares.append(thread_s / process_s)
    assert max(shares) > 0.8
