"""The pages of samples: the grid, one sample, and its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from itertools import compress, islice
from typing import Any

import numpy as np
import pyarrow.compute as pc
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mmstream.dataset.bad_list import read_listed
from mmstream.dataset.columns import read_rows
from mmstream.dataset.select import stored_names
from mmstream.display.html import MAX_FILE_BYTES, played_as, spectrogram_of
from mmstream.display.samples import sample_part
from mmstream.display.text import size_text
from mmstream.errors import ConfigError, MMStreamError, SampleError, where
from mmstream.media.types import BY_EXTENSION
from mmstream.reading.step import Job
from mmstream.types import Sample, SampleRef
from mmstream.view.content import Choice, Content
from mmstream.view.order import is_searched_whole, places_of
from mmstream.view.pages import (
    Pager,
    is_sound,
    link,
    number_of,
    player,
    show,
    tiles_of,
)

PAGE_SAMPLES = 24
"""Samples of a page of the grid."""

MAX_PAGE_BYTES = 96 << 20
"""What a page of the grid reads, about. It shows fewer samples where they are large."""

MAX_SOUNDS = 4
"""Sounds of a sample of which spectrograms are drawn."""

IMAGES = {
    extension: f"image/{'jpeg' if media_type.extension == 'jpg' else media_type.extension}"
    for extension, media_type in BY_EXTENSION.items()
    if media_type.kind == "image" and media_type.is_decoded
}
"""Media types of the pictures that a browser may show. SVG is none of them: it may hold scripts."""


# -- the grid --------------------------------------------------------------------------------------


def choice_of(request: Request, values: Mapping[str, str]) -> Choice:
    """Return the samples that an address or a form chooses."""
    names = ("source", "select", "where")
    choice: Choice = request.app.state.content.choice(*(values.get(name, "") for name in names))
    return choice


def grid(request: Request) -> Response:
    """Return a part of the samples that a condition chooses, and counts of their columns."""
    content = request.app.state.content
    choice = choice_of(request, request.query_params)
    dataset, source = choice.dataset, content.source(choice.source)
    mean_bytes = max(1, dataset.num_bytes // max(1, len(dataset)))
    size = max(1, min(PAGE_SAMPLES, MAX_PAGE_BYTES // mean_bytes))
    pager = Pager.of(request, size, len(dataset))
    local_refs = dataset.refs(np.arange(pager.start, pager.stop))
    refs = [(source.first_shard + shard, index) for shard, index in local_refs]
    tiles = tiles_of(content, refs)
    facets = content.facets(choice.source, choice.select, choice.where)
    selections, facets_problem = {}, ""
    counted: dict[str, dict[Any, int]] = {}
    try:
        selections = stored_names(source.dataset)
        counted = facets.grow()
    except (MMStreamError, OSError) as error:
        facets_problem = str(error)
    return show(
        request,
        "grid.html",
        choice=choice,
        sources=list(content.sources),
        pager=pager,
        tiles=tiles,
        facets=[
            (name, _values(choice, name, counts))
            for name, counts in counted.items()
            if sum(counts.values()) >= 2 * len(counts)  # ids of few samples tell nothing
        ],
        num_counted=facets.num_counted,
        facets_problem=facets_problem,
        columns=facets.names,
        selections=selections,
    )


def _values(choice: Choice, name: str, counts: Mapping[Any, int]) -> list[tuple[str, int, Markup]]:
    """Return the values of a column, how many samples have each, and a link to these samples."""
    values = []
    for value, count in sorted(counts.items(), key=lambda item: -item[1]):
        clause = f"{_name_text(name)} = {_value_text(value)}"
        clauses = f"({choice.where}) and {clause}" if choice.where else clause
        values.append((str(value), count, link(**{**choice.query, "where": clauses})))
    return values


def _name_text(name: str) -> str:
    """Return a column as a condition names it: ``json.lang``, ``json."my key"``."""
    first, _, key = name.partition(".")
    plain = re.fullmatch(r"\w*", key, re.ASCII)
    return name if plain else f'{first}."{key.replace(chr(34), chr(34) * 2)}"'


def _value_text(value: object) -> str:
    """Return a value as a condition has it."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower()


def find(request: Request) -> Response:
    """Lead to the sample that a key, or a line of a log, names."""
    content, text = request.app.state.content, request.query_params.get("q", "").strip()
    problems = []
    try:  # a key may have to be looked for in all shards
        return RedirectResponse(link("sample", *content.data.ref_of(text)), 303)
    except ConfigError as error:
        problems.append(str(error))
    for source in content.sources.values():
        try:
            shard, index = source.dataset.ref_of_key(text)
            return RedirectResponse(link("sample", source.first_shard + shard, index), 303)
        except KeyError as error:
            problems.append(str(error.args[0]))
    raise ConfigError("; ".join(problems))


# -- one sample ------------------------------------------------------------------------------------


def content_of(request: Request) -> Content:
    """Return the content that an address is about: what is shown, or another dataset.

    Raises:
        ConfigError: There is no such dataset.
    """
    content: Content = request.app.state.content
    return (
        content.other(request.path_params["other"]) if "other" in request.path_params else content
    )


def one(request: Request) -> Response:
    """Return all that is known of a sample."""
    content = content_of(request)
    ref = request.path_params["shard"], request.path_params["index"]
    values: dict[str, Any] = {}
    try:
        sample = content.read(*ref)
    except SampleError as error:
        values["problem"] = str(error)
    else:
        values["stored"] = sample_part(sample)
        files = {name: data for name, data in sample.items() if isinstance(data, bytes)}
        values["files"] = [
            (name, size_text(len(data)), link(*content.path, "file", *ref, name))
            for name, data in files.items()
        ]
        values["players"] = [
            player(content, ref, name) for name, data in files.items() if len(data) > MAX_FILE_BYTES
        ]
        sounds = islice(filter(is_sound, files), MAX_SOUNDS)
        values["spectrograms"] = [spectrogram_of(name, files[name]) for name in sounds]
    dataset, own_shard = content.locate(*ref)
    values["num_in_shard"] = int(dataset.counts[own_shard])
    values["lies"] = _lies(dataset, own_shard, ref[1])
    try:
        values["row"] = _row(dataset, own_shard, ref[1])
    except (MMStreamError, OSError) as error:
        values["row_problem"] = str(error)
    if not content.path:
        values |= _as_shown(request, content, ref)
        values["is_bad"] = (read_listed(dataset, "bad") == (own_shard, ref[1])).all(axis=1).any()
    name = where(content.data.name_of(ref[0]), ref[1])
    return show(request, "one.html", name=name, ref=ref, of=content, **values)


def _as_shown(request: Request, content: Content, ref: SampleRef) -> dict[str, Any]:
    """Return which steps show a sample, and what the model gets of it."""
    query = request.query_params
    epoch, ranks = number_of(query, "epoch"), number_of(query, "ranks", default=1, least=1)
    values: dict[str, Any] = {"epoch": epoch, "ranks": ranks}
    try:
        places = values["places"] = places_of(content, ref, epoch, ranks)
        values["searched_whole"] = is_searched_whole(content, epoch)
        values["unlike_run"] = content.unlike_run()
        if places and content.pipeline is not None:
            values |= _as_trained(content, ref, places[0].job)
    except (MMStreamError, OSError) as error:
        values["order_problem"] = str(error)
    return values


def _lies(dataset: Any, shard: int, index: int) -> list[tuple[str, str]]:
    """Return where the bytes of a sample lie, and their checksum."""
    columns = dataset.shards.indexes.columns(shard)
    start, stop = columns.offsets()[index : index + 2].tolist()
    facts = [
        ("shard", dataset.shards.url_of(shard)),
        ("bytes", f"{start:,} to {stop:,} ({size_text(stop - start)} of the tar)"),
    ]
    if columns.checksums is not None:
        facts.append(("CRC-32C", f"{int(columns.checksums[index]):08x}"))
    if (shard, index) in dataset.removed:
        facts.append(("taken down", dataset.removed[shard, index]))
    elif (dataset.bad == (shard, index)).all(axis=1).any():
        facts.append(("bad list", "no epoch has it"))
    return facts


def _row(dataset: Any, shard: int, index: int) -> list[tuple[str, object]]:
    """Return what the sidecar says of a sample: its source row, and what its media are."""
    table = read_rows(dataset, shard)
    rows = table.filter(pc.equal(table["index"], index)).to_pylist()
    row = rows[0] if rows else {}
    media = row.pop("media", None) or ()
    facts = [*row.items()]
    for number, medium in enumerate(media):
        facts += [(f"media[{number}].{name}", value) for name, value in medium.items()]
    return [
        (name, value.hex() if isinstance(value, bytes) else value)
        for name, value in facts
        if value is not None
    ]


def _as_trained(content: Content, ref: SampleRef, job: Job) -> dict[str, object]:
    """Return a sample as its decoders make it, and as a step of the pipeline gets it."""
    from mmstream.batching.collate import plain_tensors
    from mmstream.decoding.sample import decode_sample
    from mmstream.pipeline import PipelineRunner

    pipeline = content.pipeline
    tokenizer = getattr(getattr(pipeline.decode, "text", None), "tokenizer", None)
    shown: dict[str, object] = {}
    try:
        with plain_tensors():
            decoded = decode_sample(content.read(*ref), pipeline.decode)
            shown["decoded"] = sample_part(decoded, tokenizer=tokenizer)
            with closing(PipelineRunner(pipeline)) as runner:
                lineage, samples = runner.decoded(job)
                chosen = [shown_ref == ref for shown_ref in lineage.shown]
                for sample in compress(samples, chosen):
                    shown["model"] = sample_part(sample, tokenizer=tokenizer)
        reasons = [bad.reason for bad in lineage.bad]
        if "model" not in shown:
            shown["model_problem"] = f"another sample takes its row: {'; '.join(reasons)}"
    except Exception as error:  # the pipeline may hold any functions
        shown["model_problem"] = f"{type(error).__name__}: {error}"
    return shown


# -- files -----------------------------------------------------------------------------------------


def file(request: Request) -> Response:
    """Return a file of a sample. A browser shows pictures, plays recordings, and runs nothing."""
    params = request.path_params
    sample: Sample = content_of(request).read(params["shard"], params["index"])
    name = params["name"]
    data = sample.get(name)
    if name.startswith("__") or not isinstance(data, bytes):
        raise ConfigError(f"{name}: the sample has no such file")
    media_type = IMAGES.get(name.rpartition(".")[2]) or played_as(name)
    headers = {"Accept-Ranges": "bytes"}
    if media_type is None and _is_text(data):
        media_type = "text/plain; charset=utf-8"
    elif media_type is None:
        media_type = "application/octet-stream"
        headers["Content-Disposition"] = "attachment"
    asked = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", request.headers.get("range", ""))
    if asked is None:
        return Response(data, media_type=media_type, headers=headers)
    start = int(asked[1])
    stop = min(len(data), int(asked[2] or len(data)) + 1)
    if start >= stop:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Response(data[start:stop], 206, media_type=media_type, headers=headers)


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False
