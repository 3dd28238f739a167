"""Videos decoded on the device: the same rows, times and frames as on the CPU, nearly its pixels.

Without a GPU our own decoder, or torchcodec on the CPU, stands in for NVDEC.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.video.encoded import EncodedVideo, encode_video
from mmstream.device import nvdec
from mmstream.device.nvdec import DecodeClip, no_gpu_reason, torchcodec_frames
from mmstream.errors import ConfigError
from mmstream.integrations.videos import videos_of as videos_for_model
from mmstream.loader.batch_transport import SentBatch
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.clips import PyavFrames, decoders, on_device, pyav
from tests.helpers.corpora import write_corpus
from tests.helpers.media_files import video_file

CODECS: dict[str, dict[str, Any]] = {
    "h264": {"b_frames": 2},
    "h265": {"codec": "libx265", "b_frames": 2},
    "vp8": {"kind": "mkv", "codec": "libvpx"},
    "vp9": {"kind": "webm"},
    "mpeg4": {"kind": "avi"},
    "turned": {"rotation": 90},
}


def clips(number: int) -> dict[str, bytes]:
    """The fields of a sample: no video, one, or two, of several kinds."""
    file = {"num_frames": 12 + number, "b_frames": 2, "first_number": 20 * number}
    kinds: list[dict[str, Any]] = [{"kind": "mp4"}, {"kind": "mkv", "width": 96}]
    if number == 2:
        kinds = [{"kind": "mkv", "codec": "mjpeg", "pixel_format": "yuvj420p", "b_frames": 0}]
    files = {f"{i}.{kind['kind']}": video_file(**file | kind) for i, kind in enumerate(kinds)}
    fields = {"txt": f"clip number {number}".encode(), "json": json.dumps({"n": number}).encode()}
    return fields | ({} if number == 5 else dict(list(files.items())[: 1 + number % 2]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("clips"), [5, 3], clips)


def make_pipeline(url: str, device: str = "cuda", **settings: Any) -> mm.Pipeline:
    names = ("decode", "batching", "transforms")
    given = {name: settings.pop(name) for name in names if name in settings}
    video = mm.VideoDecoder(device=device, **{"num_frames": 3, **settings})
    given.setdefault("decode", mm.Decode(video=video))
    policy = mm.BadSamplePolicy(quarantine=None, max_fraction=1)
    dataset = mm.open_dataset(url)
    return mm.Pipeline(dataset, global_batch_size=4, seed=1, bad_samples=policy, **given)


def batches(
    pipeline: mm.Pipeline,
    device: str = "cpu",
    decode_clip: DecodeClip | None = pyav,
    num_workers: int = 0,
    **settings: Any,
) -> tuple[list[dict[str, Any]], Any]:
    """The batches of an epoch, and the loader's counts."""
    loader = mm.Loader(pipeline, num_workers=num_workers, world=mm.World(0, 1))
    try:
        moved = mm.to_device(loader, device, decode_clip=decode_clip, **settings)
        return list(moved), loader.stats
    finally:
        loader.close()


def videos_of(batch: dict[str, Any], name: str = "video") -> list[torch.Tensor]:
    """The frames of each video."""
    value = batch[name]
    if isinstance(value, torch.Tensor):
        value = value.split(batch[f"{name}_frames"].tolist())
    return [video.cpu() for video in value]


def assert_alike(
    one: dict[str, Any], other: dict[str, Any], most: float, mean: float = 0.0
) -> None:
    """Batches are the same but for levels of pixels, at most or in the mean."""
    assert one.keys() == other.keys()
    assert one["__key__"] == other["__key__"]
    lineages = one["__lineage__"], other["__lineage__"]
    assert lineages[0].shown == lineages[1].shown
    assert lineages[0].valid == lineages[1].valid
    for name, value in other.items():
        if isinstance(value, torch.Tensor) and name != "video":
            assert torch.equal(one[name].cpu(), value), name
    assert isinstance(one["video"], type(other["video"]))
    for video, expected in zip(videos_of(one), videos_of(other), strict=True):
        assert (video.shape, video.dtype) == (expected.shape, expected.dtype)
        difference = (video.float() - expected.float()).abs()
        assert float(difference.max()) <= most or float(difference.mean()) <= mean


@decoders
@pytest.mark.parametrize(
    "settings", [{"size": 40, "crop": "random", "flip": 0.5}, {}], ids=["one size", "several"]
)
def test_batches_are_those_of_the_cpu_and_pixels_nearly(
    corpus: str, settings: dict[str, Any], device: str, decode_clip: DecodeClip | None
) -> None:
    expected, _ = batches(make_pipeline(corpus, "cpu", **settings))
    found, stats = batches(make_pipeline(corpus, **settings), device, decode_clip)
    for one, other in zip(found, expected, strict=True):
        # A wrong frame differs by more: it shows another number.
        assert_alike(one, other, 1 if settings else 0, mean=0 if device == "cpu" else 6)
        if settings:
            assert one["video"].is_contiguous(memory_format=torch.channels_last)
            assert one["video"].device.type == device
    assert stats.cpu_videos == {"codec mjpeg": 1}
    assert stats.num_gpu_videos == sum(len(batch["video_row"]) for batch in found) - 1


@decoders
def test_every_codec_has_the_frames_of_the_cpu(device: str, decode_clip: DecodeClip | None) -> None:
    """AV1 and MPEG-4 are left out on GPUs, some of which do not decode them.

    All take the others from 144 pixels up.
    """
    numbers = (0, 5, 11)
    settings = {"indices": numbers, "span": None}
    for name, file in CODECS.items():
        if device == "cuda" and name == "mpeg4":
            continue
        data = video_file(**file, num_frames=12, width=192, height=160)
        decoder = mm.VideoDecoder(**settings, device="cuda")
        limits = decoder.start_limits()
        video = encode_video(data, "mp4", decoder, decoder.plan(data, limits=limits), limits)
        assert isinstance(video, EncodedVideo), name
        frames = on_device(video, decode_clip or torchcodec_frames, device).cpu()
        expected = torch.from_numpy(mm.VideoDecoder(**settings)(data)).permute(0, 3, 1, 2)
        assert frames.shape == expected.shape, name
        difference = (frames.float() - expected.float()).abs().mean(dim=(1, 2, 3))
        # Two other frames of these files differ by 30 levels and more.
        assert float(difference.max()) <= (0 if device == "cpu" else 6), name


def test_clips_cross_processes_in_one_piece(corpus: str) -> None:
    batch = next(iter(mm.Loader(make_pipeline(corpus), num_workers=0, world=mm.World(0, 1))))
    sent = SentBatch(batch, BatchMemory(shared=True), receiver=0)
    _, (_, pickled, _, (_, blocks, _)) = sent.__reduce__()
    assert len(blocks) == 1
    assert len(pickled) < 20_000


def test_frames_are_normalised_on_the_way(corpus: str) -> None:
    normalize = mm.Normalize(mean=0.5, std=0.5)
    expected, _ = batches(make_pipeline(corpus, "cpu", size=40), normalize=normalize)
    found, _ = batches(make_pipeline(corpus, size=40), normalize=normalize)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, 1.1 / 127.5)


def test_videos_by_field_go_the_same_way(tmp_path: Path) -> None:
    files = {"mp4": video_file("mp4"), "wide.mkv": video_file("mkv", width=96)}
    url = write_corpus(tmp_path, [4], lambda number: files)
    for size in (32, None):
        found, expected = (
            batches(
                make_pipeline(
                    url,
                    decode=mm.Decode(
                        {"wide.mkv": mm.VideoDecoder(num_frames=2, size=size, device=device)},
                        video=mm.VideoDecoder(num_frames=3, size=24),
                    ),
                )
            )[0]
            for device in ("cuda", "cpu")
        )
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one["video"], other["video"])
            assert torch.equal(one["wide.mkv_row"], other["wide.mkv_row"])
            for video, wanted in zip(videos_of(one, "wide.mkv"), videos_of(other, "wide.mkv")):
                assert int((video.int() - wanted.int()).abs().max()) <= 1


def test_without_a_gpu_the_cpu_decodes_and_says_so_once(
    corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = batches(make_pipeline(corpus, "cpu", size=40))
    pipeline = make_pipeline(corpus, size=40)
    loader = mm.Loader(pipeline, num_workers=0, world=mm.World(0, 1))
    moved = mm.to_device(loader, "cpu")
    with caplog.at_level(logging.WARNING, "mmstream"):
        for one, other in zip(moved, expected, strict=True):
            assert_alike(one, other, 0)
        epoch = [record.getMessage() for record in caplog.records]
        list(moved)  # another epoch
    reason = 'to_device has the device "cpu"'
    of_decoder = [
        message for message in epoch if message.startswith('VideoDecoder(device="cuda"): ')
    ]
    assert of_decoder == [
        f'VideoDecoder(device="cuda"): {reason}, so this process decodes all videos on the CPU, '
        'one after the other: give it a CUDA device; or give VideoDecoder(device="cpu"), and the '
        "workers decode them"
    ]
    firsts = [message for message in epoch if "decoded on the CPU in place of the GPU" in message]
    assert len(firsts) == 2  # one of each reason
    assert (
        sum(message.endswith(("mjpeg; " + COUNTED, f"{reason}; {COUNTED}")) for message in firsts)
        == 2
    )
    num_videos = sum(len(batch["video_row"]) for batch in expected)
    assert epoch[-1] == (
        "after epoch 0, since the loader was made: the GPU decoded 0 videos, and the CPU "
        f"{num_videos} ({num_videos - 1}: {reason}, 1: codec mjpeg)"
    )
    later = [record.getMessage() for record in caplog.records][len(epoch) :]
    assert len(later) == 1
    assert later[0].startswith("after epoch 1, ")
    assert loader.stats.num_gpu_videos == 0


COUNTED = "others are only counted, see loader.stats.cpu_videos"


@pytest.mark.parametrize(
    ("module", "reason", "advice"),
    [
        (None, "torchcodec is not installed", "pip install torchcodec"),
        (
            SimpleNamespace(ffmpeg_major_version=None),
            "torchcodec does not load",
            "the shared libraries of FFmpeg, such as Debian's ffmpeg (it finds no FFmpeg)",
        ),
    ],
    ids=["absent", "no ffmpeg"],
)
def test_without_torchcodec_it_says_what_to_install(
    module: object,
    reason: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", module)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    assert no_gpu_reason(torch.device("cuda")) == reason
    (message,) = caplog.messages
    assert reason in message
    assert advice in message


class FakeTorchcodec:
    """Its decoder of a clip with ten frames from 2 s on. The last one has no duration."""

    cpu_fallback: Any = ""
    error = ""
    late_s = 0.0
    metadata = SimpleNamespace(begin_stream_seconds=2.0, end_stream_seconds=2.36)

    def __init__(self, file: torch.Tensor, **settings: Any) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def __len__(self) -> int:
        return 10

    def get_frames_at(self, numbers: list[int]) -> Any:
        times_s = torch.tensor(numbers, dtype=torch.float64) / 25 + 2 + self.late_s
        data = torch.tensor(numbers).view(-1, 1, 1, 1).expand(-1, 3, 4, 6)
        return SimpleNamespace(data=data, pts_seconds=times_s)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({}, ""),
        ({"late_s": 0.015}, ""),
        ({"late_s": 0.04}, "NVDEC shows other frames than these"),
        ({"cpu_fallback": "Video not supported"}, "NVDEC does not take this codec, size or"),
        ({"cpu_fallback": "NVcuvid unavailable"}, "libnvcuvid.so, is missing"),
        ({"error": "file.cpp:87, Unsupported device: cuda"}, "is built without CUDA"),
        ({"error": "Could not open"}, "Could not open"),
    ],
    ids=str,
)
def test_frames_of_torchcodec_are_taken_where_they_are_those_of_the_gpu(
    behaviour: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = type("Decoder", (FakeTorchcodec,), behaviour)
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(VideoDecoder=decoder))
    monkeypatch.setattr(nvdec, "GROUP_PIXELS", 2 * 4 * 6)
    frames = torchcodec_frames(
        torch.zeros(9, dtype=torch.uint8), (0, 3, 3, 7, 9), (4, 6), torch.device("cpu")
    )
    if reason:
        with pytest.raises(RuntimeError, match=reason):
            list(frames)
    else:
        groups = list(frames)
        assert [len(group) for group in groups] == [2, 2, 1]
        assert torch.cat(groups)[:, 0, 0, 0].tolist() == [0, 3, 3, 7, 9]


def test_what_the_gpu_refuses_the_cpu_decodes(corpus: str) -> None:
    refuses = PyavFrames(refused="no frame 12 of 30\nand more")
    expected, _ = batches(make_pipeline(corpus, "cpu"))
    found, stats = batches(make_pipeline(corpus), decode_clip=refuses)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, 0)
    num_refused = stats.cpu_videos["no frame N of N"]
    assert num_refused > 0
    assert stats.num_gpu_videos > 0
    assert stats.num_gpu_videos + stats.cpu_videos.total() == sum(
        len(batch["video_row"]) for batch in found
    )


def test_frames_of_another_size_are_not_believed(corpus: str) -> None:
    def turned(*arguments: Any) -> Any:
        return (frames.mT for frames in pyav(*arguments))

    expected, _ = batches(make_pipeline(corpus, "cpu"))
    found, stats = batches(make_pipeline(corpus), decode_clip=turned)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, 0)
    assert stats.cpu_videos["the GPU makes frames of another size"]


def test_a_gpu_without_memory_ends_the_run(corpus: str) -> None:
    def without_memory(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory.")

    with pytest.raises(RuntimeError, match="out of memory"):
        batches(make_pipeline(corpus), decode_clip=without_memory)


def test_a_video_that_nobody_can_decode_makes_its_row_invalid(tmp_path: Path) -> None:
    whole = video_file("mp4", num_frames=30, gop=30, moov_first=True)
    damaged = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
    url = write_corpus(
        tmp_path, [4], lambda number: {"mp4": damaged if number == 2 else whole, "txt": b"a"}
    )
    (batch,), stats = batches(make_pipeline(url, size=32), decode_clip=pyav_strict)
    row = batch["__key__"].index("000002")
    assert batch["__valid__"].tolist() == [number != row for number in range(4)]
    (record,) = batch["__lineage__"].bad
    assert (record.index, record.substitute, record.kind) == (2, None, "DecodeError")
    assert "[2] 000002.mp4: in the packets that were left to the GPU: " in record.reason
    assert int(videos_of(batch)[row].max()) == 0
    assert (stats.num_bad, stats.num_gpu_videos, stats.cpu_videos) == (1, 3, {})


def pyav_strict(*arguments: Any) -> Any:
    try:
        yield from pyav(*arguments)
    except mm.DecodeError as error:
        raise RuntimeError(str(error)) from error


def test_a_run_goes_on_where_it_stopped(corpus: str) -> None:
    pipeline = make_pipeline(corpus, size=40)
    expected, _ = batches(pipeline)
    loader = mm.Loader(pipeline, num_workers=0, world=mm.World(0, 1))
    next(iter(mm.to_device(loader, "cpu", decode_clip=pyav)))
    resumed = mm.Loader(pipeline, num_workers=0, world=mm.World(0, 1))
    resumed.load_state_dict(loader.state_dict())
    (second,) = mm.to_device(resumed, "cpu", decode_clip=pyav)
    assert_alike(second, expected[1], 0)


def test_a_batch_can_be_cut_before_and_after(corpus: str) -> None:
    pipeline = make_pipeline(corpus, size=40)
    loader = mm.Loader(pipeline, num_workers=0, world=mm.World(0, 1))
    host = next(iter(loader))
    device = next(iter(batches(pipeline)[0]))
    for one, other in zip(mm.split_rows(host, 2), mm.split_rows(device, 2), strict=True):
        assert len(one["video"]) == len(one["video_row"]) == len(other["video_row"])
        assert [len(video) for video in one["video"]] == other["video_frames"].tolist()


def test_a_flat_batch_takes_clips_for_videos(corpus: str) -> None:
    expected, found = (
        batches(
            make_pipeline(
                corpus,
                decode=mm.Decode(
                    text=mm.TextDecoder(byte_tokenizer()),
                    video=mm.VideoDecoder(num_frames=2, size=32, device=device),
                ),
                batching=mm.Flat(),
            ),
            decode_clip=PyavFrames(refused="an odd one"),
        )[0]
        for device in ("cpu", "cuda")
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["video_document"], other["video_document"])
        assert int((one["video"].int() - other["video"].int()).abs().max()) <= 1
    refused = [video for batch in found for video in batch["__lineage__"].cpu_videos]
    assert all(re.fullmatch(r"shard-00000\d\.tar\[\d\] .*\.(mp4|mkv)", v.address) for v in refused)
    assert {video.reason for video in refused} == {"an odd one", "codec mjpeg"}


def test_clips_are_shown_on_the_cpu_and_given_to_no_model(corpus: str) -> None:
    pipeline = make_pipeline(corpus)
    sample = pipeline.take(1)[0]
    videos = sample["video"] if isinstance(sample["video"], list) else [sample["video"]]
    assert all(video.decode().dtype == torch.uint8 for video in videos)
    batch = next(iter(mm.Loader(pipeline, num_workers=0, world=mm.World(0, 1))))
    message = r"holds clips that VideoDecoder\(device=\"cuda\"\) leaves to the GPU"
    with pytest.raises(ConfigError, match=message):
        videos_for_model(batch, "video", lambda frames: frames)


def test_what_cannot_wait_for_the_gpu_refuses_it(corpus: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(corpus)
    with pytest.raises(ConfigError, match=r"bake: videos are stored decoded"):
        mm.bake(pipeline, tmp_path / "baked", progress=False)
    decode = mm.Decode(
        text=mm.TextDecoder(byte_tokenizer()),
        video=mm.VideoDecoder(device="cuda"),
    )
    with pytest.raises(ConfigError, match=r"a video that is found damaged on the GPU"):
        make_pipeline(corpus, decode=decode, batching=mm.Pack(max_tokens=64))
