"""The page of problems: rejects, quarantine, the bad list, takedowns, duplicates and leaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmstream.converting.duplicates import Duplicates, find_duplicates, find_leaks
from mmstream.converting.report import REJECTS_NAME, Reject, all_rejects
from mmstream.dataset.bad_list import read_listed
from mmstream.dataset.columns import read_columns
from mmstream.dataset.dataset import Dataset
from mmstream.errors import ConfigError, ManifestError, MMStreamError, escaped, where
from mmstream.view.content import Content, Source
from mmstream.view.pages import Pager, number_of, show, tiles_of

PAGE_ROWS = 50
"""Rejects and records of a page."""

PAGE_TILES = 24
"""Samples, and pairs, of a page."""

KINDS = {
    "media": "the same picture, video or recording",
    "text": "the same text",
    "pair": "the same media and the same text",
    "near": "pictures that look alike",
}
"""Kinds of duplicates."""

LEAK_KINDS = {name: KINDS[name] for name in ("media", "near", "text")} | {"id": "the same id"}
"""Kinds of what two datasets share."""


def problems(request: Request) -> Response:
    """Return the numbers of all kinds of problems, and one kind of them in detail."""
    content, query = request.app.state.content, request.query_params
    source = content.source(query.get("source", ""))
    kind = query.get("kind", "")
    if kind and kind not in _DETAILS:
        raise ConfigError(f"kind {escaped(kind)}: must be among {', '.join(_DETAILS)}")
    details = _DETAILS[kind](request, source) if kind else {}
    return show(
        request,
        "problems.html",
        source=source.name,
        sources=list(content.sources),
        kind=kind,
        duplicate_kinds=KINDS,
        leak_kinds=LEAK_KINDS,
        others=[other.url for other in content.others],
        run=content.run,
        counts=_counts(content, source),
        details=details,
    )


def _counts(content: Content, source: Source) -> dict[str, object]:
    """Return how many there are of each kind, or why that is not known."""
    dataset = source.dataset
    counts: dict[str, Callable[[], int]] = {
        "rejects": lambda: sum(1 for _ in _rejects(dataset)),
        "quarantine": lambda: sum(1 for _ in _quarantine(content)),
        "bad": lambda: len(read_listed(dataset, "bad")),
        "takedowns": lambda: sum(len(takedown.refs) for takedown in dataset.takedowns),
        "dropped": lambda: len(read_listed(dataset, "duplicates")),
    }
    known: dict[str, object] = {}
    for name, count in counts.items():
        try:
            known[name] = count()
        except (MMStreamError, OSError) as error:
            known[name] = str(error)
    return known


# -- rejects and records of runs -------------------------------------------------------------------


def _rejects(dataset: Dataset) -> Iterator[Reject]:
    """Yield the rows that became no sample, of all folders of a dataset."""
    for folder in dataset.folders or (dataset,):
        try:
            yield from all_rejects(folder.store)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError as error:
            url = folder.store.url_of(REJECTS_NAME)
            raise ManifestError(f"{url}: holds no rejects ({error})") from None


def _rejects_page(request: Request, source: Source) -> dict[str, Any]:
    """Return rejects, of one row or of those whose reason holds a text."""
    row, text = request.query_params.get("row", "").strip(), request.query_params.get("text", "")
    rejects = [
        reject
        for reject in _rejects(source.dataset)
        if row in ("", str(reject.row)) and text in reject.reason
    ]
    pager = Pager.of(request, PAGE_ROWS, len(rejects))
    return {"pager": pager, "rejects": rejects[pager.start : pager.stop], "row": row, "text": text}


def _quarantine(content: Content) -> Iterator[dict[str, Any]]:
    """Yield the records of the quarantine files of the run; what a kill cut off is left out."""
    for path in sorted(content.run.glob("quarantine-rank*.jsonl")) if content.run else ():
        for line in path.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def _quarantine_page(request: Request, _source: Source) -> dict[str, Any]:
    """Return the samples that the run replaced, the last ones first, each with its reason."""
    content = request.app.state.content
    records = list(_quarantine(content))[::-1]
    pager = Pager.of(request, PAGE_TILES, len(records))
    known, unknown = [], []
    for record in records[pager.start : pager.stop]:
        address = where(str(record.get("shard")), record.get("index", -1))
        names = ("epoch", "step", "row")
        place = ", ".join(f"{name} {record.get(name)}" for name in names)
        note = f"{record.get('reason', '?')} ({place})"
        try:
            known.append((content.data.ref_of(address), note))
        except ConfigError as error:
            unknown.append(f"{address}: {note}; {error}")
    refs, notes = [ref for ref, _ in known], [note for _, note in known]
    return {"pager": pager, "tiles": tiles_of(content, refs, notes), "unknown": unknown}


# -- samples that no epoch has ---------------------------------------------------------------------


def _takedowns_page(request: Request, source: Source) -> dict[str, Any]:
    """Return what was taken down and why. The samples themselves are not shown."""
    rows = [
        (where(source.dataset.name_of(shard), index), takedown.reason)
        for takedown in source.dataset.takedowns
        for shard, index in takedown.refs.tolist()
    ]
    pager = Pager.of(request, PAGE_ROWS, len(rows))
    return {"pager": pager, "takedowns": rows[pager.start : pager.stop]}


def _tiles_page(
    request: Request, source: Source, kind: Literal["bad", "duplicates"], note: str
) -> dict[str, Any]:
    refs = read_listed(source.dataset, kind).tolist()
    pager = Pager.of(request, PAGE_TILES, len(refs))
    shown = [(source.first_shard + s, i) for s, i in refs[pager.start : pager.stop]]
    tiles = tiles_of(request.app.state.content, shown, [note] * len(shown))
    return {"pager": pager, "tiles": tiles}


# -- duplicates and leaks --------------------------------------------------------------------------


@lru_cache(4)
def _found(kind: str, dataset: Dataset, other: Dataset | None = None) -> Duplicates:
    """Return the duplicates of one kind, or what is shared with another dataset, from the sidecars.

    Raises:
        ConfigError: There are no sidecars, and all tars would have to be read.
    """
    for each in (dataset,) if other is None else (dataset, other):
        read_columns(each, 0, ["key"])
    if other is not None:
        return find_leaks(dataset, other, kinds=[kind], progress=False)
    kinds = [] if kind == "near" else [kind]
    return find_duplicates(dataset, kinds=kinds, near=kind == "near", progress=False)


def _duplicates_page(request: Request, source: Source) -> dict[str, Any]:
    """Return pairs of samples that hold the same, side by side."""
    of = _kind_of(request, KINDS, "pair")
    side = request.app.state.content, source
    return {"of": of} | _pairs(request, _found(of, source.dataset), of, (side, side))


def _leaks_page(request: Request, source: Source) -> dict[str, Any]:
    """Return samples of a source beside those of another dataset that hold the same."""
    of, number = _kind_of(request, LEAK_KINDS, "media"), number_of(request.query_params, "against")
    content = request.app.state.content
    other = content.other(number)
    found = _found(of, source.dataset, other.source("").dataset)
    sides = (content, source), (other, other.source(""))
    details = {"of": of, "against": number, "other_url": other.url}
    return details | _pairs(request, found, of, sides)


def _kind_of(request: Request, kinds: Mapping[str, str], default: str) -> str:
    of = request.query_params.get("of", default)
    if of not in kinds:
        raise ConfigError(f"of {escaped(of)}: must be among {', '.join(kinds)}")
    return of


def _pairs(
    request: Request, found: Duplicates, of: str, sides: Sequence[tuple[Content, Source]]
) -> dict[str, Any]:
    """Return a part of the pairs that were found.

    Args:
        request: Says which part.
        found: The pairs of one kind.
        of: This kind.
        sides: Where the first samples of the pairs are, and where the others are.
    """
    pager = Pager.of(request, PAGE_TILES, found.num_pairs[of])
    shown = list(islice(found.pairs([of]), pager.start, pager.stop))
    names = [(pair.first, pair.first_field) for pair in shown]
    names_again = [(pair.again, pair.again_field) for pair in shown]
    tiles = []
    for (content, source), of_side in zip(sides, (names, names_again), strict=True):
        places = {info.name: number for number, info in enumerate(source.dataset.manifest.shards)}
        refs = [(source.first_shard + places[name.shard], name.index) for name, _ in of_side]
        notes = [
            (field or "the whole sample" * (of == "pair"))
            + f", {pair.distance} of 256 bits differ" * (of == "near")
            for pair, (_, field) in zip(shown, of_side, strict=True)
        ]
        tiles.append(tiles_of(content, refs, notes))
    return {"pager": pager, "pairs": list(zip(*tiles, strict=True))}


_DETAILS: dict[str, Callable[[Request, Source], dict[str, Any]]] = {
    "rejects": _rejects_page,
    "quarantine": _quarantine_page,
    "bad": partial(_tiles_page, kind="bad", note="on the bad list"),
    "takedowns": _takedowns_page,
    "dropped": partial(_tiles_page, kind="duplicates", note="left out as a duplicate"),
    "duplicates": _duplicates_page,
    "leaks": _leaks_page,
}
