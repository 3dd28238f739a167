"""Probes: a few samples of a corpus that prove that decoders still count as a measure does.

Place in the flow: `measure.py` keeps 64 of them in a measure, with their texts, the sizes of their
pictures, and what was counted. `automatic.py` counts them again with the decoders of a pipeline,
before its first step. What binds is how decoders behave, and not which files or versions they are.

Half of the probes are spread over the corpus. The others are chosen: the longest and the shortest
sample, that with the most pictures, and one of each kind of sample that there is.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.facts import Fact, fact_of
from mmstream.dataset.positions import refs_at
from mmstream.errors import ManifestError, SampleError, escaped, where
from mmstream.measuring.lengths import Counter, SampleLengths
from mmstream.measuring.settings import differing_settings, library_versions, settings_of
from mmstream.packing.measure_file import COLUMNS, Measure, MeasureHead
from mmstream.types import IntArray, Sample, SampleRef

__all__ = ["MAX_KINDS", "difference", "encode_probes", "kind_of", "probes_of"]

NUM_SPREAD = 32
"""Probes that are spread over the corpus."""

NUM_CHOSEN = 32
"""Probes that are chosen for what they are."""

MAX_KINDS = 64
"""Kinds of samples of a shard that are remembered."""

MAX_PROBE_BYTES = 256 << 10
"""Largest text of a probe."""

MAX_PROBES_BYTES = 64 << 20
"""Most bytes that all probes of a measure take."""

FIRST_IDS = 16
"""Token ids of a probe that are kept to show where two tokenizers differ."""

NUM_THREADS = 8
"""Probes that are read at a time."""

_DIGITS = re.compile(r"\d+")


class Probe(NamedTuple):
    """A sample, and what was counted of it."""

    shard: str
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    fact: Fact
    values: tuple[int, ...]
    """One for each of `COLUMNS`."""
    ids_crc32: int
    """CRC-32C of its token ids."""
    first_ids: tuple[int, ...]


def kind_of(sample: Sample) -> str:
    r"""Return what kind of sample this is: its files, the roles of its turns, its characters.

    Two samples of one kind are mostly counted by the same lines of a template and a tokenizer.

    Examples:
        >>> kind_of({"__key__": "1", "0.jpg": b"", "1.jpg": b"", "txt": b"caf\xc3\xa9"})
        '#.jpg txt; not ASCII'
    """
    words = [_fields_of(tuple(sample))]
    row = sample.get("json")
    text = sample.get("txt")
    if isinstance(row, bytes):
        # The words of JSON are enough here, and parsing takes longer than all else.
        roles = sorted(set(_ROLES.findall(row)))
        words.append(b" ".join(roles).decode("ascii", "replace"))
        words += [word for word, mark in _MARKS if mark in row]
    for data in (row, text):
        if isinstance(data, bytes) and not (data.isascii() and b"\\u" not in data):
            words.append("not ASCII")
            break
    return "; ".join(filter(None, words))


_ROLES = re.compile(rb'"role": ?"(\w{1,20})"')
_MARKS = (("tools", b'"tools"'), ("tool calls", b'"tool_calls"'))


@lru_cache(maxsize=1024)
def _fields_of(names: tuple[str, ...]) -> str:
    """Return the names of files, numbers as ``#``, each once."""
    fields = {_DIGITS.sub("#", name) for name in names if not name.startswith("__")}
    return " ".join(sorted(fields))


def probes_of(
    dataset: Dataset,
    counter: Counter,
    values: IntArray,
    kinds: Iterable[int],
    epoch: int,
    seed: int,
) -> list[Probe]:
    """Choose probes, read them, and count them.

    Args:
        dataset: Which was measured.
        counter: Counts.
        values: int64 [num_samples, len(COLUMNS)], what was counted.
        kinds: Positions of samples, one of each kind.
        epoch: Of the random draws.
        seed: Of the random draws.
    """
    positions = _positions(values, kinds)
    refs = [
        (int(shard), int(index)) for shard, index in refs_at(np.cumsum(dataset.counts), positions)
    ]

    def read(ref: SampleRef) -> Fact | None:
        try:
            sample = dataset.read(*ref)
        except SampleError:
            return None
        fact = fact_of(sample["__key__"], sample)
        size = 0 if fact is None else sum(map(len, fact.fields.values()))
        return fact if size <= MAX_PROBE_BYTES else None

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        facts = list(pool.map(read, refs))
    read_refs = [(ref, fact) for ref, fact in zip(refs, facts, strict=True) if fact is not None]
    samples = [fact.sample(dataset.url_of(ref[0]), ref) for ref, fact in read_refs]
    name_of = dataset.name_of
    lengths = counter.decoded_lengths(samples, [ref for ref, _ in read_refs], name_of, seed, epoch)
    return [
        Probe(name_of(ref[0]), ref[1], fact, each.values, *_ids_of(each))
        for (ref, fact), each in zip(read_refs, lengths, strict=True)
        if not each.reason
    ]


def _ids_of(lengths: SampleLengths) -> tuple[int, tuple[int, ...]]:
    """Return the CRC-32C of token ids, as little-endian int64, and the first of them."""
    ids = lengths.ids
    return int(crc32c(ids.astype("<i8").tobytes())), tuple(ids[:FIRST_IDS].tolist())


def _positions(values: IntArray, kinds: Iterable[int]) -> IntArray:
    """Return the positions of probes, ascending."""
    usable = np.flatnonzero(values[:, 0] >= 0)
    if not usable.size:
        return usable
    spread = usable[np.linspace(0, usable.size - 1, NUM_SPREAD).astype(np.int64)]
    of = {name: values[usable, number] for number, name in enumerate(COLUMNS)}
    most = ("num_tokens", "num_images", "patches", "num_label_tokens")
    chosen = [int(usable[of[name].argmax()]) for name in most]
    chosen.append(int(usable[of["num_tokens"].argmin()]))
    is_usable = set(usable.tolist())
    chosen += [position for position in kinds if position in is_usable]
    return np.unique([*spread.tolist(), *chosen[:NUM_CHOSEN]]).astype(np.int64)


def encode_probes(probes: Sequence[Probe]) -> str:
    """Return probes as text, for the JSON of a measure."""
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(list(probes)))).decode()


def decode_probes(text: str) -> list[Probe]:
    """Return the probes of a text.

    Raises:
        ManifestError: It is damaged.
    """
    try:
        decompress = zlib.decompressobj()
        data = decompress.decompress(base64.b64decode(text), MAX_PROBES_BYTES)
        return msgspec.msgpack.decode(data, type=list[Probe])
    except (ValueError, zlib.error, msgspec.MsgspecError, RecursionError):
        raise ManifestError(
            "a measure's probes are damaged; run `mmstream measure` again"
        ) from None


def difference(measure: Measure | MeasureHead, counter: Counter) -> str | None:
    """Count the probes of a measure again. Return the first difference, or None.

    Args:
        measure: With its probes.
        counter: With the decoders of a pipeline, and with the patch size of the measure.

    Raises:
        ManifestError: The probes are damaged.
        ConfigError, NameError, ...: A function of the user is wrong.
    """
    settings = measure.settings
    probes = decode_probes(str(measure.details.get("probes", "")))
    if not probes:
        return None
    epochs = settings.get("epochs") or [0]
    numbers = {shard.name: number for number, shard in enumerate(measure.shards)}
    refs = [(numbers.get(probe.shard, 0), probe.index) for probe in probes]
    samples = [probe.fact.sample(probe.shard, ref) for probe, ref in zip(probes, refs, strict=True)]
    names = {ref[0]: probe.shard for probe, ref in zip(probes, refs, strict=True)}
    lengths = counter.decoded_lengths(
        samples, refs, names.__getitem__, int(settings.get("seed") or 0), int(epochs[0])
    )
    for probe, each in zip(probes, lengths, strict=True):
        words = _words_of_difference(probe, each, counter)
        if words:
            address = where(probe.shard, probe.index, probe.fact.key)
            return f"{address}: {words}; {_reason(measure, counter)}"
    return None


def _words_of_difference(probe: Probe, now: SampleLengths, counter: Counter) -> str:
    """Say how the counts of a probe differ; "" where they do not."""
    if now.reason:
        return f"cannot be used now: {now.reason}"
    old = dict(zip(COLUMNS, probe.values, strict=True))
    new = dict(zip(COLUMNS, now.values, strict=True))
    for name, noun in (("num_images", "images"), ("patches", "patches"), ("num_tokens", "tokens")):
        if old[name] != new[name]:
            words = f"{new[name]:,} {noun}, {old[name]:,} in the measure"
            return words + _token_words(probe, now, counter)
    if probe.ids_crc32 != _ids_of(now)[0]:
        return "other token ids than in the measure" + _token_words(probe, now, counter)
    for name in COLUMNS:
        if old[name] != new[name]:
            return f"{name} is {new[name]:,}, {old[name]:,} in the measure"
    return ""


def _token_words(probe: Probe, now: SampleLengths, counter: Counter) -> str:
    """Name the first token that differs, where it is one of the first."""
    for number, (old, new) in enumerate(zip(probe.first_ids, now.ids.tolist(), strict=False)):
        if old != new:
            text = counter.decode.text
            assert text is not None
            token = escaped(repr(text.tokenizer.convert_ids_to_tokens(new)), 40)
            return f", from token {number} on: id {new} ({token}), was {old}"
    return ""


def _reason(measure: Measure | MeasureHead, counter: Counter) -> str:
    """Say which settings and versions differ."""
    settings: Mapping[str, Any] = measure.settings
    draws = {name: settings.get(name) for name in ("seed", "epochs", "room")}
    now = settings_of(counter) | draws
    names = differing_settings(settings, now)
    old_versions: Mapping[str, str] = dict(measure.details.get("libraries", {}))
    versions = [
        f"{name} {old_versions.get(name)}, now {version}"
        for name, version in library_versions().items()
        if old_versions.get(name) != version
    ]
    if names:
        words = ", ".join(name.replace("_", " ") for name in names[:4])
        return f"what differs: {words}" + (f" ({'; '.join(versions)})" if versions else "")
    if versions:
        return f"all settings are the same, but the measure was made with {'; '.join(versions)}"
    return "all settings are the same: does a function before decoding count otherwise?"
