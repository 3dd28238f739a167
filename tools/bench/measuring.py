"""How fast the lengths of captions and conversations are measured, with and without facts.

    python tools/bench/measuring.py CAPTIONS.jsonl IMAGES/ [--samples 100000]

CAPTIONS are rows of COCO: ``{"file_name": ..., "captions": [...]}``. Their pictures are made small,
so that the corpus fits a disk; headers are read from them as from large ones. The tokenizer is a
byte-level BPE of 16,000 tokens, trained on the captions. Each figure is of one run in one process.

"tokenizer alone" is the floor: one call of the tokenizer for 128 texts, and nothing else.
Texts of conversations come from their template, and labels need the characters of each token.
"to the first batch" is a pipeline that finds no plan, measures and plans by itself, and decodes its
first pack. "again" is the same pipeline, which finds that plan.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import mmstream as mm
from mmstream.dataset.checksums import checksums_name, encode_checksums
from mmstream.dataset.facts import write_facts
from mmstream.dataset.index import encode_index, index_name
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.storage import open_store
from mmstream.tar.writer import TarWriter
from mmstream.train.tokenizer import CHAT_TEMPLATE

SAMPLES_PER_SHARD = 5000
SIDE = 96
VOCABULARY = 16_000
MAX_TOKENS = 8192


def main() -> None:
    """Write both corpora, and measure them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captions", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--num-workers", type=int, default=1)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.captions.read_text().splitlines()]
    texts = [text for row in rows for text in row["captions"]]
    tokenizer = trained(texts)
    pictures = [small(path) for path in sorted(options.images.glob("*.jpg"))]
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        decode = mm.Decode(
            image=mm.ImageDecoder(size=224), text=mm.TextDecoder(tokenizer, max_length=MAX_TOKENS)
        )
        alone("captions", [text.strip() for text in texts], tokenizer)
        samples = captions(texts, pictures, options.samples)
        measured("captions", root / "captions", samples, decode, options.num_workers)
        qwen = mm.Decode(
            image=mm.ImageDecoder(resize="max_pixels", multiple_of=28),
            text=mm.TextDecoder(tokenizer, image_length=mm.qwen_vl_length(), max_length=MAX_TOKENS),
        )
        messages = [
            json.loads(row["json"])["messages"] for row in conversations(texts, [b""], 5000)
        ]
        alone("conversations", messages, tokenizer)
        chats = conversations(texts, pictures, options.samples // 4)
        measured("conversations", root / "chats", chats, qwen, options.num_workers)


def measured(
    name: str,
    folder: Path,
    samples: Iterator[dict[str, bytes]],
    decode: mm.Decode,
    num_workers: int,
) -> None:
    """Write a corpus where there is none. Measure it by its tars, then by its facts."""
    if not (folder / MANIFEST_NAME).exists():
        write_corpus(folder, samples)
    dataset = mm.open_dataset(folder)
    for path in folder.glob("*.facts"):
        path.unlink()
    timed(f"{name}: tars", len(dataset), dataset, decode, num_workers)
    begin = time.perf_counter()
    write_facts(dataset)
    seconds = time.perf_counter() - begin
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.facts"))
    print(
        f"{name}: facts written in {seconds:.1f} s, {len(dataset) / seconds:,.0f} samples/s, "
        f"{num_bytes / len(dataset):,.0f} bytes a sample of "
        f"{dataset.manifest.num_bytes / len(dataset):,.0f}"
    )
    timed(f"{name}: facts", len(dataset), dataset, decode, num_workers)
    for path in (*folder.glob("mmstream.measure.*"), *folder.glob("mmstream.plan.*")):
        shutil.rmtree(path)
    for words in ("to the first batch", "to the first batch again"):
        begin = time.perf_counter()
        batching = mm.Pack(MAX_TOKENS)
        pipeline = mm.Pipeline(dataset, global_batch_size=1, decode=decode, batching=batching)
        with closing(mm.Loader(pipeline, num_workers=0, world=mm.World())) as loader:
            next(iter(loader))
        print(f"{name}: {len(dataset):,} samples {words}: {time.perf_counter() - begin:.1f} s")


def alone(name: str, texts: list[Any], tokenizer: Any) -> None:
    """Print how fast the tokenizer is by itself, on texts or on messages."""
    core, is_text = tokenizer.backend_tokenizer, isinstance(texts[0], str)
    encode = core.encode_batch_fast if is_text else core.encode_batch
    begin = time.process_time()
    for first in range(0, len(texts), 128):
        batch = texts[first : first + 128]
        if not is_text:
            batch = [tokenizer.apply_chat_template(each, tokenize=False) for each in batch]
        encode(batch, add_special_tokens=is_text)
    rate = len(texts) / (time.process_time() - begin)
    print(f"{name}: tokenizer alone: {rate:,.0f} a CPU second")


def timed(name: str, num_samples: int, dataset: Any, decode: mm.Decode, num_workers: int) -> None:
    """Print how long a measure takes."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        cpu = time.process_time()
        mm.measure(dataset, decode=decode, folder=folder, num_workers=num_workers, progress=False)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    rate, cpu_rate = num_samples / seconds, num_samples / cpu_s
    print(f"{name}: {seconds:.1f} s, {rate:,.0f} samples/s, {cpu_rate:,.0f} a CPU second")


def trained(texts: list[str]) -> Any:
    """Return a tokenizer of the texts."""
    core = ByteLevelBPETokenizer()
    special = ["<pad>", "<eos>", "<image>", "<|im_start|>", "<|im_end|>"]
    core.train_from_iterator(texts, VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]})
    return tokenizer


def small(path: Path) -> bytes:
    """Return a picture with sides of at most `SIDE` pixels."""
    buffer = io.BytesIO()
    with Image.open(path) as image:
        image.thumbnail((SIDE, SIDE))
        image.convert("RGB").save(buffer, "JPEG", quality=70)
    return buffer.getvalue()


def captions(texts: list[str], pictures: list[bytes], count: int) -> Iterator[dict[str, bytes]]:
    """Yield pictures with a caption each."""
    for number in range(count):
        text = texts[number % len(texts)].strip()
        yield {"jpg": pictures[number % len(pictures)], "txt": text.encode()}


def conversations(
    texts: list[str], pictures: list[bytes], count: int
) -> Iterator[dict[str, bytes]]:
    """Yield conversations of three rounds about a picture."""
    for number in range(count):
        turns: list[dict[str, Any]] = []
        for turn in range(3):
            question = texts[(3 * number + turn) % len(texts)]
            content: Any = f"Is this true: {question}"
            if not turn:
                content = [{"type": "image"}, {"type": "text", "text": content}]
            answer = " ".join(texts[(7 * number + turn + i) % len(texts)] for i in range(4))
            turns += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": answer},
            ]
        row = json.dumps({"messages": turns}).encode()
        yield {"jpg": pictures[number % len(pictures)], "json": row}


def write_corpus(folder: Path, samples: Iterator[dict[str, bytes]]) -> None:
    """Write shards with indexes and checksums."""
    store = open_store(str(folder))
    shards: list[ShardInfo] = []
    batch: list[dict[str, bytes]] = []

    def flush() -> None:
        name = f"shard-{len(shards):06d}.tar"
        with store.create(name) as file:
            writer = TarWriter(file)
            for number, fields in enumerate(batch):
                writer.add(f"{len(shards):03d}{number:06d}", fields)
            writer.close()
        index = encode_index(writer.offsets)
        store.write(index_name(name), index)
        store.write(checksums_name(name), encode_checksums(writer.checksums, index))
        shards.append(ShardInfo(name, len(batch), writer.num_bytes))
        batch.clear()

    for sample in samples:
        batch.append(sample)
        if len(batch) == SAMPLES_PER_SHARD:
            flush()
    if batch:
        flush()
    store.write(MANIFEST_NAME, Manifest(tuple(shards), checksums="written").to_bytes())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
