"""Fuzz everything in mmstream that reads what a stranger may have written.

    python -m tools.prove.fuzz                         # all parsers, a minute in all
    python -m tools.prove.fuzz tar state --seconds 3600 --seed 7

Each parser gets mutations of real inputs: flipped and replaced bytes, cuts, repeats, and, for JSON,
other values in other places. A parser may return something, or raise an MMStreamError of one
printable line. Anything else is a failure. Then the input is saved, and the exit code is 1. An
input that takes more than `MAX_SECONDS` of processor time is a failure too, also if it is refused.

`fuzz_images.py` changes images in its own way, and `fuzz_media.py` fuzzes audio and video.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

import mmstream as mm
from mmstream.converting.draft import Media, RowError, samples_of
from mmstream.converting.formats.formats import draft_of
from mmstream.converting.rows.arrow import iter_arrow
from mmstream.converting.rows.records import parse_row
from mmstream.dataset.bad_list import BAD_NAME, read_bad
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import (
    HEADER_BYTES,
    PartWriter,
    build_index,
    columns_of,
    columns_sizes,
    decode_checksums,
    decode_columns,
    decode_index,
    decode_table,
    encode_checksums,
    index_name,
    sample_checksum,
    table_size,
)
from mmstream.dataset.manifest import MANIFEST_NAME, IndexPart, Manifest
from mmstream.decoding.sample import decode_sample
from mmstream.errors import escaped
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PLAN_NAME, PackLimits, open_plan, require_plan_of, write_plan
from mmstream.packing.planner import Measure, make_plan
from mmstream.state import resume
from mmstream.storage import MemoryStore, open_store
from mmstream.tar.samples import parse_sample
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers import chats
from tests.helpers.corpora import write_corpus
from tests.helpers.rows import example_rows
from tools.prove import fuzz_images
from tools.prove.attacks.attack import NOT_PRINTABLE

MAX_SECONDS = 10.0
"""Longest time of one input. Most take a millisecond, and images within all limits up to 3 s."""

VALUES: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**30, -0.5, 1e308),
    *("", "all", "\x1b[2J\n", "\ud800", "../x", "x" * 10_000, "<image>", "\u202e"),
    *([], {}, [[]], [0] * 1000, {"": {}}, {"type": "video"}, {"__source__": 1}),
)
"""What JSON mutations put in the place of other values."""

NUMBERS = tuple(
    number.to_bytes(8, "little")
    for number in (0, 1, 511, 512, 513, 1 << 31, (1 << 53) - 1, 1 << 63, (1 << 64) - 1)
)
"""What byte mutations put in the place of other bytes."""


class BrokenPromiseError(AssertionError):
    """A parser broke its promise."""


@dataclass(frozen=True)
class Parser:
    """Something that reads bytes of strangers.

    Attributes:
        parse: Reads an input. What it returns does not matter.
        seeds: Real inputs.
        is_json: Whether JSON values are mutated too, not bytes alone.
        mutate: Returns a changed copy of an input, in place of `mutate`.
    """

    parse: Callable[[bytes], object]
    seeds: Sequence[bytes]
    is_json: bool = False
    mutate: Callable[[bytes, random.Random], bytes] | None = None


@dataclass(frozen=True)
class Report:
    """What a fuzzer did."""

    num_inputs: int
    num_accepted: int
    """Inputs that raised nothing."""


def fuzz(parser: Parser, seconds: float, seed: int, save: Path, *, min_inputs: int = 1) -> Report:
    """Give mutated inputs to a parser for some seconds.

    Args:
        parser: What is fuzzed.
        seconds: How long.
        seed: Of the mutations.
        save: Where an input that fails is written.
        min_inputs: So many inputs are tried at least, also where that takes longer.

    Raises:
        BrokenPromiseError: The parser broke its promise.
    """
    draw = random.Random(seed)
    change = parser.mutate or partial(mutate, is_json=parser.is_json)
    deadline = time.monotonic() + seconds
    num_inputs = num_accepted = 0
    while num_inputs < min_inputs or time.monotonic() < deadline:
        data = change(draw.choice(parser.seeds), draw)
        num_inputs += 1
        try:
            num_accepted += accepts(parser, data)
        except BaseException:
            save.write_bytes(data)
            raise
    return Report(num_inputs, num_accepted)


def mutate(data: bytes, draw: random.Random, *, is_json: bool = False) -> bytes:
    """Return a changed copy of an input."""
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        data = _mutate_json(data, draw) if is_json and draw.random() < 0.7 else _splice(data, draw)
    return data


def accepts(parser: Parser, data: bytes) -> bool:
    """Tell whether a parser accepts an input. Raise BrokenPromiseError if it breaks its promise."""
    started, is_accepted = time.process_time(), True
    try:
        parser.parse(data)
    except mm.MMStreamError as error:
        if NOT_PRINTABLE.search(str(error)):
            raise BrokenPromiseError(f"says what is not printable: {escaped(error)}") from error
        is_accepted = False
    except Exception as error:
        raise BrokenPromiseError(f"{type(error).__name__}: {escaped(error)}") from error
    seconds = time.process_time() - started
    if seconds > MAX_SECONDS:
        raise BrokenPromiseError(f"took {seconds:.1f} s of processor time")
    return is_accepted


def _splice(data: bytes, draw: random.Random) -> bytes:
    """Return data with a few of its bytes changed, cut out, repeated or moved."""
    start = draw.randrange(len(data) + 1)
    stop = min(len(data), start + draw.choice((1, 1, 2, 8, 64, 512, 4096)))
    piece = data[start:stop]
    kind = draw.randrange(7)
    if kind == 0 and piece:  # flip a bit
        position = draw.randrange(len(piece))
        flipped = bytes([piece[position] ^ (1 << draw.randrange(8))])
        piece = piece[:position] + flipped + piece[position + 1 :]
    elif kind == 1:
        piece = draw.randbytes(len(piece))
    elif kind == 2:
        piece = b""
    elif kind == 3:
        piece *= draw.choice((2, 3, 100))
    elif kind == 4:
        piece = draw.choice(NUMBERS)[: max(1, len(piece))]
    elif kind == 5:
        piece = draw.choice((b"\x00", b"\xff", b"[", b"{", b'"', b"-", b"9")) * len(piece)
    else:  # cut the rest off
        return data[:start]
    return data[:start] + piece + data[stop:]


def _mutate_json(data: bytes, draw: random.Random) -> bytes:
    """Return JSON with one value replaced, removed or nested."""
    try:
        root = {"": json.loads(data)}
    except (ValueError, RecursionError):
        return _splice(data, draw)
    containers: list[tuple[Any, Any]] = [(root, "")]
    for container, key in containers:  # grows while it is read
        value = container[key]
        if isinstance(value, dict | list) and len(containers) < 1000:
            keys = value if isinstance(value, dict) else range(len(value))
            containers += [(value, inner) for inner in keys]
    container, key = draw.choice(containers)
    kind = draw.randrange(4)
    if kind == 0 and container is not root:
        del container[key]
    elif kind == 1:
        for _ in range(draw.choice((1, 50, 400))):
            container[key] = [container[key]]
    else:
        container[key] = deepcopy(draw.choice(VALUES))
    try:
        return json.dumps(root[""]).encode()
    except RecursionError:  # nested deeper than this writer goes
        return _splice(data, draw)


class _OneTar:
    """A store that holds one tar in memory."""

    access: ClassVar = MemoryStore.access

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self, _name: str) -> int:
        return len(self._data)

    def read_range(self, _name: str, start: int, stop: int) -> bytes:
        return self._data[start:stop]


def _parse_tar(data: bytes) -> None:
    offsets = build_index(_OneTar(data), "x.tar")  # type: ignore[arg-type]
    for start, stop in pairwise(offsets.tolist()):
        try:
            parse_sample(data[start:stop], "x.tar")
        except mm.SampleError:
            continue


def _parse_row(line: bytes) -> None:
    value = parse_row(line)
    if isinstance(value, RowError):
        raise value
    draft = draft_of(value)
    media = [Media("jpg", b"")] * len(draft.media)
    list(samples_of("000000001", draft, media, per_caption=False))


@contextmanager
def parsers() -> Iterator[Mapping[str, Parser]]:
    """Make all parsers, with a small corpus as the source of their inputs."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name, "corpus")
        write_corpus(folder, [4, 3])
        yield _parsers(folder)


def _parsers(folder: Path) -> dict[str, Parser]:
    shard = "shard-000000.tar"
    dataset = mm.open_dataset(folder)
    index = (folder / index_name(shard)).read_bytes()
    manifest = (folder / MANIFEST_NAME).read_bytes()
    pipeline = mm.Pipeline(dataset, global_batch_size=2)
    loader = mm.Loader(pipeline)
    next(iter(loader))
    state = json.dumps(loader.state_dict()).encode()
    sources = {name: {"url": "corpus", "weight": 0.5} for name in "ab"}
    mixture = {"sources": sources, "stop": "all"}
    chat = [chats.user("what is this?"), chats.assistant("a cat")]
    decode = mm.Decode(text=mm.TextDecoder(chats.tokenizer(chats.CHATML), max_length=32))
    scratch = open_store(folder.parent)
    mixture_file = folder.parent / "mixture.json"

    def parse_bad_list(data: bytes) -> None:
        (folder.parent / BAD_NAME).write_bytes(data)
        read_bad(scratch, dataset.manifest)

    def parse_mixture(data: bytes) -> None:
        mixture_file.write_bytes(data)
        mm.Mixture.open(mixture_file)

    def parse_state(data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        resume(dataset, pipeline.order, value, "finish_epoch")

    def parse_chat(data: bytes) -> None:
        decode_sample({"__key__": "k", "__url__": "x.tar", "json": data}, decode)

    def parse_arrow(data: bytes) -> None:
        """Read a file that stays behind if it ends this process."""
        path = folder.parent / "rows.arrow"
        path.write_bytes(data)
        for _ in iter_arrow(path, path.name):
            pass

    def parse_part(data: bytes) -> None:
        """Read a part whose checksums a stranger has made again."""
        part = IndexPart("mmstream.index.0", max(1, len(data)), "", 0, 1)
        table_bytes = data[HEADER_BYTES : table_size(2)]
        seal = sample_checksum(table_bytes).to_bytes(4, "little")
        table = decode_table(data[:12] + seal + data[HEADER_BYTES:], part.name, part).copy()
        for row in table:
            content = data[int(row["offset"]) :][: int(columns_sizes(row))]
            row["columns_crc32c"] = sample_checksum(content)
            columns = decode_columns(content, row, "x.tar")
            offsets = columns.offsets()
            assert np.array_equal(columns.bounds(np.arange(len(offsets) - 1)).stop, offsets[1:])
            assert offsets[-1] <= row["num_bytes"]

    return {
        "tar": Parser(_parse_tar, [(folder / shard).read_bytes()]),
        "index": Parser(lambda data: decode_index(data, "x.tar.idx"), [index]),
        "column": Parser(
            lambda data: decode_checksums(data[len(index) :], data[: len(index)], "x.tar.crc32c"),
            [index + encode_checksums([1, 2, 3, 4], index)],
        ),
        "arrow": Parser(parse_arrow, _arrow_files()),
        "index_part": Parser(parse_part, [_part()]),
        "manifest": Parser(Manifest.from_bytes, [manifest], is_json=True),
        "bad_list": Parser(
            parse_bad_list, [b'{"version": 1, "bad": {"%s": [1, 2]}}' % shard.encode()], True
        ),
        "mixture": Parser(parse_mixture, [json.dumps(mixture).encode()], True),
        "state": Parser(parse_state, [state], True),
        "row": Parser(_parse_row, [json.dumps(row).encode() for row in example_rows()], True),
        "chat": Parser(parse_chat, [json.dumps({"messages": chat}).encode()], True),
        "image": Parser(fuzz_images.parse, fuzz_images.seeds(), mutate=fuzz_images.mutate),
        "baked": _baked_manifest(dataset, folder.parent / "baked"),
        **_plans(dataset, folder.parent / "plan"),
    }


def _baked_manifest(dataset: Dataset, folder: Path) -> Parser:
    """Return the parser of what a manifest says of a bake: a batch is made of it."""
    text = mm.TextDecoder(byte_tokenizer(), max_length=48, padding="max_length")
    decode = mm.Decode(image=mm.ImageDecoder(size=8), text=text)
    pipeline = mm.Pipeline(dataset, global_batch_size=2, decode=decode)
    mm.bake(pipeline, folder, progress=False)
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())

    def parse(data: bytes) -> None:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return
        path.write_text(json.dumps(manifest | {"source": {"bake": content}}))
        baked = mm.open_dataset(folder)
        baked_pipeline = mm.Pipeline(baked, global_batch_size=2, decode=mm.Decode.baked())
        with closing(mm.Loader(baked_pipeline)) as loader:
            next(iter(loader))

    return Parser(parse, [json.dumps(manifest["source"]["bake"]).encode()], is_json=True)


def _plans(dataset: Dataset, folder: Path) -> dict[str, Parser]:
    """Return the parsers of a plan's two kinds of files: the order of an epoch is made of it."""
    shards = dataset.manifest.shards
    lengths = np.arange(3, 3 + len(dataset))
    measure = Measure(shards, {"num_tokens": lengths, "num_label_tokens": lengths - 1})
    write_plan(make_plan(measure, PackLimits(16)), str(folder))
    path = folder / PLAN_NAME
    plan = json.loads(path.read_bytes())
    del plan["crc32c"]  # a stranger's plan has the right one, or none

    def parse_plan(data: bytes) -> None:
        path.write_bytes(data)
        try:
            opened = open_plan(str(folder))
        except FileNotFoundError:  # of an array: its name was changed
            return
        require_plan_of(dataset, opened)
        order = PackOrder.from_plan(opened, dataset.corpus, global_batch_size=2, seed=0)
        for step in range(min(order.steps_per_epoch, 2)):
            order.refs(0, step)

    def parse_arrays(data: bytes) -> None:
        """Read packs whose hash a stranger has made again."""
        sha256 = hashlib.sha256(data).hexdigest()
        arrays = folder / f"arrays.{sha256[:12]}"
        arrays.write_bytes(data)
        try:
            parse_plan(json.dumps(plan | {"sha256": sha256}).encode())
        finally:
            arrays.unlink()

    arrays_file = folder / f"arrays.{plan['sha256'][:12]}"
    return {
        "plan": Parser(parse_plan, [json.dumps(plan).encode()], is_json=True),
        "plan_arrays": Parser(parse_arrays, [arrays_file.read_bytes()]),
    }


def _arrow_files() -> list[bytes]:
    """Return files and streams of Arrow with columns of every layout, plain and compressed."""
    texts = ["a cat", None, "zwei \u00e4", "", "x" * 40]
    nested = [{"a": [1, 2], "b": text} for text in texts]
    batch = pa.record_batch(
        {
            "text": pa.array(texts),
            "view": pa.array(texts, pa.string_view()),
            "word": pa.array(texts).dictionary_encode(),
            "image": pa.array([{"bytes": b"\xff\xd8", "path": "a.jpg"}] * 5),
            "turns": pa.array([nested, [], None, nested[:1], nested[:2]]),
            "map": pa.array([[("k", 1)], [], None, [], []], pa.map_(pa.string(), pa.int64())),
            "pair": pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float32(), 2)),
            "list_view": pa.array([[1], [], None, [2, 3], []], pa.list_view(pa.int16())),
            "runs": pa.RunEndEncodedArray.from_arrays([3, 5], ["x", "y"]),
            "flag": pa.array([True, None, False, True, True]),
            "day": pa.array([0, 1, None, 3, 4], pa.date32()),
            "none": pa.nulls(5),
        }
    )
    files = []
    for make in (pa.ipc.new_file, pa.ipc.new_stream):
        for compression in (None, "zstd", "lz4"):
            sink = io.BytesIO()
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with make(sink, batch.schema, options=options) as writer:
                writer.write_batch(batch)
                writer.write_batch(batch.slice(1, 3))
            files.append(sink.getvalue())
    return files


def _part() -> bytes:
    """Return a part of an index: 300 samples without checksums, and 2 with them."""
    writer = PartWriter(io.BytesIO())
    writer.add(1 << 20, columns_of(np.arange(301) * 1024, None))
    writer.add(1 << 26, columns_of(np.array([512, 1024, 1 << 26]), np.array([1, 2])))
    store = MemoryStore("memory://mmstream-fuzz")
    part = writer.write(store)
    assert part is not None
    return store.read(part.name)


def main() -> int:
    """Fuzz, print what was tried, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parsers; default: all of them")
    parser.add_argument("--seconds", type=float, default=60, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, default=Path("build/fuzz"), help="folder of failures")
    parser.add_argument("--replay", type=Path, help="give this saved input to one parser")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow's, about damaged metadata
    arguments.save.mkdir(parents=True, exist_ok=True)
    with parsers() as known:
        names = arguments.names or list(known)
        if arguments.replay:
            accepts(known[names[0]], arguments.replay.read_bytes())
            return 0
        for name in names:
            save = arguments.save / f"{name}.bin"
            try:
                report = fuzz(known[name], arguments.seconds / len(names), arguments.seed, save)
            except BrokenPromiseError as failure:
                print(f"{name}: FAILED: {failure}\nits input: {save}")
                return 1
            print(f"{name}: {report.num_inputs:,} inputs, {report.num_accepted:,} accepted")
    print("no failures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
