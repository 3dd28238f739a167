"""``mmstream measure``: the lengths of all samples, for plans of packs. It imports torch."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    allow_foreign_urls,
    command,
    open_tokenizer,
    say,
    shows_infos_of,
)
from mmstream.errors import ConfigError

if TYPE_CHECKING:
    from mmstream.decoding.decode import Decode

__all__ = ["measure"]


@command("mmstream measure s3://bucket/corpus --decode train:decode --name qwen")
@click.argument("url")
@click.option(
    "--name", default="default", show_default=True, help="Of the measure. A plan names it."
)
@click.option(
    "--decode",
    "decode_name",
    metavar="MODULE:OBJECT",
    help="The decoders of training: a Decode, or a function without arguments that returns one.",
)
@click.option(
    "--processor",
    metavar="FOLDER",
    help="Instead: the folder of a Qwen-VL model with its tokenizer and processor.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="Instead, for text alone: the folder of a tokenizer. `bytes` is one of one token per "
    "byte.",
)
@click.option(
    "--image-size",
    type=AT_LEAST_1,
    metavar="PIXELS",
    help="With --tokenizer: pictures of this side, which take no tokens.",
)
@click.option("--field", metavar="NAME", help="With --tokenizer or --processor: where the text is.")
@click.option(
    "--before",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="A function before decoding, as of Pipeline(before=). May be repeated.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="With --epochs: seed of the run."
)
@click.option(
    "--epochs",
    metavar="A-B",
    help="Where lengths depend on random draws: the epochs that are measured, such as 0-2. The "
    "longest length counts.",
)
@click.option(
    "--room",
    type=AT_LEAST_0,
    default=0,
    show_default=True,
    help="Tokens that each sample gets more, in place of --epochs.",
)
@click.option(
    "--patch-size",
    type=AT_LEAST_1,
    default=14,
    show_default=True,
    metavar="PIXELS",
    help="Side of a patch of the vision tower.",
)
@click.option(
    "--output",
    "folder",
    metavar="FOLDER",
    help="Folder or URL of the measure.  [default: beside the index]",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    help="Processes. The measure is the same for any number.  [default: one per core, where it "
    "takes more than 30 s]",
)
@allow_foreign_urls
def measure(
    url: str,
    decode_name: str | None,
    processor: str | None,
    tokenizer: str | None,
    image_size: int | None,
    field: str | None,
    before: tuple[str, ...],
    epochs: str | None,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Measure the lengths of all samples at URL, as training will count them.

    The texts are tokenized by the decoders of training. No pixel is decoded: the sizes of pictures
    come from their headers. Where `mmstream index --facts` has written facts, no picture is read.

    To continue an interrupted call, run the same command again. Samples that cannot be used are
    listed in unusable.jsonl in the folder of the measure.
    """
    from mmstream.converting.formats.function import load_function
    from mmstream.dataset.open import open_dataset
    from mmstream.measuring.measure import measure as run

    given = [name for name in (decode_name, processor, tokenizer) if name is not None]
    if len(given) != 1:
        raise click.UsageError("give one of --decode, --processor and --tokenizer")
    if image_size is not None and tokenizer is None:
        raise click.UsageError("--image-size goes with --tokenizer")
    if field is not None and decode_name is not None:
        raise click.UsageError("--field goes with --tokenizer or --processor")
    decode = (
        _loaded(decode_name)
        if decode_name is not None
        else _of_processor(processor, field)
        if processor is not None
        else _of_tokenizer(str(tokenizer), image_size, field)
    )
    with shows_infos_of("mmstream.measuring.measure"):  # how much is read, how long it takes
        measured = run(
            open_dataset(url, allow_foreign_urls=allow_foreign_urls),
            decode=decode,
            before=[load_function(name) for name in before],
            epochs=None if epochs is None else _epochs(epochs),
            **options,
        )
    tokens = measured.column("num_tokens")
    usable = tokens[tokens >= 0]
    num_unusable = len(tokens) - len(usable)
    words = f"{int(usable.sum()):,} tokens in {len(usable):,} samples"
    if len(usable):
        words += f", {usable.mean():,.1f} in the mean, {int(usable.max()):,} at most"
    if num_unusable:
        words += f"; {num_unusable:,} samples cannot be used, see unusable.jsonl"
    say(words)


def _loaded(name: str) -> Decode:
    """Return the decoders that ``module:object`` names."""
    from mmstream.converting.formats.function import load_object
    from mmstream.decoding.decode import Decode

    value = load_object(name)
    if not isinstance(value, Decode) and callable(value):
        try:
            signature(value).bind()
        except (TypeError, ValueError):  # ValueError: a function in C that does not say it
            raise ConfigError(f"{name}: is a function with arguments, and no mm.Decode") from None
        value = value()
    if not isinstance(value, Decode):
        raise ConfigError(f"{name}: is {type(value).__name__}, and no mm.Decode")
    return value


def _of_processor(folder: str, field: str | None) -> Decode:
    """Return the decoders of a model's folder."""
    from mmstream.train.chat import CHAT_FAMILIES, chat_decode
    from mmstream.train.pretrained import read_json
    from mmstream.train.tokenizer import open_tokenizer

    family = read_json(Path(folder, "config.json")).get("model_type")
    if family not in CHAT_FAMILIES:
        raise ConfigError(
            f"{folder}: is a model of {family}, and --processor knows {', '.join(CHAT_FAMILIES)}: "
            "give --decode module:object"
        )
    return chat_decode(open_tokenizer(folder, chat=True), folder, 1 << 20, field=field)


def _of_tokenizer(folder: str, image_size: int | None, field: str | None) -> Decode:
    """Return the decoders of a tokenizer."""
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.text.decoder import TextDecoder

    text = TextDecoder(open_tokenizer(folder), field=field)
    image = None if image_size is None else ImageDecoder(size=image_size)
    return Decode(image=image, text=text)


def _epochs(text: str) -> list[int]:
    """Return the epochs of ``A-B``, both included, or of one number."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise click.UsageError(f"--epochs {text}: give numbers such as 0-2, or one such as 0")
    return list(range(int(first), int(last or first) + 1))
