"""The cases whose batches are held: each writes a small corpus and returns how it is read.

They are those of the list "the cases that it must carry" in the design of decoding, by its numbers,
and one with bad samples of every kind. A case uses what users use: `mm.Pipeline` and its settings.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.bad_corpus import FAULTS
from tests.helpers.chats import VICUNA, assistant, user
from tests.helpers.corpora import write_corpus
from tests.helpers.families import FAMILIES, native
from tests.helpers.media_families import qwen2_vl
from tests.helpers.media_files import audio_file, frame_pixels, video_file
from tests.helpers.model_cases import internvl_family, llava_family, llava_next_family
from tests.helpers.paths import DATA, PHOTOS
from tests.helpers.pictures import encoded

Fields = dict[str, bytes]
Sample = dict[str, Any]

RANDOM = mm.ImageDecoder(size=(24, 32), crop="random", flip=0.5)
TEXT = mm.TextDecoder(byte_tokenizer(), max_length=48)
SOUND = mm.AudioDecoder(sample_rate=8000)
TOLERANT = mm.BadSamplePolicy(max_fraction=1.0, max_consecutive=0, max_length_error_fraction=1.0)
SETTINGS: dict[str, Any] = {
    "global_batch_size": 4,
    "seed": 7,
    "window": 8,
    "bad_samples": TOLERANT,
}


@dataclass(frozen=True)
class Run:
    """A pipeline, and what it is read with."""

    pipeline: mm.Pipeline
    num_workers: tuple[int, ...] = (0, 1)
    rows_per_rank: list[int] | None = None
    stall_warning_s: float = 60


def run(
    folder: Path,
    fields_of: Callable[[int], Fields],
    decode: mm.Decode | None,
    *,
    count: int = 12,
    storage_kind: Any = "local",
    **settings: Any,
) -> Run:
    """Write a corpus of two shards, and return a pipeline over it."""
    corpus = write_corpus(folder, [count // 2, count - count // 2], fields_of)
    dataset = mm.open_dataset(corpus, storage_kind=storage_kind)
    return Run(mm.Pipeline(dataset, decode=decode, **SETTINGS | settings))


# -- files: the same bytes, or pixels, on every machine -------------------------------------------

HUGE_BYTES = 2 << 30
"""Size of a file that is read by ranges. It is sparse: nearly nothing of it is on the disk."""


def photo(number: int) -> bytes:
    """Return a JPEG of a camera, about 288 pixels wide."""
    return PHOTOS[number % len(PHOTOS)].read_bytes()


def png(number: int, height: int = 72, width: int = 100) -> bytes:
    """Return a PNG that shows a number."""
    return encoded(Image.fromarray(frame_pixels(number, height, width)), "png")


def picture(number: int) -> tuple[str, bytes, tuple[int, int]]:
    """Return extension, content, and (height, width): PNG and JPEG in turn."""
    if number % 2:
        data = photo(number)
        width, height = Image.open(io.BytesIO(data)).size
        return "jpg", data, (height, width)
    return "png", png(number), (72, 100)


def mask(number: int, shape: tuple[int, int]) -> bytes:
    """Return a PNG of class numbers, 0 to 6."""
    return encoded(Image.fromarray(frame_pixels(number, *shape)[..., 0] // 33), "png")


def cut(data: bytes) -> bytes:
    """Return a file whose header is right, and whose last third is missing."""
    return data[: len(data) * 2 // 3]


def with_late_exif(data: bytes, orientation: int) -> bytes:
    """Return a PNG whose orientation stands behind its pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return data[:-12] + chunk + data[-12:]


def turned(number: int) -> tuple[str, bytes]:
    """Return extension and content of a picture that its metadata turns."""
    odd = DATA / "odd_images"
    files = {
        "png": with_late_exif(png(number), number % 8 + 1),
        "jpg": photo(number) if number % 2 else (odd / "hopper_orientation_6.jpg").read_bytes(),
        "webp": (odd / "hopper_orientation_5.webp").read_bytes(),
    }
    return list(files.items())[number % 3]


def clip(number: int, *, audio_codec: str | None = "aac", faststart: bool = False) -> bytes:
    """Return a video of 64 x 48 pixels, 10 frames a second, whose frames show their numbers."""
    return video_file(
        "mp4",
        num_frames=8 + number % 5,
        audio_codec=audio_codec,
        first_number=10 * number,
        moov_first=faststart,
    )


def recording(number: int, kind: str = "wav") -> bytes:
    """Return a recording of a tone, 0.3 to 0.7 seconds long."""
    return audio_file(kind, seconds=0.3 + 0.1 * (number % 5))


def captioned(number: int, **fields: bytes) -> Fields:
    """Return a sample with a text, a number, and some more files."""
    text = f"caption {number} " + "word " * (number % 7)
    return {**fields, "txt": text.encode(), "json": json.dumps({"id": number}).encode()}


def chat(number: int, *media: tuple[str, str]) -> bytes:
    """Return the ``json`` of a conversation about some (kind, field)."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"question {number} "}]
    for kind, field in media:
        parts += [{"type": kind, "field": field}, {"type": "text", "text": f" and {field} "}]
    answer = assistant([{"type": "text", "text": "so it is" + " and more" * (number % 4)}])
    return json.dumps({"messages": [user(parts), answer]}).encode()


def array(number: int) -> bytes:
    """Return a ``.npy`` file."""
    file = io.BytesIO()
    np.save(file, np.arange(4, dtype=np.float32) + number)
    return file.getvalue()


def write_huge(path: Path, count: int) -> Path:
    """Write a tar of videos, the first of which is followed by 2 GB of nothing inside its file."""
    with path.open("wb") as out:
        for number in range(count):
            data = clip(number, faststart=True)
            size = HUGE_BYTES if number == 0 else len(data) + 16
            free = struct.pack(">I4sQ", 1, b"free", size - len(data))
            _write_member(out, f"{number:06d}.mp4", data + free, size)
            _write_member(out, f"{number:06d}.txt", b"a clip", 6)
        out.write(bytes(1024))
    return path


def _write_member(out: Any, name: str, start: bytes, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    out.write(info.tobuf(tarfile.USTAR_FORMAT))
    out.write(start)
    out.seek(-(-size // 512) * 512 - len(start), io.SEEK_CUR)
    out.truncate()


# -- pictures -------------------------------------------------------------------------------------


def lists(folder: Path) -> Run:
    """Samples of one to three pictures, PNG and JPEG, with random crops."""

    def fields_of(number: int) -> Fields:
        pictures = (picture(number + i) for i in range(1 + number % 3))
        return captioned(number) | {
            f"{i}.{kind}": data for i, (kind, data, _) in enumerate(pictures)
        }

    return run(folder, fields_of, mm.Decode(image=RANDOM))


def followers(folder: Path, name: str, follower: Any) -> Run:
    """A mask, boxes or points that follow a PNG or a JPEG."""

    def fields_of(number: int) -> Fields:
        kind, data, shape = picture(number)
        boxes = [[4 * i, 3 * i + number, 20 + i, 10 + 2 * i] for i in range(number % 4)]
        places = json.dumps({"boxes": boxes, "points": [box[:2] for box in boxes]})
        return {kind: data, "mask.png": mask(number, shape), "json": places.encode()}

    fields = {"png;jpg": RANDOM, name: follower}
    return run(folder, fields_of, mm.Decode(fields, same_geometry=("png", name)))


def late_exif(folder: Path) -> Run:
    """Pictures that are turned by what stands behind their pixels, or before them."""
    return run(folder, lambda i: captioned(i) | dict([turned(i)]), mm.Decode(image=RANDOM))


def some_cut(number: int, every: int = 4) -> Fields:
    """A photograph with a caption; of some only the header is right."""
    data = photo(number)
    return captioned(number, jpg=cut(data) if number % every == 1 else data)


def masked_rows(folder: Path) -> Run:
    """Bad rows of a fixed shape keep their memory and are marked; the last step has few rows."""
    decode = mm.Decode(image=mm.ImageDecoder(size=32), text=TEXT)
    settings = {"bad_samples": replace(TOLERANT, action="mask"), "drop_last": False}
    return run(folder, some_cut, decode, count=14, **settings)


class Negative(mm.ImageDecoder):
    """A decoder of the user."""

    def decode(self, *arguments: Any, **settings: Any) -> Any:
        """Return the negative of a picture."""
        decoded = super().decode(*arguments, **settings)
        decoded.pixels[...] = 255 - decoded.pixels
        return decoded


def sums_of_limits(folder: Path) -> Run:
    """One to three pictures of a sample fit into its memory, and four do not."""

    def fields_of(number: int) -> Fields:
        return captioned(number) | {f"{i}.png": png(i, 200, 300) for i in range(1 + number % 4)}

    return run(folder, fields_of, mm.Decode(image=mm.ImageDecoder(max_memory=900_000)))


# -- texts that count pictures and videos ---------------------------------------------------------


def of_family(folder: Path, family: Callable[[], Any], media: int = 2) -> Run:
    """Conversations of no, one or more pictures, by the processor of a model."""

    def fields_of(number: int) -> Fields:
        pictures = [picture(number + i) for i in range(number % (media + 1))]
        named = {f"{i}.{kind}": data for i, (kind, data, _) in enumerate(pictures)}
        return {**named, "json": chat(number, *(("image", name) for name in named))}

    return run(folder, fields_of, family().decode)


def placeholders(folder: Path) -> Run:
    """Captions that name their pictures, and captions that do not."""

    def fields_of(number: int) -> Fields:
        text = "one <image> and two <image>" if number % 2 else "two before me"
        return {"0.png": png(number, 30, 40), "1.jpg": photo(number), "txt": text.encode()}

    return run(folder, fields_of, native(VICUNA))


def chats_of_videos(folder: Path) -> Run:
    """Conversations about a picture and a video, or about a video alone."""
    family = qwen2_vl(min_pixels=28 * 28, max_pixels=4 * 28 * 28, max_frames=4)
    decode = mm.Decode(
        image=mm.ImageDecoder.from_processor(family.processor, pixel_budget=(784, 8 * 784)),
        video=mm.VideoDecoder.from_processor(family.processor),
        text=family.text,
    )

    def fields_of(number: int) -> Fields:
        fields = {"0.png": png(number), "1.mp4": clip(number, audio_codec=None)}
        media = [("image", "0.png"), ("video", "1.mp4")][number % 3 == 0 :]
        return {**dict([*fields.items()][number % 3 == 0 :]), "json": chat(number, *media)}

    return run(folder, fields_of, decode)


# -- videos and recordings ------------------------------------------------------------------------


def own_tracks(folder: Path) -> Run:
    """Random crops of videos, and the sound of each."""
    video = mm.VideoDecoder(num_frames=3, size=32, crop="random", flip=0.5, audio=SOUND)
    return run(folder, lambda number: captioned(number, mp4=clip(number)), mm.Decode(video=video))


def spans(folder: Path) -> Run:
    """Clips of spans that rows state, and events that follow them."""

    def fields_of(number: int) -> Fields:
        events = '[{"start_s": 0.1, "end_s": 0.35}, {"start_s": 0.5, "end_s": 0.9}]'
        row = f'{{"start_s": 0.{number % 3}, "end_s": 0.7, "events": {events}}}'
        return {"mp4": clip(number), "json": row.encode()}

    times = mm.Times("json.events", follows="video")
    video = mm.VideoDecoder(fps=5, size=24, clip_s=0.4)
    return run(folder, fields_of, mm.Decode({"events": times}, video=video))


def huge_file(folder: Path) -> Run:
    """Videos that are read by ranges; one lies in a file of 2 GB."""
    folder.mkdir(parents=True)
    dataset = mm.open_dataset(write_huge(folder / "huge.tar", 4))
    video = mm.VideoDecoder(num_frames=2, audio=SOUND)
    decode = mm.Decode(video=video, min_lazy_bytes=2048)
    return Run(mm.Pipeline(dataset, decode=decode, **SETTINGS | {"global_batch_size": 2}))


def tracks_and_wavs(folder: Path) -> Run:
    """Recordings, and the sound of videos, join in one field."""

    def fields_of(number: int) -> Fields:
        fields = {"0.mp4": clip(number), "1.wav": recording(number), "2.flac": recording(1, "flac")}
        return {name: fields[name] for name in list(fields)[number % 3 :]}

    video = mm.VideoDecoder(num_frames=2, size=24, audio=SOUND)
    return run(folder, fields_of, mm.Decode(video=video, audio=SOUND))


def uncounted_audio(folder: Path) -> Run:
    """Random parts of recordings, beside texts that do not count them."""

    def fields_of(number: int) -> Fields:
        kind = ("wav", "flac", "mp3")[number % 3]
        return captioned(number) | {kind: recording(number, kind)}

    audio = mm.AudioDecoder(sample_rate=8000, crop="random", duration_s=0.25, dtype="int16")
    return run(folder, fields_of, mm.Decode(audio=audio, text=TEXT))


def whisper(folder: Path) -> Run:
    """Log-mel features of recordings."""
    audio = mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures(chunk_s=1))
    return run(folder, lambda number: captioned(number, wav=recording(number)),
               mm.Decode(audio=audio, text=TEXT), count=8)  # fmt: skip


# -- packs, flat, baked, plain --------------------------------------------------------------------


def conversations(number: int) -> Fields:
    """Long and short ones; some have a picture whose scan is cut, which measuring does not see."""
    data = photo(number)
    is_bad = number % 4 == 1 or number == 6
    text = chat(number, ("image", "0.jpg"), *([("image", "1.png")] * (number == 6)))
    fields = {"0.jpg": cut(data) if is_bad else data, "json": text}
    return fields | ({"1.png": png(number)} if number == 6 else {})


def packs(folder: Path) -> Run:
    """Rows of several samples; the row of sample 6 has no other, and gets a substitute."""
    decode = llava_family().decode
    source = run(folder, conversations, decode, count=20)
    mm.plan(source.pipeline, 180, name="packs", num_workers=1, progress=False)
    batching = mm.Pack(180, plan="packs", layout="rows")
    return Run(replace(source.pipeline, batching=batching, global_batch_size=2))


def flat(folder: Path) -> Run:
    """Batches without padding, on two ranks of three rows and one."""
    decode = mm.Decode(image=RANDOM, text=TEXT)
    return replace(run(folder, some_cut, decode, batching=mm.Flat()), rows_per_rank=[3, 1])


def baked(folder: Path) -> Run:
    """Samples that were decoded once, with a transform that draws."""
    decode = mm.Decode(image=mm.ImageDecoder(size=32), text=TEXT)
    source = run(folder / "source", some_cut, decode, transforms=(with_numbers,))
    mm.bake(source.pipeline, folder / "baked", num_workers=0, progress=False)
    pipeline = mm.Pipeline(
        mm.open_dataset(folder / "baked"),
        decode=mm.Decode.baked(),
        transforms=(with_noise,),
        **SETTINGS,
    )
    return Run(pipeline)


def with_numbers(sample: Sample) -> Sample:
    """Add an array and a list."""
    number = sample["json"]["id"]
    return sample | {"scores": np.arange(3) * number, "names": [str(number)] * (number % 3)}


def with_noise(sample: Sample) -> Sample:
    """Draw from each generator that a user's function may use."""
    own = mm.sample_rng(sample)
    noise = [torch.rand(()).item(), np.random.random(), random.random(), own.random()]
    return sample | {"noise": np.array(noise)}


def plain(folder: Path, **settings: Any) -> Run:
    """Samples without a decoder."""
    raw = run(folder, lambda number: captioned(number, jpg=photo(number)), None, **settings)
    return replace(raw, num_workers=(0,)) if settings.get("zero_copy") else raw


# -- functions of the user, bad samples -----------------------------------------------------------


def of_user(folder: Path) -> Run:
    """Files that functions decode, one of which draws."""

    def fields_of(number: int) -> Fields:
        return {"png": png(number), "npy": array(number), "cls": b"%d" % number, "bin": b"left"}

    return run(folder, fields_of, mm.Decode({"png": noisy_thumbnail, "npy": ..., "cls": int}))


def noisy_thumbnail(data: bytes) -> Any:
    """Return every eighth pixel, with noise."""
    pixels = np.asarray(Image.open(io.BytesIO(data)))[::8, ::8]
    return pixels + np.random.random(pixels.shape)


def before(folder: Path) -> Run:
    """Functions that add and take away fields before pictures are decoded."""
    return run(folder, some_cut, mm.Decode(image=RANDOM, text=TEXT), before=(rearranged,))


def rearranged(sample: Sample) -> Sample:
    """Take a field away, add two, and leave out samples whose number ends in 3."""
    number = sample["json"]["id"]
    if number % 10 == 3:
        raise mm.SkipSample("a 3")
    text = f"{number} of {random.randrange(100)}".encode()
    others = {name: value for name, value in sample.items() if name != "jpg"}
    return others | {"txt": text, "0.png": png(number), "1.jpg": sample["jpg"]}


def half_skipped(folder: Path) -> Run:
    """Every other sample is filtered out after it was decoded."""
    fields_of = partial(some_cut, every=5)
    return run(folder, fields_of, mm.Decode(image=RANDOM), count=24, transforms=(only_even,))


def only_even(sample: Sample) -> Sample:
    """Leave out odd numbers."""
    if sample["json"]["id"] % 2:
        raise mm.SkipSample("odd")
    return sample


def json_and_image(folder: Path) -> Run:
    """Two files of a sample are bad, and one reason is told."""

    def fields_of(number: int) -> Fields:
        good = captioned(number, jpg=photo(number))
        return good | ({"json": b"{", "jpg": b"no picture"} if number % 3 == 1 else {})

    return run(folder, fields_of, mm.Decode(image=RANDOM, text=TEXT))


def every_fault(folder: Path) -> Run:
    """One sample of five is bad, each in another way."""

    def fields_of(number: int) -> Fields:
        if number % 5 == 2:
            bad: Fields = list(FAULTS.values())[number // 5](number)
            return bad
        kind, data, _ = picture(number)
        return captioned(number) | {kind: data}

    return run(folder, fields_of, mm.Decode(image=RANDOM, text=TEXT), count=40)


class HangingDecoder(logging.Handler):
    """A decoder of the user that waits at one sample until the watchdog has named it in the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.is_named = multiprocessing.Event()

    def __call__(self, data: bytes) -> int:
        """Return a number."""
        if data == b"5":
            self.is_named.clear()
            if not self.is_named.wait(300):
                raise RuntimeError("nobody has noticed that a decoder hangs")
        return int(data)

    def emit(self, record: logging.LogRecord) -> None:
        """Let the decoder go on. Further warnings come later, so none is missed."""
        if "decoding shard-000000.tar[5]" in record.getMessage():
            self.is_named.set()


def hanging(folder: Path) -> Run:
    """A decoder hangs until the log says so, with and without workers."""
    decoder = HangingDecoder()
    logging.getLogger("mmstream").addHandler(decoder)
    decode = mm.Decode({"cls": decoder})
    calm = run(folder, lambda number: {"cls": str(number).encode()}, decode, shuffle=False)
    return replace(calm, stall_warning_s=0.2)


CASES: dict[str, Callable[[Path], Run]] = {
    "1 lists of PNG and JPEG": lists,
    "2 masks behind a PNG": partial(
        followers, name="mask.png", follower=mm.ImageDecoder(mask=True)
    ),
    "3 boxes behind a PNG": partial(
        followers, name="boxes", follower=mm.Boxes("json.boxes", format="xywh")
    ),
    "4 points behind a PNG": partial(followers, name="points", follower=mm.Points("json.points")),
    "5 late EXIF": late_exif,
    "6 cut scans": lambda folder: run(folder, some_cut, mm.Decode(image=RANDOM)),
    "7 a fixed shape with bad rows": masked_rows,
    "8 sizes of Qwen-VL": partial(of_family, family=FAMILIES["qwen2-vl"]),
    "9 tiles of Llava-NeXT": partial(of_family, family=llava_next_family),
    "10 tiles of InternVL": partial(of_family, family=internvl_family),
    "11 videos and their tracks": own_tracks,
    "12 spans of videos": spans,
    "13 a file of 2 GB": huge_file,
    "14 tracks beside recordings": tracks_and_wavs,
    "15 audio that no text counts": uncounted_audio,
    "16 features of Whisper": whisper,
    "17 placeholders in texts": placeholders,
    "18 chats of images and videos": chats_of_videos,
    "19 packs with substitutes": packs,
    "20 flat batches, uneven ranks": flat,
    "21 baked samples": baked,
    "22 plain samples": plain,
    "22 plain samples, zero_copy": partial(plain, zero_copy=True),
    "22 plain samples, shared": partial(plain, storage_kind="shared"),
    "23 decoders of the user": of_user,
    "24 functions before decoding": before,
    "25 SkipSample at 50 %": half_skipped,
    "26 json and image bad in one": json_and_image,
    "27 limits of all files": sums_of_limits,
    "27 a decoder that hangs": hanging,
    "28 a subclass that decodes": lambda folder: run(
        folder, some_cut, mm.Decode(image=Negative(size=32, crop="random"))
    ),
    "one of five is bad": every_fault,
}
"""By the number in the design, and a name."""
