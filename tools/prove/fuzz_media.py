"""Fuzz the decoders of audio and video, and the converter's check of media, with mutated files.

    python -m tools.prove.fuzz_media                    # 10,000 files of every container
    python -m tools.prove.fuzz_media mp4 ogg --files 500 --seed 7
    python -m tools.prove.fuzz_media --show mp4 17      # what file 17 of mp4 does, in this process

Seeds are small files of each container, and the bombs of the tests. File i of a container and a
seed is always the same, so no file needs to be kept.

Each file is opened, planned and decoded in a child process with a limit of memory, while the parent
watches the time. A file may decode, or be refused by a DecodeError (a RowError in the converter)
of one printable line. These are failures, and the exit code is 1:

- another error, and a message that is not one printable line
- a crash of the process, such as a segmentation fault
- a hang: `MAX_WALL_S` without an answer, or `MAX_CPU_S` of processor time
- output on stderr, with which 10,000 bad files would drown a log, but for libmpg123's
- growth: more than `MAX_GROWTH` bytes of memory over the files after the first third
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import psutil

from tests.helpers.media_bombs import BOMBS, ogg_checksum
from tests.helpers.media_files import audio_file, video_file

CONTAINERS = ("mp4", "mov", "mkv", "webm", "avi", "ts", "ogg", "wav", "flac", "mp3", "m4a", "aac")
VIDEO_CONTAINERS = CONTAINERS[:6]

MAX_CPU_S = 10.0
"""Longest processor time of one file."""
MAX_WALL_S = 60.0
"""Longest time of one file until its process is killed. The machine may be busy."""
MAX_MEMORY = 6 << 30
"""Address space of a child: torch and its like map 3 GB."""
MAX_GROWTH = 48 << 20

WORDS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""What numbers in headers become."""


_MPG123 = ("Note: ", "Warning: ", "[src/libmpg123")
"""Starts of what libmpg123 prints about damaged MP3 files. libsndfile has no switch for it."""


class Mutated(NamedTuple):
    """A mutated file."""

    container: str
    number: int
    data: bytes


@functools.cache
def seeds(container: str) -> list[bytes]:
    """Return the files that mutations start from."""
    if container in ("mp4", "mov"):
        kinds: list[dict[str, Any]] = [
            {"audio_codec": "aac"},
            {"b_frames": 2, "open_gop": True, "num_frames": 16},
            {"moov_first": True, "rotation": 90},
            {"times_s": (0.0, 0.1, 0.5, 0.6, 2.0)},
            {"codec": "libx265"},
            {"pixel_format": "yuv420p10le"},
        ]
        files = [video_file(container, **kind) for kind in kinds]
        files += [video_file("fragmented mp4", audio_codec="aac", num_frames=18)]
        return files + _cheap_bombs(b"ftyp")
    if container in ("mkv", "webm", "avi", "ts"):
        sound = {"mkv": "aac", "webm": "libopus", "avi": "libmp3lame", "ts": "aac"}[container]
        files = [video_file(container), video_file(container, audio_codec=sound)]
        if container in ("mkv", "ts"):
            files.append(video_file(container, b_frames=2, open_gop=True))
            files.append(video_file(container, codec="libx265"))
        if container == "mkv":
            files += [audio_file("mka"), video_file("mkv", codec="mpeg4")]
        return files
    if container == "ogg":
        return [audio_file(kind, seconds=0.5) for kind in ("opus", "vorbis")] + [
            BOMBS["a year of opus"]()
        ]
    stereo = audio_file(container, seconds=0.3, channels=2)
    files = [audio_file(container, seconds=0.5), stereo]
    if container in ("mp3", "m4a", "flac"):
        files.append(audio_file(container, seconds=0.3, cover=True))
    return files + _cheap_bombs(b"RIFF" if container == "wav" else b"none")


def _cheap_bombs(start: bytes) -> list[bytes]:
    return [data for data in _bombs() if start in data[:8]]


@functools.cache
def _bombs() -> list[bytes]:
    made = [make() for name, make in BOMBS.items() if "large" not in name and "header" not in name]
    return [data for data in made if len(data) < 100_000]


def mutate(data: bytes, draws: random.Random) -> bytes:
    """Change a file in one to five places. Half of them are where its headers are."""
    changed = bytearray(data)
    names = _names(data)
    for _ in range(draws.choice((1, 1, 1, 2, 2, 3, 5))):
        size = len(changed)
        position = draws.randrange(size) if size else 0
        if names and draws.random() < 0.6:
            position = min(max(0, size - 1), draws.choice(names) + draws.randrange(-4, 24))
        elif draws.random() < 0.4:
            position = draws.randrange(min(size, 256)) if size else 0
        position = max(0, position)
        kind = draws.choices(range(6), (6, 6, 3, 1, 2, 1))[0]
        if kind == 0 and changed:
            changed[position] ^= 1 << draws.randrange(8)
        elif kind == 1:
            form = draws.choice((">I", "<I", ">H", "<H", ">Q"))
            word = draws.choice(WORDS) & (1 << 8 * struct.calcsize(form)) - 1
            changed[position : position + struct.calcsize(form)] = struct.pack(form, word)
        elif kind == 2:
            changed[position : position + 8] = draws.randbytes(8)
        elif kind == 3:
            del changed[draws.randrange(size + 1) :]
        elif kind == 4:
            source, length = draws.randrange(size + 1), draws.choice((4, 16, 188, 512, 2048))
            stop = position + draws.choice((0, length))  # inserted, or in the place of others
            changed[position:stop] = changed[source : source + length] * draws.randint(1, 3)
        else:
            del changed[position : position + draws.choice((1, 4, 16, 188, 1000))]
    return _with_checksums(bytes(changed)) if draws.random() < 0.9 else bytes(changed)


_NAMES = (
    *(b"mvhd tkhd elst mdhd hdlr stsd avc1 avcC hev1 hvcC esds mp4a stts ctts stss stsc").split(),
    *(b"stsz stco trex tfhd tfdt trun moof moov mdat ftyp mfra sidx").split(),
    *(b"RIFF avih strh strf idx1 indx movi LIST fmt data fact 00dc 01wb").split(),
    *(b"OggS OpusHead OpusTags vorbis fLaC ID3 Xing Info LAME TAG").split(),
    *(b"\x1aE\xdf\xa3", b"\x16T\xaek", b"\x1fC\xb6u", b"\x1cS\xbbk", b"\x15I\xa9f"),
    *(b"\x11M\x9bt", b"\xae", b"\xa3", b"\x47\x40", b"\x47\x50"),
)
"""What stands at the start of headers."""


def _names(data: bytes) -> list[int]:
    positions: list[int] = []
    for name in _NAMES:
        position = data.find(name)
        for _ in range(4):
            if position < 0:
                break
            positions.append(position)
            position = data.find(name, position + 1)
    return positions


def _with_checksums(data: bytes) -> bytes:
    """Return an Ogg whose pages have the checksums of what they hold. Other files stay."""
    if not data.startswith(b"OggS"):
        return data
    repaired, position = bytearray(data), 0
    while (position := data.find(b"OggS", position)) >= 0 and position + 27 <= len(data):
        num_segments = data[position + 26]
        lacing = data[position + 27 : position + 27 + num_segments]
        stop = position + 27 + num_segments + sum(lacing)
        repaired[position + 22 : position + 26] = bytes(4)
        checksum = ogg_checksum(bytes(repaired[position:stop]))
        repaired[position + 22 : position + 26] = struct.pack("<I", checksum)
        position += 4
    return bytes(repaired)


def file_of(container: str, number: int, seed: int) -> Mutated:
    """Return a mutated file: always the same one. The first ones are the seeds themselves."""
    files = seeds(container)
    if number < len(files):
        return Mutated(container, number, files[number])
    draws = random.Random(f"{seed} {container} {number}")
    # Few mutations of a bomb are worth more than the bomb.
    usual = [data for data in files if data not in _bombs()]
    return Mutated(container, number, mutate(draws.choice((*usual, *usual, *files)), draws))


# ---- One file


def readers(container: str, number: int) -> dict[str, Callable[[bytes], object]]:
    """Return what reads a file: the decoders with some settings, and the converter's check."""
    import mmstream as mm
    from mmstream.converting.media.load import checked
    from mmstream.converting.options import MediaOptions

    level = ("header", "full")[number % 2]
    kind: Any = "video" if container in VIDEO_CONTAINERS else "audio"
    audio = (
        mm.AudioDecoder(),
        mm.AudioDecoder(sample_rate=None, channels=None, span=None),
        mm.AudioDecoder(span=(0.1, 0.3), dtype="int16"),
        mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures()),
    )[number // 2 % 4]
    read: dict[str, Callable[[bytes], object]] = {
        "audio": audio,
        f"{level} check": lambda data: checked(kind, data, MediaOptions(check=level)),  # type: ignore[arg-type]
    }
    if kind == "video" and hasattr(mm, "VideoDecoder"):
        read["video"] = (
            mm.VideoDecoder(fps=2.0),
            mm.VideoDecoder(num_frames=4, size=32),
            mm.VideoDecoder(fps=4.0, span=(0.2, 0.9), max_frames=8),
            mm.VideoDecoder(num_frames=8, audio=mm.AudioDecoder()),
        )[number // 2 % 4]
    return read


def check(file: Mutated) -> dict[str, str]:
    """Read a file. Return what became of it, by reader: "FAILED: ..." if it broke a rule."""
    from mmstream.converting.draft import RowError
    from mmstream.errors import DecodeError, TimeoutError

    outcomes = {}
    for name, read in readers(file.container, file.number).items():
        start = time.process_time()
        try:
            read(file.data)
        except TimeoutError:
            outcome = "timed out"
        except (DecodeError, RowError) as error:
            is_line = str(error).isprintable() and bool(str(error))
            outcome = "refused" if is_line else f"FAILED: the message is {str(error)!r}"
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {error}"
        else:
            outcome = "decoded"
        seconds = time.process_time() - start
        if seconds > MAX_CPU_S:
            outcome = f"FAILED: {outcome} after {seconds:.1f} s of processor time"
        outcomes[name] = outcome
    return outcomes


def child(container: str, seed: int, first: int, stop: int) -> None:
    """Read files, one line of JSON before each and one after it."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file_of(container, first, seed)  # makes the seeds
    readers(container, first)  # loads torch
    process = psutil.Process()
    for number in range(first, stop):
        print(json.dumps({"start": number}), flush=True)
        file, begin = file_of(container, number, seed), time.process_time()
        answer = {"number": number, "outcomes": check(file), "rss": process.memory_info().rss}
        answer["cpu_s"] = time.process_time() - begin
        print(json.dumps(answer), flush=True)


# ---- All files


@dataclass
class Report:
    """What became of the files of a container."""

    container: str
    num_files: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    """Memory after each thousandth of the files, in bytes, of the process that read them."""
    seconds: float = 0.0
    longest: tuple[float, int] = (0.0, 0)
    """Processor time of the file that took longest, in seconds, and its number."""

    def line(self) -> str:
        """Return one line of text."""
        outcomes = ", ".join(f"{name} {count:,}" for name, count in sorted(self.outcomes.items()))
        rss = "-".join(str(each >> 20) for each in (self.rss[:1] + self.rss[-1:]))
        return (
            f"{self.container}: {self.num_files:,} files in {self.seconds:.0f} s, the longest "
            f"({self.longest[1]}) {self.longest[0]:.1f} s, memory {rss} MB, "
            f"{len(self.failures)} failures; {outcomes}"
        )


def fuzz(container: str, num_files: int, seed: int = 1) -> Report:
    """Read mutated files of a container in child processes."""
    report, begin, first = Report(container), time.monotonic(), 0
    while first < num_files:
        first = _run_child(report, seed, first, num_files)
    report.seconds = time.monotonic() - begin
    rss = report.rss[len(report.rss) // 3 :]
    if rss and len(rss) > 300 and rss[-1] - rss[0] > MAX_GROWTH:
        report.failures.append(f"memory grew from {rss[0] >> 20} to {rss[-1] >> 20} MB")
    return report


def _child_command(container: str, seed: int, first: int, stop: int) -> list[str]:
    numbers = [str(number) for number in (seed, first, stop)]
    return [sys.executable, "-m", "tools.prove.fuzz_media", "--child", container, *numbers]


def _run_child(report: Report, seed: int, first: int, stop: int) -> int:
    """Read files until the process ends. Return the number of the next file."""
    command = _child_command(report.container, seed, first, stop)
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        assert process.stdout is not None
        current, reason = first, ""
        try:
            for message in _messages(process.stdout):
                if message is None:
                    reason = f"no answer for {MAX_WALL_S:.0f} s"
                    break
                if "start" in message:
                    current = message["start"]
                    continue
                report.num_files += 1
                report.longest = max(report.longest, (message["cpu_s"], current))
                report.rss.append(message["rss"])
                for name, outcome in message["outcomes"].items():
                    report.outcomes[f"{name} {outcome.partition(':')[0]}"] += 1
                    if outcome.startswith("FAILED"):
                        report.failures.append(f"file {current}: {name}: {outcome}")
                current += 1
        finally:
            process.kill()
            status = process.wait()
            process.stdout.close()
        stderr.seek(0)
        output = "".join(line for line in stderr if not line.startswith(_MPG123))
    if current < stop:
        reason = reason or f"the process ended with {status}"
        report.failures.append(f"file {current}: {reason}: {output[-1000:]}")
        return current + 1
    if output:
        report.failures.append(f"output on stderr, of files {first} to {stop}: {output[:500]}")
    return stop


def _messages(stdout: IO[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the messages of a child, and None if there is none for long.

    The limit counts from the first message: on a busy machine a child may start for minutes.
    """
    pending = b""
    limit_s: float | None = None
    while True:
        if not select.select([stdout], [], [], limit_s)[0]:
            yield None
            return
        limit_s = MAX_WALL_S
        piece = os.read(stdout.fileno(), 1 << 16)
        if not piece:
            return
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            yield json.loads(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Fuzz the decoders of audio and video.")
    parser.add_argument("containers", nargs="*", help=f"of {', '.join(CONTAINERS)} (default: all)")
    parser.add_argument("--files", type=int, default=10_000, help="in all (default: 10,000)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    parser.add_argument("--show", nargs=2, metavar=("CONTAINER", "NUMBER"), help="one file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(args.child[0], *map(int, args.child[1:]))
        return 0
    if args.show:
        print(check(file_of(args.show[0], int(args.show[1]), args.seed)))
        return 0
    containers = args.containers or CONTAINERS
    num_failures = 0
    for container in containers:
        report = fuzz(container, -(-args.files // len(containers)), args.seed)
        print(report.line(), flush=True)
        for failure in report.failures[:5]:
            print(f"    {failure}")
        num_failures += len(report.failures)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
