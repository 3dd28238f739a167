"""Which samples take part: those that fulfil a condition, and selections that are stored.

    condition -> columns of each shard -> bits       `where`, `explain`, `bucket_order`
    hashes of media of each shard -> bits            `split_by_media`
    ``mmstream select`` -> files -> bits, mapped     `select`

What is stored lies beside the index. A set of samples is named by its content and never changes;
small sealed files lead to it, one by a name that people give, and one by a condition::

    mmstream.select.DIGEST              int64 [num_shards], samples of each shard, and the bits
    mmstream.select.name.NAME.json      the digest, how the samples were chosen, and the corpus
    mmstream.select.where.DIGEST.json   the same, by the digest of a condition and the corpus

A set of 10^9 samples in 100,000 shards has 126 MB.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mmstream.dataset.keys import MAX_NAMED, NUM_THREADS, keys_of_shard
from mmstream.dataset.manifest import IndexPart, read_sealed_as, require_name, seal
from mmstream.dataset.shard_indexes import map_whole
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, ManifestError, ShardError, StateError, escaped
from mmstream.order import BucketOrder, Buckets, buckets_of
from mmstream.order.corpus import Corpus, differing_keys
from mmstream.order.permute import random_words
from mmstream.order.selection import Mask, Selection, num_bit_bytes
from mmstream.ranks import World, resolve_world
from mmstream.storage import NotAFileError, ReplacedError, Store
from mmstream.storage.write_lock import write_lock
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

SHARDS_AT_ONCE = 256
"""Shards whose masks may be in memory."""

Function = Callable[[Any], Any]
"""From a table of Arrow to bool [its rows]."""

T = TypeVar("T")


# -- conditions ------------------------------------------------------------------------------------


class ClauseCounts(NamedTuple):
    """How many samples a clause of a condition lets pass."""

    text: str
    num_passed: int
    num_failed: int
    num_null: int
    """Samples of which a value is not known, so that they neither pass nor fail."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """What each clause of a condition leaves. It prints as a table."""

    clauses: tuple[ClauseCounts, ...]
    """The operands of the outermost ``and``."""
    together: ClauseCounts
    """The whole condition."""

    def __repr__(self) -> str:
        rows = [f"{row[1]:>13,} {row[2]:>13,} {row[3]:>13,}  {row[0]}" for row in self.clauses]
        last = f"{self.together[1]:>13,} {self.together[2]:>13,} {self.together[3]:>13,}"
        head = f"{'pass':>13} {'fail':>13} {'NULL':>13}"
        return "\n".join([head, *map(escaped, rows), f"{last}  all together"])


class Rule(NamedTuple):
    """A condition, or a function of the caller."""

    text: str
    """It names the rule in messages, and what is stored of a condition."""
    clauses: tuple[str, ...]
    names: tuple[str, ...]
    """The columns that it reads."""
    truths: Callable[[Mapping[str, Any]], list[Any]]
    """From these columns of a shard to a BooleanArray of Arrow for each clause."""
    options: tuple[str, ...]
    """Of `mmstream select`."""


def rule_of(condition: str | Function, columns: Sequence[str] | None = None) -> Rule:
    """Return the rule of a condition or function.

    Raises:
        ConfigError: The text is not a condition, or a function comes without columns.
    """
    if isinstance(condition, str):
        if columns is not None:
            raise ConfigError("columns= is for a function: a condition names its columns itself")
        from mmstream.dataset.condition import Condition

        parsed = Condition.parse(condition)
        clauses, text = parsed.clauses, parsed.text
        return Rule(
            text,
            tuple(clause.text for clause in clauses),
            parsed.names,
            lambda table: [clause.evaluate(table) for clause in clauses],
            ("--where", text),
        )
    if not columns:
        raise ConfigError('where: name the columns that the function gets, columns=["width"]')
    name = f"{condition.__module__}:{getattr(condition, '__qualname__', type(condition).__name__)}"
    return Rule(
        name,
        (name,),
        tuple(columns),
        lambda table: [_called(condition, name, table)],
        ("--where", name, "--columns", ",".join(columns), "--name", "NAME"),
    )


def _called(function: Function, name: str, columns: Mapping[str, Any]) -> Any:
    """Return what a function says of the samples of a shard, as a BooleanArray of Arrow."""
    import pyarrow as pa

    table = pa.table(dict(columns))
    returned = function(table)
    values = returned.combine_chunks() if isinstance(returned, pa.ChunkedArray) else returned
    with suppress(TypeError, ValueError, pa.ArrowException):
        values = values if isinstance(values, pa.Array) else pa.array(values)
    is_array = isinstance(values, pa.Array) and pa.types.is_boolean(values.type)
    if not is_array or len(values) != table.num_rows:
        got = f"{len(values):,} of {values.type}" if isinstance(values, pa.Array) else repr(values)
        raise ConfigError(
            f"where {escaped(name)}: returned {escaped(got)} for {table.num_rows:,} rows: return "
            "true or false for each row"
        )
    return values


def where(
    dataset: Any,
    condition: str | Function,
    columns: Sequence[str] | None,
    world: World | None,
    *,
    progress: bool,
) -> Any:
    """Return a view of the samples that fulfil a condition. See `Dataset.where`."""
    rule = rule_of(condition, columns)
    if isinstance(condition, str):  # what a function returns may change with what it uses
        with suppress(FileNotFoundError):
            selection = _stored(dataset, lambda own: _where_name(own, rule.text))
            return _within(dataset, selection, f"where {escaped(rule.text)}")
    _refuse_ranks(f"where {escaped(rule.text)}", dataset, rule.options, world)
    return dataset.with_selection(evaluated(dataset, rule, progress=progress)[0])


def _refuse_ranks(what: str, dataset: Any, options: Sequence[str], world: World | None) -> None:
    """Raise a ConfigError where several ranks would each read the columns of all shards."""
    if (num_ranks := resolve_world(world).world_size) > 1:
        folders = [own.index_store.url for own in dataset.folders or [dataset]]
        command = " && ".join(shlex.join(["mmstream", "select", url, *options]) for url in folders)
        then = ', and use dataset.select("NAME")' * ("--name" in options)
        run = f"run `{escaped(command, limit=None)}` once before them{then}; " if options else ""
        raise ConfigError(
            f"{what}: {num_ranks} ranks would each read the columns of all shards: {run}a process "
            "that chooses for itself passes world=mm.World()"
        )


def evaluated(dataset: Any, rule: Rule, *, progress: bool) -> tuple[Selection, Explanation]:
    """Return the samples of a dataset or view that fulfil a rule, and what each clause leaves.

    Raises:
        ConfigError: There are none.
    """
    explanation, selection = explained(dataset, rule, progress=progress)
    together = explanation.together
    if not together.num_passed:
        left = "; ".join(f"{row.text} leaves {row.num_passed:,}" for row in explanation.clauses)
        is_unknown = together.num_null == len(dataset)
        cure = "no sample has these values" if is_unknown else "relax the condition"
        raise ConfigError(
            f"where {escaped(rule.text)}: none of {count_text(len(dataset), 'sample')} is chosen, "
            f"and {together.num_null:,} are NULL: {escaped(left)}; {cure}"
        )
    if together.num_null:
        logger.warning(
            "where %s: %s left out, because a value is not known (NULL); dataset.explain() counts "
            "them for each clause",
            escaped(rule.text),
            f"{together.num_null:,} of {count_text(len(dataset), 'sample')} are",
        )
    return selection, explanation


def explained(dataset: Any, rule: Rule, *, progress: bool) -> tuple[Explanation, Selection]:
    """Return what each clause of a rule leaves, and the samples that fulfil all of them."""
    totals = np.zeros((len(rule.clauses) + 1, 3), dtype=np.int64)

    def masks() -> Iterator[Mask]:
        for mask, counts in _of_shards(dataset, partial(_judged, dataset, rule), progress):
            np.add(totals, counts, out=totals)
            yield mask

    selection = Selection.of_shards(masks(), dataset.counts)
    texts = (*rule.clauses, rule.text)
    rows = [ClauseCounts(text, *row) for text, row in zip(texts, totals.tolist(), strict=True)]
    return Explanation(tuple(rows[:-1]), rows[-1]), selection


def _judged(dataset: Any, rule: Rule, shard: int) -> tuple[Mask, IntArray]:
    """Return which samples of a shard fulfil a rule.

    Returns:
        The mask, and int64 [clauses + 1, 3]: how many pass, fail and are NULL, all together last.
    """
    import pyarrow.compute as pc

    from mmstream.dataset.columns import read_columns

    shown = _shown(dataset, shard)
    counts = np.zeros((len(rule.clauses) + 1, 3), dtype=np.int64)
    if shard and not shown.any():  # shard 0 also tells which columns there are
        return shown, counts
    truths = rule.truths(read_columns(dataset, shard, rule.names))
    truths.append(reduce(pc.and_kleene, truths))
    mask = shown
    for number, truth in enumerate(truths):
        mask = truth.fill_null(False).to_numpy(zero_copy_only=False) & shown
        num_null = int((truth.is_null().to_numpy(zero_copy_only=False) & shown).sum())
        counts[number] = mask.sum(), shown.sum() - mask.sum() - num_null, num_null
    return mask, counts


def _of_shards(dataset: Any, function: Callable[[int], T], progress: bool) -> Iterator[T]:
    """Yield what a function makes of each shard, in their order, from several threads."""
    from tqdm import tqdm

    num_shards, hidden = dataset.num_shards, None if progress else True
    with (
        ThreadPoolExecutor(NUM_THREADS) as pool,
        tqdm(total=num_shards, unit="shard", disable=hidden) as bar,
    ):
        for start in range(0, num_shards, SHARDS_AT_ONCE):
            shards = range(start, min(start + SHARDS_AT_ONCE, num_shards))
            for result in pool.map(function, shards):
                bar.update()
                yield result


def draws_by(
    dataset: Any, seed: int, by: str, own_draws: Iterable[npt.NDArray[np.float64]]
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield a random number for each sample of each shard, the same for equal values of a column.

    Args:
        dataset: The dataset.
        seed: Of the numbers.
        by: The column.
        own_draws: The numbers of samples without a value.
    """
    from mmstream.dataset.columns import read_columns, without_point

    values = _of_shards(dataset, lambda shard: read_columns(dataset, shard, [by])[by], True)
    for draws, column in zip(own_draws, values, strict=True):
        for index, value in enumerate(map(without_point, column.to_pylist())):
            if value is not None:
                draws[index] = (xxh3_64_intdigest(f"{seed}\0{value}".encode()) >> 11) * 2.0**-53
        yield draws


def _shown(dataset: Any, shard: int) -> Mask:
    """Return bool [its samples]: which samples of a shard a dataset or view shows."""
    if dataset.selection is None:
        return np.ones(int(dataset.counts[shard]), dtype=np.bool_)
    mask: Mask = dataset.selection.mask(shard)
    return mask


def _within(dataset: Any, selection: Selection, what: str) -> Any:
    """Return the samples of a selection that a dataset or view shows, as a view."""
    chosen = selection if dataset.selection is None else dataset.selection & selection
    view = dataset.with_selection(chosen)
    if not len(view):
        raise ConfigError(
            f"{what}: {selection.num_chosen:,} samples of the dataset, and none of the "
            f"{len(dataset):,} that this view shows: choose from the whole dataset"
        )
    return view


def having_keys(
    dataset: Any,
    keys_file: str,
    *,
    column: Literal["key", "id"] = "key",
    allow_unknown: bool = False,
    erased: Callable[[str], Sequence[tuple[str, int]]] = lambda _: (),
    progress: bool = True,
) -> tuple[Any, set[str]]:
    """Return a view of the samples that a file names, and which of its lines are of no sample.

    Keys are read from the sidecars, and where these lack some, from the headers of the tars.

    Args:
        dataset: The dataset or view.
        keys_file: A local file with one key a line.
        column: "id": the lines are ids of rows, which only sidecars have.
        allow_unknown: Some lines may be of no sample.
        erased: Returns the erased samples that had a key, by the names of their shards.
        progress: Show a progress bar (on a terminal only).

    Raises:
        ConfigError: Some lines are of no sample, or there is no line.
    """
    try:
        lines = Path(keys_file).read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{escaped(keys_file)}: is not UTF-8 ({error}): one key a line") from None
    wanted = frozenset(line.removesuffix("\r") for line in lines) - {""}  # U+2028 is of a key
    unknown = {line for line in wanted if not erased(line)}
    erased_of: dict[str, list[int]] = {}
    for name, index in (place for line in wanted for place in erased(line)):
        erased_of.setdefault(name, []).append(index)

    def look_up(shard: int) -> tuple[Mask, set[str]]:
        mask = _shown(dataset, shard)
        if column == "key":
            values = keys_of_shard(dataset, shard)
        else:
            from mmstream.dataset.columns import read_columns

            values = read_columns(dataset, shard, [column])[column].to_pylist()
        mask &= np.array([value in wanted for value in values], dtype=np.bool_)
        known = {values[index] for index in np.flatnonzero(mask)}
        mask[erased_of.get(dataset.name_of(shard), [])] = True
        return mask, known

    def masks() -> Iterator[Mask]:
        for mask, known in _of_shards(dataset, look_up, progress):
            unknown.difference_update(known)
            yield mask

    selection = Selection.of_shards(masks(), dataset.counts)
    if not wanted:
        raise ConfigError(f"{escaped(keys_file)}: holds no {column}: give one a line")
    if unknown and not allow_unknown:
        named = ", ".join(escaped(repr(key)) for key in sorted(unknown)[:MAX_NAMED])
        more = ", ..." * (len(unknown) > MAX_NAMED)
        raise ConfigError(
            f"{column}s: {len(unknown):,} of {len(wanted):,} are of no sample of "
            f"{escaped(dataset.store.url)}: {named}{more}; give one a line, as "
            "`mmstream info` shows keys"
        )
    return dataset.with_selection(selection), unknown


def chosen(
    data: Any,
    *,
    select: str | None = None,
    keys_file: str | None = None,
    where: str | Function | None = None,
    sample: float | None = None,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    seed: int = 0,
    by: str | None = None,
    world: World | None = None,
    recompute: bool = False,
) -> Any:
    """Return the view that the options of a command choose, one after the other in this order.

    Raises:
        ConfigError: The data is a mixture, or an option cannot be fulfilled.
    """
    given = {"select": select, "keys_file": keys_file, "where": where, "sample": sample}
    names = [name for name, value in {**given, "limit": limit}.items() if value is not None]
    if names and not hasattr(data, "with_selection"):
        raise ConfigError(
            f"{names[0]}={given.get(names[0], limit)!r}: a mixture has a choice for each source; "
            'make it in Python, mm.Mixture({"a": (dataset.where(...), 1), ...})'
        )

    def left(name: str, view: Any) -> Any:
        if not len(view):
            raise ConfigError(f"{name}={given.get(name, limit)!r}: leaves no sample")
        return view

    if select is not None:
        data = left("select", data.select(select))
    if keys_file is not None:
        options = ("--keys-file", keys_file, "--name", "NAME")
        _refuse_ranks(f"keys_file={keys_file!r}", data, options, world)
        data = left("keys_file", having_keys(data, keys_file)[0])
    if where is not None and recompute:  # whatever is stored
        rule = rule_of(where, columns)
        data = data.with_selection(evaluated(data, rule, progress=True)[0])
    elif where is not None:
        data = data.where(where, columns=columns, world=world)
    if sample is not None:
        data = left("sample", data.sample(sample, seed, by=by))
    return data if limit is None else left("limit", data[:limit])


# -- stored selections -----------------------------------------------------------------------------

PREFIX = "mmstream.select."

VERSION = 1

MAX_RECORD_BYTES = 1 << 20

_CURE = "run `mmstream select` again with --overwrite"
_DIGEST = "^[0-9a-f]{32}$"


@dataclass(frozen=True)
class Record:
    """A small file that leads to a set of samples."""

    version: int
    digest: Annotated[str, msgspec.Meta(pattern=_DIGEST)]
    """Of the set: `Selection.digest`."""
    chosen_by: str
    """How the samples were chosen, for people."""
    num_chosen: int
    num_samples: int
    """Stored samples of the corpus."""
    num_shards: Annotated[int, msgspec.Meta(ge=1)]
    corpus: dict[str, str | int | None]
    """The identity of the corpus."""


def select(dataset: Any, name: str) -> Any:
    """Return a view of the samples that are stored under a name. See `Dataset.select`."""
    require_name(name)
    selection = _stored(dataset, lambda _: f"{PREFIX}name.{name}.json", ("--name", name))
    return _within(dataset, selection, f"select {escaped(name)}")


def _stored(
    dataset: Any, pointer_of: Callable[[Any], str], options: Sequence[str] = ()
) -> Selection:
    """Return the set to which a small file beside the index leads. Of a union, each folder has one.

    Args:
        dataset: The dataset.
        pointer_of: The name of the small file, from a dataset of one folder.
        options: Of the command that writes it.
    """
    if dataset.folders:
        return Selection.joined([_stored(own, pointer_of, options) for own in dataset.folders])
    store, pointer = dataset.index_store, pointer_of(dataset)
    url = store.url_of(pointer)
    try:
        return _opened(dataset, _read(store, pointer), url)
    except FileNotFoundError:
        command = shlex.join(["mmstream", "select", store.url, *options])
        raise FileNotFoundError(
            f"{url}: no such selection; `{command} --where CONDITION` writes it"
        ) from None


def store_selection(
    dataset: Any, chosen_by: str, *, text: str | None, name: str | None, overwrite: bool
) -> Record:
    """Write the samples that a view shows beside the index, and what leads to them.

    Args:
        dataset: The view.
        chosen_by: How the samples were chosen, for people.
        text: Finds them again: a condition that all of them fulfil and no others do, or one of
            `split_texts`. None: only the name finds them.
        name: A name for people.
        overwrite: Another set may have the name.

    Raises:
        ConfigError: The name is taken, or cannot stand in the name of a file.
        LockedError: Another process writes there.
        StorageError: The storage failed after retries.
    """
    store = dataset.index_store
    selection = dataset.selection or Selection.of_all(dataset.counts)
    record = Record(
        VERSION,
        selection.digest,
        chosen_by,
        selection.num_chosen,
        int(dataset.counts.sum()),
        dataset.num_shards,
        dataset.shards_identity,
    )
    pointers = [] if text is None else [_where_name(dataset, text)]
    with write_lock(store, "select"):
        if name is not None:
            require_name(name)
            pointers.append(f"{PREFIX}name.{name}.json")
            if not overwrite and store.exists(pointers[-1]):
                _require_same(_read(store, pointers[-1]), record, name)
        with store.create(PREFIX + record.digest) as file:
            file.write(selection.counts.astype("<i8").tobytes())
            file.write(selection.bits.data)
        content = msgspec.json.format(msgspec.json.encode(asdict(record)), indent=2) + b"\n"
        for pointer in pointers:
            store.write(pointer, seal(content))
    return record


def _require_same(taken: Record, record: Record, name: str) -> None:
    if taken.digest != record.digest:
        raise ConfigError(
            f"name {escaped(name)}: is taken by {taken.num_chosen:,} of {taken.num_samples:,} "
            f"samples ({escaped(taken.chosen_by)}), and these are {record.num_chosen:,} others of "
            f"{record.num_samples:,}: give another name, or overwrite=True"
        )


def forget_conditions(dataset: Any) -> None:
    """Remove what was stored for conditions, because columns have changed. Named ones stay."""
    for name in dataset.index_store.list():
        if name.startswith(f"{PREFIX}where."):
            dataset.index_store.remove(name)


def stored_names(dataset: Any) -> dict[str, Record]:
    """Return what is stored under names, by name. Damaged ones are left out.

    Raises:
        StorageError: The storage failed after retries.
    """
    records, prefix = {}, f"{PREFIX}name."
    for file in dataset.index_store.list():
        if file.startswith(prefix):
            with suppress(ManifestError):
                records[file.removeprefix(prefix).removesuffix(".json")] = _read(
                    dataset.index_store, file
                )
    return records


def forget_split(dataset: Any, fraction: float, seed: int) -> None:
    """Remove what leads to the stored parts of a split by media."""
    for text in split_texts(fraction, seed):
        dataset.index_store.remove(_where_name(dataset, text))


def _where_name(dataset: Any, text: str) -> str:
    """Return the name of the file that leads to the samples that fulfil a condition."""
    identity = dataset.shards_identity
    content = msgspec.json.encode([text, identity["corpus"], identity["sizes"]])
    return f"{PREFIX}where.{hashlib.sha256(content).hexdigest()[:32]}.json"


def _read(store: Store, name: str) -> Record:
    """Return a record; errors as `read_sealed`."""
    return read_sealed_as(store, name, MAX_RECORD_BYTES, Record, newest=VERSION, cure=_CURE)


def _opened(dataset: Any, record: Record, url: str) -> Selection:
    """Return the set that a record leads to.

    Raises:
        ManifestError: It is of another corpus or an older one, missing or damaged.
    """
    num_shards = record.num_shards
    difference, present = "", dataset.shards_identity
    if num_shards < dataset.num_shards:
        difference = "shards were appended since"
        first = dataset.corpus.first_shards(num_shards).identity()
        present = {key: first[key] for key in present}
    if num_shards > dataset.num_shards or differing_keys(record.corpus, present):
        difference = "it is of another corpus"
    if difference:
        raise ManifestError(
            f"{url}: chooses from {record.num_samples:,} samples in {num_shards:,} shards, and the "
            f"dataset has {int(dataset.counts.sum()):,} in {dataset.num_shards:,}: {difference}; "
            f"{_CURE}"
        )
    try:
        return open_set(dataset.index_store, record.digest, dataset.counts)
    except FileNotFoundError:
        name = dataset.index_store.url_of(PREFIX + record.digest)
        raise ManifestError(f"{name}: is missing, and {url} leads to it; {_CURE}") from None


def open_set(store: Store, digest: str, counts: IntArray, *, check: bool = True) -> Selection:
    """Return a stored set, whose bits are mapped.

    Args:
        store: Where it lies.
        digest: Names it.
        counts: int64 [num_shards], samples of each shard.
        check: Compare its bytes with the digest.

    Raises:
        FileNotFoundError: It is not stored.
        ManifestError: It is damaged, or of other shards.
        StorageError: The storage failed after retries.
    """
    url, num_shards = store.url_of(PREFIX + digest), len(counts)
    num_bytes = 8 * num_shards + num_bit_bytes(counts)
    try:
        data = map_whole(store, IndexPart(PREFIX + digest, num_bytes, digest, 0, num_shards - 1))
    except (ShardError, ReplacedError, NotAFileError) as error:
        raise ManifestError(f"{url}: is damaged, or of other shards ({error}); {_CURE}") from None
    stored_counts = np.frombuffer(data, "<i8", num_shards)
    bits = np.frombuffer(data, np.uint8, offset=8 * num_shards)
    reopen = partial(open_set, store, digest, counts, check=False)
    selection = Selection(counts, bits, reopen)
    if check:
        if not np.array_equal(stored_counts, counts):
            raise ManifestError(
                f"{url}: is of shards with {int(stored_counts.sum()):,} samples, and these have "
                f"{int(counts.sum()):,}; {_CURE}"
            )
        if selection.digest != digest or not selection.is_whole:
            raise ManifestError(f"{url}: its bytes are not those of its name; {_CURE}")
    selection.__dict__["digest"] = digest
    return selection


def saved_corpus(dataset: Any, identity: Mapping[str, Any]) -> Corpus | None:
    """Return the corpus of a saved state with its selection, where that is stored.

    Raises:
        ManifestError, StorageError: As `open_set`.
    """
    saved, num_shards = identity.get("selection"), identity.get("num_shards")
    digest = saved.get("digest") if isinstance(saved, Mapping) else None
    if not isinstance(digest, str) or not re.fullmatch(_DIGEST, digest) or dataset.folders:
        return None
    if type(num_shards) is not int or not 0 < num_shards <= dataset.num_shards:
        return None
    corpus: Corpus = dataset.corpus.first_shards(num_shards, keep_selection=False)
    try:
        return replace(corpus, selection=open_set(dataset.index_store, digest, corpus.counts))
    except FileNotFoundError:
        return None


# -- a split in which no medium is in both parts: `Dataset.split(by_media=True)` -------------------
#
# hashes of media, from the sidecars -> `sides_of` -> two selections
#
# Samples are looked at in stored order. The first one with a medium draws its part, by the hash of
# its first medium. Later ones with this medium follow it, and bring their other media there. So
# samples that are appended move none of those before them.
#
# Example: of A with medium 1, B with 2, C with 2 and 3, and D with 3, the last three are in one
# part. E has 1 and 2. Where A and B are in different parts, E is in neither.


def split_by_media(
    dataset: Any,
    fraction: float,
    seed: int,
    own_draws: Iterable[npt.NDArray[np.float64]],
    world: World | None,
) -> tuple[Any, Any]:
    """Return two views without a common medium. See `Dataset.split`.

    Args:
        dataset: The dataset. Samples that a view leaves out count too: they may join others.
        fraction: The share of the first part.
        seed: Of the draws.
        own_draws: The numbers of samples without media, by shard.
        world: As `Dataset.where` has it.
    """
    parts: list[Selection] = []
    if not dataset.folders:  # those of folders do not know which media another folder has
        with suppress(FileNotFoundError):
            parts = [
                _stored(dataset, partial(_where_name, text=text))
                for text in split_texts(fraction, seed)
            ]
    if not parts:
        words = ["--sample", str(fraction), "--by-media", *(["--seed", str(seed)] if seed else [])]
        _refuse_ranks("split by_media", dataset, [] if dataset.folders else words, world)
        parts = _parts_by_media(dataset, fraction, seed, own_draws)
    first, second = (
        dataset.with_selection(dataset.selection & part if dataset.selection else part)
        for part in parts
    )
    return first, second


def split_texts(fraction: float, seed: int) -> tuple[str, str]:
    """Return what names the two parts of a split by media, as a text does for a condition."""
    text = f"part of a split by media, {fraction!r}, seed {seed}"
    return f"first {text}", f"second {text}"


def _parts_by_media(
    dataset: Any, fraction: float, seed: int, own_draws: Iterable[npt.NDArray[np.float64]]
) -> list[Selection]:
    from mmstream.dataset.columns import read_media

    num_media, media = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for of_samples, hashes in _of_shards(dataset, partial(read_media, dataset), progress=True):
        num_media.append(of_samples)
        media.append(hashes)
    draws = np.concatenate([np.zeros(0), *own_draws])
    sides = sides_of(np.concatenate(num_media), np.concatenate(media), draws, fraction, seed)
    num_first, num_neither = int((sides == 1).sum()), int((sides == NEITHER).sum())
    if num_neither:
        logger.warning(
            "split by media: %s in neither part, because media of both are in them",
            f"{num_neither:,} of {count_text(len(sides), 'sample')} are",
        )
    expected, least = fraction * len(sides), min(fraction, 1 - fraction) * len(sides)
    if abs(num_first - expected) > max(least / 2, 4 * least**0.5):
        logger.warning(
            "split by media: the first part has %s, not %.3g of them, because many share media, "
            "such as a placeholder",
            f"{num_first:,} of {count_text(len(sides), 'sample')}",
            fraction,
        )
    of_shards = np.split(sides, np.cumsum(dataset.counts)[:-1])
    return [Selection.of_shards((s == side for s in of_shards), dataset.counts) for side in (1, 0)]


NEITHER = -1


def sides_of(
    num_media: IntArray,
    media: npt.NDArray[np.uint64],
    draws: npt.NDArray[np.float64],
    fraction: float,
    seed: int,
) -> npt.NDArray[np.int8]:
    """Return the part of each sample: int8 [num_samples], 1 the first, 0 the second, or `NEITHER`.

    Args:
        num_media: int64 [num_samples], media of each sample.
        media: uint64 [their sum], hashes of the media of all samples.
        draws: float64 [num_samples] from 0 to 1, the draws of samples without media.
        fraction: The share of the first part.
        seed: Each seed gives other parts.

    Examples:
        >>> media = np.array([1, 2, 2, 3, 3], dtype=np.uint64)
        >>> sides_of(np.array([1, 1, 2, 1]), media, np.zeros(4), 0.5, seed=0).tolist()
        [0, 1, 1, 1]
    """
    starts, has_media = np.cumsum(num_media) - num_media, num_media > 0
    sides = (draws < fraction).astype(np.int8)
    sides[has_media] = _draws_of(media[starts[has_media]], seed) < fraction
    _, numbers, counts = np.unique(media, return_inverse=True, return_counts=True)
    owners = np.repeat(np.arange(len(num_media)), num_media)
    side_of: dict[int, int] = {}  # of media that come more than once, and of those beside them
    for sample in np.unique(owners[counts[numbers] > 1]).tolist():
        start = starts[sample]
        own = numbers[start : start + num_media[sample]].tolist()
        known = {side_of[number] for number in own if number in side_of} or {int(sides[sample])}
        if len(known) > 1:
            sides[sample] = NEITHER
        else:
            sides[sample] = side = known.pop()
            side_of.update(dict.fromkeys(own, side))
    return sides


def _draws_of(media: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.float64]:
    """Return float64 [n] from 0 to 1: a random number for each hash."""
    words = media ^ random_words(1, seed, "split by media")
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # those of SplitMix64
        words = (words ^ (words >> np.uint64(30))) * np.uint64(factor)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


# -- the samples of each bucket of a dataset, and the order over them ------------------------------
#
# Each bucket is what `Dataset.where` says of its condition, and ``mmstream select URL --buckets``
# stores it as such. The columns are read once for all buckets.


def bucket_selections(
    dataset: Any,
    buckets: Buckets,
    *,
    world: World | None = None,
    recompute: bool = False,
) -> list[Selection]:
    """Return the samples of each bucket of a dataset or view.

    Args:
        dataset: The dataset.
        buckets: Their column and edges.
        world: As `Dataset.where`.
        recompute: Ignore stored selections.

    Raises:
        ConfigError: There is no such column, it does not compare with the edges, or there are
            several ranks and nothing is stored.
        ManifestError: What is stored is damaged.
        ShardError, StorageError: Columns cannot be read.
    """
    rules = [rule_of(condition) for condition in buckets.conditions]
    if len(rules[0].names) != 1:
        raise ConfigError(f"Buckets({buckets.column!r}): name one column")
    with suppress(FileNotFoundError):
        if not recompute:
            return [_stored(dataset, partial(_where_name, text=rule.text)) for rule in rules]
    shapes = ("x".join(map(str, edge)) for edge in buckets.edges if isinstance(edge, tuple))
    edges = ",".join(shapes if buckets.has_shapes else map(str, buckets.edges))
    options = ("--buckets", buckets.column, "--edges", edges)
    _refuse_ranks(f"Buckets({buckets.column!r})", dataset, options, world)
    # A byte a sample, because each selection asks for the masks of all shards.
    numbers = list(_of_shards(dataset, partial(_bucket_numbers, dataset, rules), progress=True))
    return [
        Selection.of_shards((of_shard == number for of_shard in numbers), dataset.counts)
        for number in range(len(rules))
    ]


def _bucket_numbers(dataset: Any, rules: Sequence[Rule], shard: int) -> npt.NDArray[np.uint8]:
    """Return the number of the bucket of each sample of a shard; 255: it is in none."""
    import pyarrow.compute as pc

    from mmstream.dataset.columns import read_columns

    shown = _shown(dataset, shard)
    numbers = np.full(shown.size, 255, dtype=np.uint8)
    if shard and not shown.any():  # as in `_judged`
        return numbers
    columns = read_columns(dataset, shard, rules[0].names)
    for number, rule in enumerate(rules):
        truth = reduce(pc.and_kleene, rule.truths(columns))
        numbers[truth.fill_null(False).to_numpy(zero_copy_only=False) & shown] = number
    return numbers


def store_buckets(dataset: Any, buckets: Buckets, *, overwrite: bool) -> list[int]:
    """Store the samples of each bucket beside the index. Return how many they are.

    Raises:
        ConfigError, ShardError, StorageError: As `bucket_selections`.
        LockedError: Another process writes there.
    """
    selections = bucket_selections(dataset, buckets, world=World(), recompute=overwrite)
    for condition, selection in zip(buckets.conditions, selections, strict=True):
        view = dataset.with_selection(selection)
        store_selection(
            view, condition, text=rule_of(condition).text, name=None, overwrite=overwrite
        )
    return [selection.num_chosen for selection in selections]


def bucket_order(dataset: Any, buckets: Buckets, **settings: Any) -> BucketOrder:
    """Return the order of a dataset or view with buckets. Rank 0 logs what takes no part.

    Settings are those of `Order.from_counts`.

    Raises:
        ConfigError: Impossible settings, or fewer samples than one step needs. As
            `bucket_selections`.
        ManifestError, ShardError, StorageError: As `bucket_selections`.
    """
    selections = bucket_selections(dataset, buckets)
    corpus = dataset.corpus
    order = BucketOrder.from_corpus(corpus, buckets, selections, **settings)
    if resolve_world(None).rank:
        return order
    num_outside = corpus.num_samples - order.num_samples
    if num_outside:
        limit = "" if buckets.has_shapes else f", or it is above {buckets.edges[-1]}"
        logger.warning(
            "buckets of %s: %s are in no bucket and left out, because the value is not known "
            "(NULL)%s",
            buckets.column,
            f"{num_outside:,} of {count_text(corpus.num_samples, 'sample')}",
            limit,
        )
    filled = [
        edge
        for edge, selection in zip(buckets.edges, selections, strict=True)
        if selection.num_chosen
    ]
    if len(filled) == 1 < len(selections) and not buckets.has_shapes:
        logger.warning(
            "buckets of %s: all samples are in that of %s; are edges in the unit of the column?",
            buckets.column,
            filled[0],
        )
    # Pictures of joined shapes are cropped to one of them.
    level = logging.WARNING if buckets.has_shapes else logging.INFO
    for edge, _, _, joined in order.buckets:
        if len(joined) > 1:
            logger.log(
                level,
                "buckets of %s: %s also takes the samples of %s, too few for min_steps=%d steps",
                buckets.column,
                edge,
                ", ".join(str(other) for other in joined if other != edge),
                buckets.min_steps,
            )
    return order


def saved_bucket_order(dataset: Any, identity: Mapping[str, Any]) -> BucketOrder:
    """Return the order with buckets that a saved state names.

    Raises:
        StateError: The state belongs to another dataset, or its buckets have other samples now.
        ManifestError, ShardError, StorageError: As `bucket_selections`.
    """
    buckets = buckets_of(identity)
    selections = bucket_selections(dataset.with_selection(None), buckets, world=World())
    try:
        return BucketOrder.from_saved(identity, dataset.corpus, buckets, selections)
    except StateError:
        corpus = saved_corpus(dataset, identity)  # of a view that is stored
        if corpus is None:
            raise
    return BucketOrder.from_saved(identity, corpus, buckets, selections)
