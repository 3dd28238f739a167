"""Statistics of a dataset, measured on some samples: sizes, words, tokens, turns, classes.

Beside the flow: `statistics` reads samples that are spread over a dataset or a mixture, side by
side. Of pictures, videos and recordings it reads the headers only. `mmstream.display` shows the
result.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mmstream.dataset.dataset import (
    ShardSource,
    load_indexes,
    numbered_datasets,
    read_sample,
    refs_of,
)
from mmstream.display.contents import messages_of, parts_of, row_json, spread, text_of
from mmstream.errors import ConfigError, DecodeError, SampleError, ShardError, escaped, where
from mmstream.media.fields import (
    MAX_TEXT_BYTES,
    decode_text,
    image_fields,
    list_of_frame,
    parse_json,
)
from mmstream.media.frames import encoded_video
from mmstream.media.limits import Deadline, Limits
from mmstream.media.types import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.settings import AnyInt, PositiveInt, checked, shown
from mmstream.types import IGNORED_LABEL, Sample, SampleRef

if TYPE_CHECKING:
    from mmstream.decoding.text.decoder import TextDecoder
    from mmstream.media.ffmpeg import MediaKind

MAX_REASONS = 5
"""Bad samples whose reasons are kept."""

MAX_CLASS_CHARACTERS = 80

CLASS_NAMES = ("cls", "label", "class", "class_name", "category")
"""Where ``json`` keeps the class of a sample, in this order."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """What `statistics` has measured. The last line of a cell in a notebook shows it.

    Attributes:
        num_samples: Of the dataset.
        num_measured: Samples that were read and are good.
        num_bad: Samples that cannot be read, or whose text or picture headers are damaged. Their
            numbers are left out.
        reasons: The reasons of the first of these, each with ``shard[index]``.
        values: By name, float64 [n], in the order of the samples: one number per sample, or one per
            picture for "image width", "image height" (both in pixels, upright) and "image bytes",
            and one per video or recording for "video seconds", "video width", "video bytes", "audio
            sample rate" (in Hz), "audio bytes" and the like. Of what no sample has, there is no
            entry.
        classes: How many samples have each class, the most frequent first. The class is the text of
            ``cls``, or a label in ``json``.
        fields: How many of the samples measured have each field, the most frequent first. A number
            below `num_measured` says that some samples lack it.
        uncounted_media: Kinds of media in the samples whose tokens "tokens" does not count.
    """

    num_samples: int
    num_measured: int
    num_bad: int
    reasons: tuple[str, ...]
    values: dict[str, Values]
    classes: dict[str, int]
    fields: dict[str, int] = field(default_factory=dict)
    uncounted_media: tuple[str, ...] = ()

    @property
    def hours(self) -> dict[str, float]:
        """Hours of "video" and of "audio" in the samples measured, where they have some.

        Sound counts where it is a separate file. ``num_samples / num_measured`` times as much is
        an estimate for the whole dataset.
        """
        seconds = {kind: self.values.get(f"{kind} seconds") for kind in ("video", "audio")}
        return {kind: float(s.sum()) / 3600 for kind, s in seconds.items() if s is not None}

    def summary(self) -> dict[str, Any]:
        """Return numbers for JSON: of each value its count, minimum, quantiles, mean, maximum."""
        return {
            "num_samples": self.num_samples,
            "num_measured": self.num_measured,
            "num_bad": self.num_bad,
            "reasons": list(self.reasons),
            "hours": self.hours,
            "fields": dict(islice(self.fields.items(), 100)),
            "uncounted_media": list(self.uncounted_media),
            "values": {name: _summary(values) for name, values in self.values.items()},
            "num_classes": len(self.classes),
            "classes": dict(islice(self.classes.items(), 100)),
        }

    def __repr__(self) -> str:
        bad = f", {self.num_bad:,} bad" * bool(self.num_bad)
        names = ", ".join(self.values)
        return (
            f"<Statistics of {self.num_measured:,} of {self.num_samples:,} samples{bad}: {names}>"
        )

    def _repr_html_(self) -> str:
        from mmstream.display.samples import statistics_html

        return statistics_html(self)


def _summary(values: Values) -> dict[str, float]:
    quantiles = np.quantile(values, [0.05, 0.5, 0.95])
    return {
        "count": len(values),
        "min": float(values.min()),
        "p5": float(quantiles[0]),
        "median": float(quantiles[1]),
        "mean": float(values.mean()),
        "p95": float(quantiles[2]),
        "max": float(values.max()),
    }


class _Measured(NamedTuple):
    """The measurements of one sample."""

    values: dict[str, list[float]]
    fields: list[str]
    class_name: str | None


@checked({"dataset": "give mm.open_dataset(...)"}, own=("text",))
def statistics(
    dataset: ShardSource,
    num_samples: PositiveInt = 1000,
    *,
    seed: AnyInt = 0,
    text: TextDecoder | None = None,
    num_threads: PositiveInt = 16,
    progress: bool = False,
) -> Statistics:
    """Measure some samples of a dataset: bytes, sizes of pictures, words, turns, classes, tokens.

    The samples are random ones, one from each of `num_samples` equal parts of the dataset: a corpus
    that is sorted is measured fairly. The same seed gives the same samples and numbers. They are
    read side by side, whole, and one by one in memory. Pictures, videos and recordings are not
    decoded, so damage after their headers is not noticed; ``mmstream verify --decode`` finds it.

    Args:
        dataset: A Dataset or a Mixture, local or remote. What was taken down is left out.
        num_samples: Samples to read; all, if the dataset has fewer.
        seed: Draws the samples.
        text: Also counts the tokens of each sample, and those that are learned. A medium counts
            as many as the `TextDecoder` says, if that is a number, and else one.
        num_threads: Samples to read at the same time.
        progress: Show a progress bar (on a terminal only).

    Raises:
        ConfigError: `num_samples` or `num_threads` is below 1, or the length of media in tokens is
            a function.
        StorageError: The storage failed after retries.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> stats = mm.statistics(dataset, num_samples=100)
        >>> stats.num_measured, float(stats.values["image width"].max())
        (100, 288.0)
    """
    if text is not None and not hasattr(text, "counted_media"):
        raise ConfigError(f"text={shown(text)}: give mm.TextDecoder(tokenizer)")
    for kind in sorted(getattr(text, "needs_shapes", ())):
        raise ConfigError(f"statistics: {kind}_length is a function; give a TextDecoder without it")
    positions = np.array(spread(len(dataset), num_samples, seed), dtype=np.int64)
    taken_down = {
        (first_shard + shard, index)
        for first_shard, own in numbered_datasets(dataset)
        for shard, index in own.removed
    }
    refs = [ref for ref in refs_of(dataset, positions) if ref not in taken_down]
    load_indexes(dataset, [shard for shard, _ in refs])
    values: dict[str, list[float]] = {}
    classes, fields = Counter[str](), Counter[str]()
    reasons: list[str] = []
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mmstream-statistics")
    is_hidden = None if progress else True
    try:
        results = pool.map(lambda ref: _measure(dataset, ref, text), refs)
        for result in tqdm(results, total=len(refs), unit="sample", disable=is_hidden):
            if isinstance(result, Exception):
                reasons.append(escaped(result, 500))
                continue
            fields.update(result.fields)
            classes.update([] if result.class_name is None else [result.class_name])
            for name, numbers in result.values.items():
                values.setdefault(name, []).extend(numbers)
    finally:
        pool.shutdown(cancel_futures=True)
    media = [kind for kind in ("image", "video", "audio") if f"{kind} bytes" in values]
    return Statistics(
        len(dataset),
        len(refs) - len(reasons),
        len(reasons),
        tuple(reasons[:MAX_REASONS]),
        {name: np.array(values[name]) for name in _ORDER if name in values},
        _by_count(classes),
        _by_count(fields),
        tuple(kind for kind in media if text is not None and kind not in text.counted_media),
    )


def _by_count(counts: Counter[str]) -> dict[str, int]:
    """Return counts with the most frequent first."""
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


MEDIA_TIMEOUT_S = 60.0
"""Longest time to read the headers of a video or of a recording."""

_FACTS = {
    "duration_s": "seconds",
    "fps": "frames per second",
    "num_frames": "frames",
    "width": "width",
    "height": "height",
    "sample_rate": "sample rate",
}
"""The names of the values, by the keys of `media_facts`."""

_ORDER = (
    "sample bytes",
    "images",
    "image width",
    "image height",
    "image bytes",
    "video seconds",
    "video frames per second",
    "video frames",
    "video width",
    "video height",
    "video bytes",
    "audio seconds",
    "audio sample rate",
    "audio bytes",
    "words",
    "turns",
    "tokens",
    "learned tokens",
)


def _measure(
    dataset: ShardSource, ref: SampleRef, text: TextDecoder | Any | None
) -> _Measured | SampleError | ShardError:
    """Return what is measured of a sample, or why it is bad."""
    try:
        sample = read_sample(dataset, *ref)
        address = f"{where(dataset.name_of(ref[0]), ref[1])} {escaped(sample['__key__'])}"
        num_bytes = sum(len(value) for value in sample.values() if isinstance(value, bytes))
        values: dict[str, list[float]] = {"sample bytes": [float(num_bytes)]}
        fields = [name for name in sample if name[:2] != "__"]
        for name in fields:
            try:
                _measure_field(sample, name, values)
            except DecodeError as error:
                return SampleError(f"{address}.{escaped(name)}: {error}")
        messages = messages_of(sample)
        texts = [part.get("text") for turn in messages for part in parts_of(turn)]
        if not messages:
            texts = [str(text_of(sample))]
        plain_text = " ".join(text for text in texts if isinstance(text, str))
        counts: dict[str, int] = {"images": len(image_fields(sample)), "turns": len(messages)}
        values |= {name: [float(count)] for name, count in counts.items() if count}
        if plain_text or "txt" in sample:
            values["words"] = [float(len(plain_text.split()))]
        if text is not None:
            decoded = _decoded_text(sample, text, address)
            num_learned = int(np.count_nonzero(decoded.tokens["labels"] != IGNORED_LABEL))
            values["tokens"] = [float(decoded.num_tokens)]
            values["learned tokens"] = [float(num_learned)]
    except (SampleError, ShardError) as error:
        return error
    return _Measured(values, fields, _class_of(sample))


def _decoded_text(sample: Sample, text: Any, address: str) -> Any:
    """Return the `DecodedText` of a sample.

    Raises:
        SampleError: The text cannot be tokenized, or a medium of it is damaged.
    """
    if hasattr(text, "tokens_of"):
        return text.tokens_of(sample)
    (decoded,) = text.decode_all([sample])
    if isinstance(decoded, SampleError):
        raise SampleError(f"{address}.{escaped(text.source(sample))}: {decoded}")
    return decoded


def _measure_field(sample: Sample, name: str, values: dict[str, list[float]]) -> None:
    """Measure a field, and parse it if it is text. Media are not decoded.

    Raises:
        DecodeError: The text is damaged, or the header of the medium.
    """
    value = sample[name]
    kind = name.rpartition(".")[2]
    if not isinstance(value, bytes):
        return
    if name == "json":
        sample[name] = parse_json(value)
    elif name == "txt":
        sample[name] = decode_text(value, MAX_TEXT_BYTES)
    elif list_of_frame(name) in sample:
        pass  # measured with its list
    elif kind in IMAGE_EXTENSIONS:
        height, width = _image_shape(value)
        numbers = {"image width": width, "image height": height, "image bytes": len(value)}
        for key, number in numbers.items():
            values.setdefault(key, []).append(float(number))
    elif kind in AUDIO_EXTENSIONS | VIDEO_EXTENSIONS:
        from mmstream.media.facts import media_facts

        medium: MediaKind = "video" if kind in VIDEO_EXTENSIONS else "audio"
        file: Any = encoded_video(sample, name)
        values.setdefault(f"{medium} bytes", []).append(float(len(file)))
        facts = media_facts(file, medium, Deadline.start(MEDIA_TIMEOUT_S))
        for fact, fact_name in _FACTS.items():
            if fact in facts and (medium == "audio" or fact != "sample_rate"):
                values.setdefault(f"{medium} {fact_name}", []).append(float(facts[fact]))


def _image_shape(data: bytes) -> tuple[int, int]:
    """Return (height, width) of an upright picture, from its header where that tells.

    Raises:
        DecodeError: It is not a picture of a known format, or too large.
    """
    from mmstream.media.image import decode_whole, header_shape

    limits = Limits.start()
    height, width = header_shape(data, limits) or decode_whole(data, limits).shape[:2]
    return height, width


def _class_of(sample: Sample) -> str | None:
    """Return the class of a sample as text, cut to a length."""
    value = sample.get("cls")
    if value is None:
        row = row_json(sample)
        value = next((row[name] for name in CLASS_NAMES if name in row), None)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace").strip()
    return escaped(value, MAX_CLASS_CHARACTERS) if isinstance(value, str | int) else None
