"""What does padding cost? ``python -m tools.bench.padding --data ../shared/data``.

A small language model trains on real texts in five ways:

    fixed       every row is padded, or cut, to the same length
    longest     rows are padded to the longest of their batch: what `mm.collate` does
    bucketed    by hand: 16 batches of samples are sorted by length, cut into batches, and these
                are shuffled
    flat        `mm.Flat`: the samples of a batch one behind the other
    packed      `mm.Pack`: rows of `--pack` tokens, by a plan

Two ways of attention are measured for batches without padding. "documents" computes each document
by itself, as the kernels of FlashAttention do on a GPU. "sdpa" computes all of [1, T] under a mask,
as a model does without such kernels.

The texts are captions of COCO, answers of GPT-4 about pictures of COCO (LLaVA), and pages of C4, in
`coco`, `llava_text` and `llamafactory_mllm_demo` of `--data`. Few texts are repeated. Their tokens
are those of a byte-level BPE that is trained on them.

Tokens of padding are not counted in tokens/s. A way's speed is the median of its rounds, and the
ways take turns. The last lines are the table of docs/from-padding-to-packs.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmstream as mm
from mmstream._torchvision import import_torchvision
from mmstream.batching.valid import is_flat
from mmstream.integrations.summed_loss import summed_loss
from mmstream.train.token_loss import weight_of_labels
from mmstream.types import Batch

import_torchvision()
import transformers  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

VOCABULARY = 4096
NUM_SAMPLES = 4096
"""Samples of each corpus."""
BUCKETED_BATCHES = 16
"""Batches of samples that are sorted together."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Corpus:
    """Texts of one kind."""

    name: str
    rows: list[dict[str, Any]]
    batch_size: int
    fixed_length: int
    """Tokens of a row in the way "fixed", which cuts longer texts."""


class Way(NamedTuple):
    """A way to make batches, and the attention that a model computes on them."""

    name: str
    attention: str = "sdpa"


WAYS = [
    Way("fixed"),
    Way("longest"),
    Way("bucketed"),
    Way("flat"),
    Way("flat", "documents"),
    Way("packed"),
    Way("packed", "documents"),
]


def main() -> None:
    """Measure all ways on all corpora and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=["captions", "answers", "pages"])
    parser.add_argument("--pack", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    transformers.AttentionInterface.register("documents", document_attention)
    corpora = [read(options.data) for name, read in READERS.items() if options.only in (None, name)]
    lines = [
        "| texts | way | attention | padding | tokens/s | times |",
        "|---|---|---|--:|--:|--:|",
    ]
    for corpus in corpora:
        lines += measure(corpus, options.pack, options.rounds, options.device)
    print("\n".join(lines))


def measure(corpus: Corpus, pack: int, num_rounds: int, device: str) -> Iterator[str]:
    """Measure a corpus, and yield the lines of its table."""
    tokenizer = train_tokenizer(corpus)
    model = small_model(tokenizer, max(pack, corpus.fixed_length) * 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        mm.convert(corpus.rows, folder, num_workers=0, progress=False)
        batches = {
            name: list(make_batches(folder, name, corpus, tokenizer, pack, num_rounds))
            for name in dict.fromkeys(way.name for way in WAYS)
        }
    padding = {name: share_of_padding(made) for name, made in batches.items()}
    speeds: dict[Way, list[float]] = {way: [] for way in WAYS}
    for number in range(num_rounds):
        for way in WAYS:
            batch = to_device(batches[way.name][number], device)
            model.set_attn_implementation(way.attention)
            speeds[way].append(tokens_per_s(model, optimizer, batch))
    base = statistics.median(speeds[WAYS[0]])
    for way in WAYS:
        speed = statistics.median(speeds[way])
        yield (
            f"| {corpus.name} | {way.name} | {way.attention} | {padding[way.name]:.1%} | "
            f"{speed:,.0f} | {speed / base:.1f} |"
        )


# -- texts ----------------------------------------------------------------------------------------


def captions(data: Path) -> Corpus:
    """Return captions of COCO's validation pictures: a dozen words each."""
    lines = (data / "coco/captions_val2017.jsonl").read_text().splitlines()
    texts = [text for line in lines for text in json.loads(line)["captions"]]
    rows = [{"text": text} for text in texts[:NUM_SAMPLES]]
    return Corpus("COCO captions", rows, 64, 128)


def answers(data: Path) -> Corpus:
    """Return questions about pictures, and answers of one line up to a few paragraphs."""
    lines = (data / "llava_text/coco2014_val_gpt4_qa_30x3.jsonl").read_text().splitlines()
    chats = []
    for row in map(json.loads, lines):
        turns = zip(("user", "assistant"), (row["instruction"], row["output"]), strict=True)
        chats.append([{"role": role, "content": text} for role, text in turns])
    rows = [{"messages": chats[i % len(chats)], "id": str(i)} for i in range(NUM_SAMPLES)]
    return Corpus("LLaVA answers", rows, 32, 512)


def pages(data: Path) -> Corpus:
    """Return pages of the web: of very different lengths."""
    lines = (data / "llamafactory_mllm_demo/data/c4_demo.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    rows = [{"text": texts[i % len(texts)]} for i in range(NUM_SAMPLES // 2)]
    return Corpus("C4 pages", rows, 8, 2048)


READERS = {"captions": captions, "answers": answers, "pages": pages}


def train_tokenizer(corpus: Corpus) -> Any:
    """Return a byte-level BPE of the corpus, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(map(text_of, corpus.rows), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


def text_of(row: dict[str, Any]) -> str:
    """Return all texts of a row."""
    return str(row.get("text") or " ".join(turn["content"] for turn in row["messages"]))


# -- batches --------------------------------------------------------------------------------------


def make_batches(
    folder: str, way: str, corpus: Corpus, tokenizer: Any, pack: int, number: int
) -> Iterator[Batch]:
    """Yield so many batches of a way."""
    if way == "bucketed":
        yield from bucketed(folder, corpus, tokenizer, number)
        return
    settings: dict[str, Any] = {"global_batch_size": corpus.batch_size}
    if way == "flat":
        settings["batching"] = mm.Flat()
    decode = decode_for(way, corpus, tokenizer, pack)
    if way == "packed":
        mm.measure(folder, decode=decode, num_workers=0, progress=False)
        plan = mm.plan_packs(folder, pack)
        settings = {"batching": mm.Pack(pack, plan=plan), "global_batch_size": 1}
    pipeline = mm.Pipeline(mm.open_dataset(folder), decode=decode, **settings)
    with closing(mm.Loader(pipeline)) as loader:
        for _, batch in zip(range(number), loader, strict=False):
            yield batch


def decode_for(way: str, corpus: Corpus, tokenizer: Any, pack: int) -> mm.Decode:
    """Return the decoder of the texts."""
    is_fixed = way == "fixed"
    text = mm.TextDecoder(
        tokenizer,
        max_length=pack if way == "packed" else corpus.fixed_length,
        padding="max_length" if is_fixed else "longest",
    )
    return mm.Decode(text=text)


def bucketed(folder: str, corpus: Corpus, tokenizer: Any, number: int) -> Iterator[Batch]:
    """Yield batches of samples of like lengths, as they are often made by hand."""
    pipeline = mm.Pipeline(
        mm.open_dataset(folder),
        global_batch_size=corpus.batch_size,
        decode=decode_for("bucketed", corpus, tokenizer, 0),
    )
    samples = pipeline.take(BUCKETED_BATCHES * corpus.batch_size)
    samples.sort(key=lambda sample: len(sample["input_ids"]))
    starts = list(range(0, len(samples) - corpus.batch_size + 1, corpus.batch_size))
    random.Random(0).shuffle(starts)
    for start in starts[:number]:
        rows = samples[start : start + corpus.batch_size]
        valid = torch.ones(len(rows), dtype=torch.bool)
        yield {**mm.collate(rows), "__valid__": valid}


def share_of_padding(batches: list[Batch]) -> float:
    """Return the share of padding among the tokens that a model computes."""
    num_positions = sum(batch["input_ids"].numel() for batch in batches)
    return float(1 - sum(map(num_tokens, batches)) / num_positions)


def num_tokens(batch: Batch) -> int:
    """Return the tokens of a batch without padding."""
    return int(batch["num_tokens"] if is_flat(batch) else batch["attention_mask"].sum())


def to_device(batch: Batch, device: str) -> Batch:
    """Return a batch with its tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


# -- the model ------------------------------------------------------------------------------------


def small_model(tokenizer: Any, max_length: int) -> Any:
    """Return a Llama of 1.8 million weights."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_length,
    )
    return transformers.LlamaForCausalLM(config).train()


def tokens_per_s(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Do one optimizer step and return its tokens per second, without padding."""
    synchronize(model)
    started = time.perf_counter()
    names = ["input_ids", "position_ids" if is_flat(batch) else "attention_mask"]
    if model.config._attn_implementation == "documents":
        names.append("cu_seq_lens_q")
    inputs = {name: batch[name] for name in names}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    loss = summed_loss(logits, batch["labels"][:, 1:]) / weight_of_labels(batch).clamp(min=1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    synchronize(model)
    return num_tokens(batch) / (time.perf_counter() - started)


def synchronize(model: nn.Module) -> None:
    """Wait until the device has finished."""
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.synchronize()


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of [1, heads, T, size], each document by itself: [1, T, heads, size]."""
    del module, attention_mask
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, start:stop],
            value[:, :, start:stop],
            is_causal=True,
            scale=scaling,
        )
        for start, stop in pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


if __name__ == "__main__":
    main()
